"""The HTTP surface: a raw ASGI application over a :class:`router.backend.Backend`."""

from router.api.app import Api, create_app
from router.api.options import ApiOptions

__all__ = ["Api", "ApiOptions", "create_app"]
