"""What an engine says of its two tiers, through the wire into a router's directory, decides where a request goes."""

from __future__ import annotations

import random

import pytest
from engine_harness import VOCAB, Harness, host_gb

from replica.config import DeviceFacts, EngineConfig, ModelFacts, resolve
from router.pages import key64
from router.placement import Placement
from router.stream_state import Phase, StreamState
from router.wire import EventBatch, Load, Snapshot, Tier
from tests.frames import frames_in

FIT = (0.1, 0.0, 2.0, 0.0, 0.0)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(1000 * seed + length)
    return [rng.randrange(VOCAB) for _ in range(length)]


class Followed:
    """An engine and a router's stream of it."""

    def __init__(self, name: str, placement: Placement) -> None:
        self.harness = Harness(host_cache_gb=host_gb(100), max_num_pages=20, max_model_len=300)
        self.state = placement.add(name)
        self.state.accepting = True
        self.stream = StreamState(name, placement.directory, self.state)
        self.taken = 0

    def serve(self, *seeds: int) -> None:
        for seed in seeds:
            self.harness.submit(prompt_of(250, seed), max_tokens=2, seed=7)
            self.harness.finish()

    def catch_up(self, *, snapshot: bool = False) -> None:
        epoch = self.harness.engine.events.epoch
        if snapshot:
            self.stream.attach(epoch, 0.0)
            for chunk in self.harness.engine.snapshot():
                assert self.stream.on_snapshot(Snapshot.from_frame(body(chunk.to_frame())), 0.0) is None
        batches = self.harness.mirror.batches
        for batch in batches[self.taken :]:
            assert self.stream.on_batch(EventBatch.from_frame(body(batch.to_frame())), 0.0) is None
        self.taken = len(batches)
        assert self.stream.phase == Phase.SYNCED and not self.stream.counters.digest_mismatches
        self.state.on_load(Load(coefficients=FIT, free_pages=100))


def body(frame: bytes) -> list:
    (got,) = frames_in(frame)
    return got


def test_device_before_host_before_nothing() -> None:
    placement = Placement(16)
    device, host, nothing = (Followed(name, placement) for name in ("device", "host", "nothing"))
    for followed in (device, host, nothing):
        followed.serve(9)
        followed.catch_up(snapshot=True)
    device.serve(1, 0)
    host.serve(0, 1)
    nothing.serve(2, 3)
    for followed in (device, host, nothing):
        followed.catch_up()
        followed.state.host_page_ms = 1.0
    placement.check_invariants()
    hashes = device.harness.frame(prompt_of(250)).hashes
    keys = [key64(hashes[i : i + 16]) for i in range(0, len(hashes), 16)]
    on_host = sum(key in host.harness.mirror.host for key in keys)
    assert on_host > 8 and placement.directory.holders(keys[-1]) == ["device", "host"]

    def choose(*exclude: str):
        decision = placement.decide(keys, 250, 1.0, fallback_key=1, exclude=exclude)
        assert decision is not None
        return decision

    one, two, three = choose(), choose("device"), choose("device", "host")
    assert [one.replica, two.replica, three.replica] == ["device", "host", "nothing"]
    assert one.cached == two.cached == 240 and three.cached == 0
    assert two.ttft_ms - one.ttft_ms == pytest.approx(on_host * 1.0), "what the copies take"
    assert two.ttft_ms < three.ttft_ms - placement.options.tie_ms
    host.state.host_page_ms = 5.0
    assert choose("device").replica == "nothing", "copies that take longer than computing are not worth it"

    host.serve(0)
    host.catch_up()
    assert choose("device").ttft_ms == pytest.approx(one.ttft_ms), "it came back to the device"
    assert host.state.slot.digests[Tier.HOST].count == len(host.harness.mirror.host)
    placement.check_invariants()


def test_the_copy_of_a_page_is_priced_by_its_size() -> None:
    eight_b = ModelFacts(40960, num_layers=36, num_kv_heads=8, head_dim=128)
    gpu = DeviceFacts("cuda", memory_bytes=140 * 2**30)
    wide, narrow = (resolve(EngineConfig(kv_cache_dtype=dtype), eight_b, gpu).host_page_us for dtype in ("auto", "fp8"))
    assert (wide, narrow) == (12 + 47, 12 + 23), "2.25 MiB at 50 GB/s"
