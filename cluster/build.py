"""From AppConfig to a Serve application, and what each of its processes loads."""

from __future__ import annotations

import inspect
import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import autoscale
from cluster.checkpoint import Checkpoint, load_card, locate, model_fingerprint, tokenizer_fingerprint
from cluster.config import AppConfig, port_range
from cluster.logs import logged
from replica.config import DeviceFacts, EngineConfig, ResolvedConfig, resolve
from router.api.options import ApiOptions
from router.dispatch import Dispatcher, DispatchOptions
from router.pages import RootFields

if TYPE_CHECKING:
    from ray.serve import Application

    from replica.batch import Runner
    from replica.grammar import Grammars
    from replica.loop import Engine
    from replica.server import TokenServer
    from router.api import Api

SECRET_VARIABLE = "EVERWARM_TOKEN_PLANE_SECRET"
MAX_ONGOING = 10_000
"""Requests that Serve lets into a router; the cluster's own limits come first."""
SAME_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}
"""A router's code shares Serve's event loop: one thread hop less each way. A replica's must not, since its health
checks have to be answered while the engine thread holds the interpreter."""


def build_app(config: AppConfig) -> Application:
    """Routers bound to replicas. Touches neither the model nor a GPU: this may run on a node that has none."""
    from ray import serve

    from replica.deployment import LINGER_S, ReplicaActor
    from router.deployment import FEED, RouterActor, current_app

    bound_secret, engine = secrets.token_hex(32), _engine_options(config)
    grace: dict[str, Any] = {
        "max_ongoing_requests": MAX_ONGOING,
        "graceful_shutdown_timeout_s": LINGER_S + config.drain_timeout_s + 5,
        "graceful_shutdown_wait_loop_s": 0.2,
        "logging_config": {"enable_access_log": False},
    }
    replica = serve.deployment(
        name="Replica",
        **_how_many(config),
        health_check_period_s=config.health_period_s,
        ray_actor_options=_replica_resources(config, engine),
        request_router_config={
            "request_router_class": "router.membership:Membership",
            "request_router_kwargs": {"feed": FEED},
        },
        **grace,
    )(ReplicaActor)
    router = serve.deployment(
        name="Router",
        num_replicas=config.routers,
        ray_actor_options={"num_cpus": 0.1, "runtime_env": {"env_vars": SAME_LOOP}, **_placed(config.router_resource)},
        **_surge(serve.deployment),
        **grace,
    )(serve.ingress(current_app)(RouterActor))
    served = partial(open_router, config.model, config.served_model_name, config.api(), config.dispatch(), bound_secret)
    engines = replica.bind(
        partial(logged, config.log_level, partial(open_replica, config.model, engine, bound_secret)),
        partial(autoscale.load, target=config.target_usage),
        config.token_plane_host,
        port_range(config.token_plane_ports),
        config.drain_timeout_s,
    )
    return router.bind(engines, partial(logged, config.log_level, served), config.drain_timeout_s)


def _how_many(config: AppConfig) -> dict[str, Any]:
    if config.max_replicas is None:
        return {"num_replicas": config.replicas}
    scaling = {
        "min_replicas": config.min_replicas or config.replicas,
        "initial_replicas": config.replicas,
        "max_replicas": config.max_replicas,
        "upscale_delay_s": config.upscale_delay_s,
        "downscale_delay_s": config.downscale_delay_s,
        "policy": {"policy_function": "cluster.autoscale:decide"},
    }
    return {"autoscaling_config": scaling}


def _engine_options(config: AppConfig) -> EngineConfig:
    """Replicas that share a CPU's cores get one thread each: more would spin against each other."""
    engine = config.engine()
    if engine.threads == "auto" and (config.max_replicas or config.replicas) > 1 and not uses_gpu(config):
        engine = engine.model_copy(update={"threads": 1})
    return engine


def uses_gpu(config: AppConfig) -> bool:
    """What ``device`` says; auto: whether the cluster (or, before Ray is up, this machine) has an NVIDIA GPU."""
    if config.device != "auto" or (config.model or "").startswith("stub:"):
        return config.device == "cuda"
    import ray

    if ray.is_initialized():
        return bool(ray.cluster_resources().get("GPU"))
    return any(Path("/proc/driver/nvidia/gpus").glob("*"))


def _replica_resources(config: AppConfig, engine: EngineConfig) -> dict[str, Any]:
    gpu = uses_gpu(config)
    cpus = config.replica_cpus if config.replica_cpus != "auto" else (1.0 if gpu else 0.1)
    options: dict[str, Any] = {"num_cpus": cpus, **_placed(config.replica_resource)}
    gpus = config.replica_gpus if config.replica_gpus != "auto" else (1.0 if gpu else 0.0)
    if gpus:
        options["num_gpus"] = gpus
    if engine.threads != "auto":
        # Read by OpenMP when torch is loaded; set later, idle threads of its default pool would keep spinning.
        options["runtime_env"] = {"env_vars": {"OMP_NUM_THREADS": str(engine.threads)}}
    return options


def _surge(decorator: Callable[..., Any]) -> dict[str, Any]:
    """Start a new version's routers before the old ones leave: a lone router would otherwise be missing meanwhile.

    Replicas roll within their number, since their GPUs are not there twice. Ray before 2.60 lacks the option.
    """
    return {"max_surge_percent": 100} if "max_surge_percent" in inspect.signature(decorator).parameters else {}


