"""POST /v1/completions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from router.api.schemas.common import MAX_LOGPROBS, GenerationRequest, Int, TokenId

Ids = Annotated[list[TokenId], Field(min_length=1)]


class CompletionRequest(GenerationRequest):
    """A prompt to continue."""

    prompt: (
        Annotated[str, Field(min_length=1)]
        | Ids
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
        | Annotated[list[Ids], Field(min_length=1)]
    )
    """Text, token ids, or a list of either; each prompt gets ``n`` choices, in order."""
    logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Log-probabilities of the answer's tokens, with so many of the likeliest."""
    echo: bool | None = None
    """Begin the answer with the prompt; with ``logprobs``, the prompt's log-probabilities too."""
    add_special_tokens: bool | None = None
    """Let the tokenizer add its own, such as a beginning-of-text token. Default true."""
