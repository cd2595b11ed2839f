"""What an operator may set: the options of ``serve run cluster.app key=value`` and of a config file's ``args``."""

from __future__ import annotations

import difflib
import json
from typing import Any, Literal, get_args, get_origin

from pydantic import Field, ValidationInfo, field_validator, model_validator

from replica.config import EngineConfig
from router.api.options import ApiOptions
from router.dispatch import DispatchOptions
from router.streams import StreamsOptions


class AppConfig(EngineConfig, ApiOptions):
    """The engine's and the API's options flat beside the cluster's own.

    Every field has a default; unknown keys are refused. Lists may be given as comma-separated text or JSON.
    """

    model: str | None = None
    """A hub id, a directory of safetensors or a .gguf file; none: the embedded default (SmolLM2-135M-Instruct).
    ``stub:10ms`` serves a stub engine that emits one token per 10 ms and stream, for benches only."""
    served_model_name: str | None = None
    """Name in ``/v1/models`` and in requests; none: the last part of ``model``."""
    replicas: int = Field(2, ge=1, le=1024)
    """Engine replicas; with ``max_replicas``, how many there are at first."""
    min_replicas: int | None = Field(None, ge=1, le=1024)
    """Fewest replicas that autoscaling leaves; none: ``replicas``."""
    max_replicas: int | None = Field(None, ge=1, le=1024)
    """Most replicas that autoscaling starts; none: no autoscaling."""
    target_usage: float = Field(0.7, gt=0, le=1)
    """Autoscaling keeps replicas this busy on average: pages held, rows of the batch taken, or seconds of prefill
    waiting, whichever is most."""
    upscale_delay_s: float = Field(30.0, ge=0)
    """Load must ask for more replicas for so long, seconds."""
    downscale_delay_s: float = Field(600.0, ge=0)
    """Load must ask for fewer replicas for so long, seconds."""
    routers: int = Field(1, ge=1, le=256)
    """Router copies; each holds the whole prefix directory."""
    replica_cpus: float | Literal["auto"] = "auto"
    """CPUs that Ray books for a replica; auto: 1 on a GPU, else 0.1 (engine threads are set by ``threads``)."""
    replica_gpus: float | Literal["auto"] = "auto"
    """GPUs that Ray books for a replica; auto: 1 when ``device`` is (or resolves to) cuda, else 0."""
    router_resource: str | None = None
    """Custom Ray resource that a node must offer to get routers; none: any node."""
    replica_resource: str | None = None
    """Custom Ray resource that a node must offer to get replicas; none: any node."""

    token_plane_host: str = "auto"
    """Address on which a replica's token plane listens; auto: its node's address in the Ray cluster."""
    token_plane_ports: str = Field("0", pattern=r"^\d{1,5}(-\d{1,5})?$")
    """Port, or first-last, of which a replica takes the first that is free; 0: any."""
    drain_timeout_s: float = Field(120.0, gt=0, le=3600)
    """A replica or router that is asked to leave may finish its streams for so long, seconds."""
    health_period_s: float = Field(2.0, gt=0, le=60)
    """Seconds between Serve's health checks of a replica."""
    admit_wait_s: float = Field(5.0, ge=0)
    """A new request waits so long for a replica when none is admitted, then gets 503; seconds."""
    resume_wait_s: float = Field(60.0, ge=0)
    """A stream that lost its replica waits so long for another before it ends with an error; seconds."""
    max_ttft_s: float = Field(300.0, gt=0)
    """A request whose first token is predicted later than this is refused with 429; seconds."""

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
        annotation = cls.model_fields[str(info.field_name)].annotation
        choices = get_args(annotation)
        if isinstance(value, bool) and "true" in choices:
            return str(value).lower()
        if isinstance(value, str):
            if get_origin(annotation) is tuple:
                return _list_in(value)
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

    @field_validator("token_plane_ports")
    @classmethod
    def _ports_are_a_range(cls, value: str) -> str:
        first, last = port_range(value)
        if not 0 <= first <= last < 1 << 16:
            raise ValueError(f"{value!r} is no port range; first-last within 0-65535 is needed")
        return value

    @model_validator(mode="after")
    def _replicas_within_bounds(self) -> AppConfig:
        if self.max_replicas is None:
            for name in ("min_replicas", "target_usage", "upscale_delay_s", "downscale_delay_s"):
                if name in self.model_fields_set and getattr(self, name) is not None:
                    raise ValueError(f"{name} has no effect without max_replicas, which turns autoscaling on")
        elif not (self.min_replicas or self.replicas) <= self.replicas <= self.max_replicas:
            lowest = self.min_replicas or self.replicas
            raise ValueError(
                f"replicas = {self.replicas} must lie between min_replicas = {lowest} and "
                f"max_replicas = {self.max_replicas}"
            )
        return self

    def engine(self) -> EngineConfig:
        """The engine's share."""
        return EngineConfig(**{name: getattr(self, name) for name in EngineConfig.model_fields})

    def dispatch(self) -> DispatchOptions:
        """The router's share."""
        return DispatchOptions(
            streams=StreamsOptions(
                admit_wait_s=self.admit_wait_s, resume_wait_s=self.resume_wait_s, max_ttft_s=self.max_ttft_s
            )
        )

    def api(self) -> ApiOptions:
        """The HTTP surface's share."""
        return ApiOptions(**{name: getattr(self, name) for name in ApiOptions.model_fields})


def _list_in(text: str) -> tuple[Any, ...]:
    if not text.lstrip().startswith("["):
        return tuple(item.strip() for item in text.split(",") if item.strip())
    try:
        return tuple(json.loads(text))
    except ValueError as error:  # the text is not repeated: it may be keys
        raise ValueError(
            f"it begins as a JSON list and is none ({error}); allowed are JSON and text with commas"
        ) from None


def port_range(text: str) -> tuple[int, int]:
    """ "7400-7463" or "0" as (first, last)."""
    first, _, last = text.partition("-")
    return int(first), int(last or first)


def unknown_option(key: str, known: Any) -> str:
    """Says that ``key`` is no option and which valid name is nearest."""
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else f"; valid options: {', '.join(sorted(known))}"
    return f"unknown option {key!r}{hint}"
