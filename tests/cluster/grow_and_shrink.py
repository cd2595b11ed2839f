"""Run by test_autoscale.py: one stub replica, load that asks for three, then none; all streams whole throughout."""

from __future__ import annotations

import asyncio
import time

from cluster.bench.load import stream_once
from cluster.client import connect, get
from cluster.private import PrivateCluster

TOKENS = 1500


def counts(url: str) -> int:
    with connect(url, ()) as client:
        return sum(engine["state"] == "open" for engine in get(client, "/v1/engine", timeout_s=10.0)["data"])


def wait_for(url: str, replicas: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    while (now := counts(url)) != replicas:
        if time.monotonic() > until:
            raise TimeoutError(f"{now} replicas after {seconds:.0f} s, not {replicas}")
        time.sleep(0.5)


async def load(url: str) -> None:
    body = {
        "model": "stub",
        "prompt": "Tell me.",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    streams = [asyncio.create_task(stream_once(url, "/v1/completions", body)) for _ in range(24)]
    await asyncio.to_thread(wait_for, url, 3, 60.0)
    print("grown to 3", flush=True)
    for record in await asyncio.gather(*streams):
        assert record.failure is None and record.tokens == TOKENS, record.failure


def main() -> None:
    options = {
        "model": "stub:20ms",
        "replicas": 1,
        "max_replicas": 3,
        "target_usage": 0.75,
        "upscale_delay_s": 1.0,
        "downscale_delay_s": 5.0,
        "max_batch_size": 12,
        "max_waiting": 64,
    }
    with PrivateCluster(haproxy=False) as cluster:
        url = cluster.deploy(options)
        assert counts(url) == 1
        asyncio.run(load(url))
        wait_for(url, 1, 90.0)
        print("1 -> 3 -> 1")


if __name__ == "__main__":
    main()
