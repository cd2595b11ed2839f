"""What an operator may set: the options of ``serve run cluster.app key=value`` and of a config file's ``args``."""

from __future__ import annotations

import difflib
from typing import Any, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from replica.config import EngineConfig


class AppConfig(EngineConfig):
    """The engine's options flat beside the cluster's own. Every field has a default; unknown keys are refused."""

    model: str | None = None
    """A hub id, a directory of safetensors or a .gguf file; none: the embedded default (SmolLM2-135M-Instruct).
    ``stub:10ms`` serves a stub engine that emits one token per 10 ms and stream, for benches only."""
    served_model_name: str | None = None
    """Name in ``/v1/models`` and in requests; none: the last part of ``model``."""
    replicas: int = Field(2, ge=1, le=1024)
    """Engine replicas."""
    routers: int = Field(1, ge=1, le=256)
    """Router copies; each holds the whole prefix directory."""
    replica_cpus: float | Literal["auto"] = "auto"
    """CPUs that Ray books for a replica; auto: 1 on a GPU, else 0.1 (engine threads are set by ``threads``)."""
    replica_gpus: float | Literal["auto"] = "auto"
    """GPUs that Ray books for a replica; auto: 1 when ``device`` is (or resolves to) cuda, else 0."""

    token_plane_host: str = "auto"
    """Address on which a replica's token plane listens; auto: its node's address in the Ray cluster."""
    drain_timeout_s: float = Field(120.0, gt=0, le=3600)
    """A replica or router that is asked to leave may finish its streams for so long, seconds."""
    health_period_s: float = Field(2.0, gt=0, le=60)
    """Seconds between Serve's health checks of a replica."""
    stall_s: float = Field(30.0, gt=0)
    """A replica is unhealthy when its engine loop has not answered for so long, seconds."""
    max_inflight: int = Field(4096, ge=1)
    """Requests that one router has in the cluster at a time; one more gets 429."""
    max_body_bytes: int = Field(8 << 20, ge=1024)
    """Longest request body, bytes."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, raw: Any) -> Any:
        """Pydantic's own message names the key only; a typo deserves its nearest valid name."""
        if isinstance(raw, dict):
            for key in raw:
                if key not in cls.model_fields:
                    raise ValueError(unknown_option(str(key), cls.model_fields))
        return raw

    @field_validator("*", mode="before")
    @classmethod
    def _from_text(cls, value: Any, info: ValidationInfo) -> Any:
        """``key=value`` gives text and YAML gives booleans, while a Literal takes only the exact value."""
        choices = get_args(cls.model_fields[str(info.field_name)].annotation)
        if isinstance(value, bool) and "true" in choices:
            return str(value).lower()
        if isinstance(value, str):
            if type(None) in choices and value.strip().lower() in ("", "none"):
                return None
            if any(type(choice) is int for choice in choices) and value.isdecimal():
                return int(value)
        return value

    @field_validator("replica_cpus", "replica_gpus")
    @classmethod
    def _not_negative(cls, value: float | str) -> float | str:
        if isinstance(value, float) and value < 0:
            raise ValueError(f"{value} is negative")
        return value

    def engine(self) -> EngineConfig:
        """The engine's share."""
        return EngineConfig(**{name: getattr(self, name) for name in EngineConfig.model_fields})


def unknown_option(key: str, known: Any) -> str:
    """Says that ``key`` is no option and which valid name is nearest."""
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else f"; valid options: {', '.join(sorted(known))}"
    return f"unknown option {key!r}{hint}"
