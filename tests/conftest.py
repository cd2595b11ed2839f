"""One private Ray cluster for the whole session, started when the first test asks for it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.environment import haproxy_binary
from cluster.private import PrivateCluster

_CLUSTER = pytest.StashKey[PrivateCluster]()
_HOME = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """``ray.serve`` reads its environment once, so it is set before any test module may import it."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    home = tempfile.TemporaryDirectory(prefix="ewhome", ignore_cleanup_errors=True)
    haproxy = haproxy_binary() is not None
    cluster = PrivateCluster(haproxy=haproxy, num_cpus=16, home=Path(home.name), extra={"OMP_NUM_THREADS": "1"})
    cluster.prepare()
    config.stash[_CLUSTER] = cluster
    config.stash[_HOME] = home


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ray comes last: up during other tests, its idle processes would slow them down."""
    items.sort(key=lambda item: item.get_closest_marker("ray") is not None)


def pytest_unconfigure(config: pytest.Config) -> None:
    if (cluster := config.stash.get(_CLUSTER, None)) is not None:
        cluster.close()
        # The object knows its own folder; HOME in the environment is the user's again by now.
        config.stash[_HOME].cleanup()


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[PrivateCluster]:
    """Ray and Serve up, behind HAProxy where it is installed, nothing deployed; ended after the last test."""
    with request.config.stash[_CLUSTER] as running:
        yield running
