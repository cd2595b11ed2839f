"""The apps that the end-to-end tests talk to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny import write_tiny_llama

from cluster.private import PrivateCluster


@dataclass(frozen=True)
class Deployed:
    """A running app: its base URL, its name in Serve, its replicas."""

    cluster: PrivateCluster
    name: str
    url: str
    replicas: int


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights with a tokenizer and a chat template."""
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def pair(cluster: PrivateCluster, tiny: Path) -> Deployed:
    """Two replicas behind two routers."""
    options = {"model": str(tiny), "replicas": 2, "routers": 2, "max_num_pages": 1024, "drain_timeout_s": 10}
    return Deployed(cluster, "pair", cluster.deploy(options, name="pair", route_prefix="/pair"), 2)


@pytest.fixture(scope="session")
def default_model(cluster: PrivateCluster) -> Deployed:
    """Two replicas of the embedded model."""
    return Deployed(cluster, "default", cluster.deploy({"replicas": 2, "drain_timeout_s": 10}), 2)


@pytest.fixture(scope="session")
def matrix(cluster: PrivateCluster, tiny: Path) -> dict[str, str]:
    """ "cache=on,chunk=32" -> URL, for the ends of the grid, and "pressure": a pool too small for its batch."""
    base = {"model": str(tiny), "replicas": 1, "max_num_pages": 1024, "threads": 1, "drain_timeout_s": 10}
    apps = {
        "cache=on,chunk=32": ({**base, "chunk_size": 32}, "/on"),
        "cache=off,chunk=unlimited": ({**base, "prefix_caching": False, "chunked_prefill": False}, "/off"),
        "pressure": ({**base, "max_num_pages": 48, "max_model_len": 600, "chunk_size": 64}, "/pressure"),
    }
    return cluster.deploy_all(apps)
