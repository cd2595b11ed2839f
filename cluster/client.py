"""The cluster's public API as the command line speaks it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import httpx

from router.api.options import ApiOptions


class Unreachable(Exception):
    """Nothing answers at that URL, or it is no everwarm cluster, or it wants another key; the message says which."""


def api_keys(options: ApiOptions | None = None) -> list[str]:
    """Keys this machine's environment (or ``options``) accepts; a client may use the first."""
    return (options or ApiOptions()).all_keys()


def connect(url: str, keys: Iterable[str] = ()) -> httpx.Client:
    """A client of the cluster at ``url``. Answers may take as long as they like."""
    key = next(iter(keys), None)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(10.0, read=None))


def get(client: httpx.Client, path: str, *, timeout_s: float = 10.0) -> dict[str, Any]:
    """The JSON object at ``path``. Raises Unreachable."""
    try:
        response = client.get(path, timeout=timeout_s)
        if response.status_code != 200:
            raise Unreachable(f"{client.base_url.join(path)} answers {describe(response)}")
        body = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise Unreachable(f"no cluster answers at {client.base_url}: {error}") from error
    if not isinstance(body, dict):
        raise Unreachable(f"{client.base_url.join(path)} is no everwarm cluster's")
    return body


def describe(response: httpx.Response) -> str:
    """Status and, where there is one, the error's message."""
    try:
        return f"{response.status_code}: {response.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code}: {response.text[:200]}"
