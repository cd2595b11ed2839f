"""A Ray cluster inside this process's session, for benches and tests: own ports, own files, gone at the end."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from cluster.environment import MARKER, end_processes, free_ports, run_environment

log = logging.getLogger(__name__)


class PrivateCluster:
    """Context manager: Ray and Serve up, nothing deployed. Its processes are known by ``marker``.

    ``home``: HOME of every process of the cluster; None keeps the user's. ``extra``: more environment variables.
    """

    def __init__(
        self, *, haproxy: bool, num_cpus: int = 8, home: Path | None = None, extra: Mapping[str, str] | None = None
    ) -> None:
        self.haproxy = haproxy
        self._num_cpus = num_cpus
        self._home = home
        self._extra = dict(extra or {})
        self._saved: dict[str, str | None] | None = None
        self.port = free_ports(1)[0]
        self.marker = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def prepare(self) -> None:
        """Put the cluster's environment into force. Raises RuntimeError when ``ray.serve`` has read another already."""
        if self._saved is not None:
            return
        if "ray.serve" in sys.modules:
            raise RuntimeError("ray.serve is already imported; its environment can no longer be set")
        # Unix socket paths under it must stay short (108 bytes), hence not pytest's own temporary folder.
        self._root = Path(tempfile.mkdtemp(prefix="ew"))
        base = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | self._extra
        wanted = run_environment(self._root, haproxy=self.haproxy, base=base)
        if self._home is not None:
            wanted["HOME"] = str(self._home)
        changed = {name for name in wanted.keys() | os.environ.keys() if os.environ.get(name) != wanted.get(name)}
        self._saved = {name: os.environ.get(name) for name in changed}
        _set_environment({name: wanted.get(name) for name in changed})
        self.marker = wanted[MARKER]

    def __enter__(self) -> PrivateCluster:
        self.prepare()
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def _start(self, attempts: int = 3) -> None:
        """Ray and Serve give their own daemons 30 and 60 s, which a machine with much else to do may exceed."""
        import ray
        from ray import serve

        for left in range(attempts - 1, -1, -1):
            try:
                ray.init(
                    num_cpus=self._num_cpus,
                    include_dashboard=False,
                    object_store_memory=100 << 20,
                    _temp_dir=str(self._root),
                    logging_level=logging.ERROR,
                    log_to_driver=False,
                )
                serve.start(
                    http_options={"host": "0.0.0.0" if self.haproxy else "127.0.0.1", "port": self.port},
                    logging_config={"enable_access_log": False, "log_level": "WARNING"},
                )
                return
            except Exception as error:
                if not left:
                    raise
                log.warning("the cluster did not start, trying again: %s", error)
                self._stop()

    def _stop(self) -> None:
        if "ray" in sys.modules:
            import ray
            from ray import serve

            if ray.is_initialized():
                try:
                    serve.shutdown()
                finally:
                    ray.shutdown()
        end_processes(self.marker, grace_s=10)

    def deploy(self, options: Mapping[str, Any], *, name: str = "default", route_prefix: str = "/") -> str:
        """Deploy ``cluster.app`` and wait until a replica is admitted. Returns the app's base URL."""
        return self.deploy_all({name: (dict(options), route_prefix)})[name]

    def deploy_all(self, apps: Mapping[str, tuple[dict[str, Any], str]]) -> dict[str, str]:
        """Deploy several apps at once: name -> (options, route prefix). Returns name -> base URL."""
        from ray import serve

        from cluster import app
        from cluster.config import AppConfig

        configs = {name: AppConfig.model_validate(options) for name, (options, _) in apps.items()}
        targets = [serve.RunTarget(app(config), name, apps[name][1]) for name, config in configs.items()]
        serve.run_many(targets)
        urls = {name: self.url + prefix.rstrip("/") for name, (_, prefix) in apps.items()}
        for name, url in urls.items():
            wait_ready(url, configs[name].replicas)
        return urls

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._saved is None:
            return
        self._stop()
        shutil.rmtree(self._root, ignore_errors=True)
        _set_environment(self._saved)
        self._saved = None


def _set_environment(values: Mapping[str, str | None]) -> None:
    """None removes a variable."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def wait_ready(url: str, replicas: int, timeout_s: float = 120.0) -> None:
    """Returns once ``replicas`` replicas are admitted. Raises TimeoutError with the last answer."""
    deadline = time.monotonic() + timeout_s
    last: object = "no answer"
    with httpx.Client(timeout=5.0) as client:
        while time.monotonic() < deadline:
            try:
                if (response := client.get(f"{url}/ready")).status_code == 200:
                    last = engines = client.get(f"{url}/v1/engine").json()["data"]
                    if sum(engine["state"] == "open" for engine in engines) >= replicas:
                        return
                else:
                    last = response.text
            except (httpx.HTTPError, ValueError, KeyError) as error:
                last = repr(error)
            time.sleep(0.1)
    raise TimeoutError(f"{url} not ready with {replicas} replicas after {timeout_s:.0f} s; last: {last}")
