"""What an operator can set about the HTTP surface."""

from __future__ import annotations

import os
from hashlib import blake2b, sha256
from hmac import compare_digest
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class ApiOptions(BaseModel):
    """HTTP options. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    api_keys: tuple[str, ...] = ()
    """Keys that may use the API (``Authorization: Bearer`` or ``x-api-key``). None anywhere: no key is asked for."""
    api_key_file: Path | None = None
    """File with one key a line; empty lines and lines that start with # are skipped. Read once, at start."""
    api_key_env: str = "EVERWARM_API_KEYS"
    """Environment variable with keys, one a line (as in ``api_key_file``) or comma-separated."""
    cors_origins: tuple[str, ...] = ()
    """Origins that browsers may call from; "*" allows all. None: no CORS headers."""
    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    """Longest request body; a longer one is refused with 413."""
    request_timeout_s: float | None = Field(default=None, gt=0)
    """Deadline of every request, seconds; ``x-request-timeout`` can only shorten it. None: none."""
    sse_keepalive_s: float | None = Field(default=15.0, gt=0)
    """A stream silent for so long sends a comment, which clients skip (Messages: a ping); seconds. None: never."""
    max_choices: int = Field(default=1024, ge=1)
    """Prompts times n in one request."""
    tokenize_inline_chars: int = Field(default=32_768, ge=0)
    """Longer texts are tokenized in a thread, so that other streams go on."""
    memo_bytes: int = Field(default=64 << 20, ge=0)
    """Tokenization memo at turn boundaries, bytes."""
    chat_template: str | None = None
    """Template source that replaces the checkpoint's."""
    tool_parser: Literal["auto", "hermes", "llama3_json", "mistral"] = "auto"
    """How the model writes tool calls; auto: as its chat template teaches, Hermes' way where it teaches none."""
    reasoning_parser: Literal["auto", "think", "none"] = "auto"
    """think: what stands in <think> tags becomes reasoning_content; auto: where the chat template knows the tags."""
    log_requests: bool = False
    """One line per request on the ``everwarm.access`` logger; never prompt text."""
    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://[^/\s]+")
    """OpenTelemetry collector that gets a span per request, by OTLP over HTTP, as http://HOST:4318; none: no spans."""
    metric_prefix: Literal["everwarm", "vllm"] = "everwarm"
    """``vllm`` gives metrics vLLM's names, for dashboards that look for them."""

    @field_validator("api_keys")
    @classmethod
    def _keys_have_text(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        if any(not key.strip() for key in keys):
            raise ValueError("an API key must not be empty")
        return keys

    def all_keys(self) -> list[str]:
        """Keys from the list, the file and the environment. Raises OSError when the file can't be read, ValueError
        when it holds no key."""
        keys = [*self.api_keys]
        if self.api_key_file is not None:
            in_file = keys_in(self.api_key_file.read_text(encoding="utf-8"))
            if not in_file:
                raise ValueError(f"api_key_file {self.api_key_file} holds no key")
            keys += in_file
        listed = os.environ.get(self.api_key_env, "").replace(",", "\n")
        return [*keys, *keys_in(listed)]


def keys_in(text: str) -> list[str]:
    """One key a line; empty lines and lines that start with # are skipped."""
    return [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


class KeyRing:
    """Accepted API keys, held as digests."""

    def __init__(self, keys: list[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in dict.fromkeys(keys)]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def salt(self, key: str) -> str | None:
        """The tenant salt of an accepted key, else None. Time doesn't depend on which key matches or how much of it."""
        digest = sha256(key.encode()).digest()
        accepted = False
        for known in self._digests:
            accepted |= compare_digest(known, digest)
        return blake2b(digest, digest_size=16, person=b"everwarm-tenant").hexdigest() if accepted else None


def narrowed_salt(principal: str, cache_salt: str | None) -> str:
    """A body's ``cache_salt`` separates further inside the principal's own space; it can never leave it."""
    if not cache_salt:
        return principal
    raw = len(principal).to_bytes(4, "little") + principal.encode() + cache_salt.encode()
    return blake2b(raw, digest_size=16, person=b"everwarm-narrow").hexdigest()
