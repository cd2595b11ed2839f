"""What an operator touches. ``serve run cluster.app key=value ...`` or ``import_path: cluster:app`` in a config file.

Ray inspects the annotation of the builder's parameter, so this module must not postpone annotations; and a submodule
named ``app`` would shadow the builder, so there is none.
"""

from typing import TYPE_CHECKING, Any

from cluster.config import AppConfig

if TYPE_CHECKING:
    from ray.serve import Application


def app(args: AppConfig) -> "Application":
    """The Serve application: routers in front of engine replicas. Raises ValueError for a model that can't be found."""
    from cluster.build import build_app

    return build_app(args)


def __getattr__(name: str) -> Any:
    """``cluster:default_app`` is the application with every option at its default, for ``serve build``."""
    if name == "default_app":
        return app(AppConfig())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