def _placed(resource: str | None) -> dict[str, Any]:
    return {"resources": {resource: 0.001}} if resource else {}


def open_replica(model: str | None, config: EngineConfig, bound_secret: str, name: str) -> tuple[Engine, TokenServer]:
    """Runs in a replica's process: weights, engine and token server of the replica called ``name``."""
    from replica.loop import Engine
    from replica.server import TokenServer

    checkpoint = locate(model, weights=True)
    resolved, runner = open_runner(checkpoint, config)
    model_is = model_fingerprint(checkpoint)
    if resolved.quantization != "none":  # its pages hold other numbers
        model_is += f" {resolved.quantization}"
    root = RootFields(model_is, tokenizer_fingerprint(checkpoint), resolved.kv_cache_dtype, resolved.page_size)
    limits = {
        "max_model_len": resolved.max_model_len,
        "max_batch_size": resolved.max_batch_size,
        "num_pages": resolved.num_pages,
        "page_size": resolved.page_size,
        "chunk_size": resolved.busy_chunk_size,
        "host_page_us": resolved.host_page_us,
        "prefix_caching": int(resolved.prefix_caching),
    }
    server = TokenServer(token_plane_secret(bound_secret), replica_id=name, root=root, limits=limits)
    engine = Engine(
        resolved,
        runner,
        root=root,
        replica_id=name,
        on_deltas=server.on_deltas,
        on_events=server.on_events,
        on_said=server.send_out,
        masks=open_grammars(checkpoint, runner.vocab_size),
    )
    server.attach(engine)
    return engine, server


def open_grammars(checkpoint: Checkpoint, vocab_size: int) -> Grammars | None:
    """What makes the engine's grammar masks; None for a stub, whose ids follow no mask."""
    if checkpoint.kind == "stub":
        return None
    from replica.grammar import Grammars

    card = load_card(checkpoint, (checkpoint.name,))
    if not card.eos_token_ids:
        return None
    return Grammars(
        card.tokenizer.token_bytes,
        vocab_size=vocab_size,
        eos_token_ids=card.eos_token_ids,
        special_ids=sorted(card.tokenizer.special_ids),
    )


def open_runner(checkpoint: Checkpoint, config: EngineConfig) -> tuple[ResolvedConfig, Runner]:
    """The device side of a checkpoint, with every "auto" decided."""
    if checkpoint.kind == "stub":
        from cluster.bench.stub import open_stub

        return open_stub(checkpoint, config)
    import torch

    from replica.runner import ModelRunner
    from replica.weights import read_config

    cuda = torch.cuda.is_available() and config.device != "cpu"
    itemsize = 4 if config.dtype == "float32" or (config.dtype == "auto" and not cuda) else 2
    device = DeviceFacts(
        "cuda" if cuda else "cpu",
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=torch.cuda.mem_get_info()[0] if cuda else 0,
    )
    facts = read_config(checkpoint.path).facts(itemsize)
    if config.speculative_model is not None:
        drafting = locate_draft(config.speculative_model, checkpoint)
        config = config.model_copy(update={"speculative_model": str(drafting)})
        facts = replace(facts, draft=read_config(drafting).facts(itemsize))
    resolved = resolve(config, facts, device)
    return resolved, ModelRunner.open(checkpoint.path, resolved)


def locate_draft(name: str, served: Checkpoint) -> Path:
    """The checkpoint of ``speculative_model``. Raises UnknownModel, or ValueError for one of another tokenizer: its
    ids would mean something else."""
    draft = locate(name, weights=True)
    theirs, ours = (load_card(c, (c.name,)).tokenizer.token_bytes for c in (draft, served))
    common = min(len(theirs), len(ours))  # some pad their vocabulary
    if theirs[:common] != ours[:common]:
        at = next(i for i in range(common) if theirs[i] != ours[i])
        raise ValueError(
            f"speculative_model: {name!r} has another tokenizer: id {at} is {theirs[at]!r}, not {ours[at]!r}"
        )
    return draft.path


def open_router(
    model: str | None,
    served_name: str | None,
    api: ApiOptions,
    dispatch: DispatchOptions,
    bound_secret: str,
    name: str,
) -> tuple[Dispatcher, Api]:
    """Runs in a router's process: card, backend and HTTP surface."""
    from router.api import create_app
    from router.plane_metrics import PlaneCollector

    checkpoint = locate(model, weights=False)
    card = load_card(checkpoint, (served_name or checkpoint.name,))
    dispatcher = Dispatcher(
        token_plane_secret(bound_secret),
        expect={"tokenizer": tokenizer_fingerprint(checkpoint)},
        router_id=name,
        options=dispatch,
    )
    app = create_app(dispatcher, card, api)
    app.services.metrics.router = name
    app.services.metrics.registry.register(PlaneCollector(dispatcher, api.metric_prefix))
    return dispatcher, app


def token_plane_secret(bound: str) -> bytes:
    """The secret in force in this process: file, environment, or the one made when the app was built.

    Raises ValueError for one shorter than 16 bytes, OSError for an unreadable file.
    """
    if path := os.environ.get(f"{SECRET_VARIABLE}_FILE"):
        secret = Path(path).read_bytes().strip()
    else:
        secret = os.environ.get(SECRET_VARIABLE, bound).encode()
    if len(secret) < 16:
        raise ValueError(f"the token-plane secret has {len(secret)} bytes; at least 16 are needed")
    return secret
