"""POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator

from router.api.schemas.common import MAX_ID, MAX_LOGPROBS, GenerationRequest, Int, TokenId
from router.pages import ids_below

Ids = Annotated[list[TokenId], Field(min_length=1)]


def _ids_at_once(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """A plain list of ids passes as it is: trying what else a prompt may be takes a millisecond for 4,000 of them."""
    plain = isinstance(value, list) and value and [*map(type, value)].count(int) == len(value)
    return value if plain and ids_below(value, MAX_ID) else validate(value)


class CompletionRequest(GenerationRequest):
    """A prompt to continue."""

    prompt: Annotated[
        Annotated[str, Field(min_length=1)]
        | Ids
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
        | Annotated[list[Ids], Field(min_length=1)],
        WrapValidator(_ids_at_once),
    ]
    """Text, token ids, or a list of either; each prompt gets ``n`` choices, in order."""
    logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Log-probabilities of the answer's tokens, with so many of the likeliest."""
    echo: bool | None = None
    """Begin the answer with the prompt; with ``logprobs``, the prompt's log-probabilities too."""
    add_special_tokens: bool | None = None
    """Let the tokenizer add its own, such as a beginning-of-text token. Default true."""
