"""The Serve actor around an engine, without Serve."""

from __future__ import annotations

import pytest

from replica.deployment import ReplicaActor


class Listener:
    """A token server that answers each ``start`` with the next outcome."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self.outcomes, self.tried = list(outcomes), list[int]()

    async def start(self, host: str, port: int) -> tuple[str, int]:
        self.tried.append(port)
        if (outcome := self.outcomes.pop(0)) is not None:
            raise outcome
        return host, port


async def listen(server: Listener) -> tuple[str, int]:
    actor = object.__new__(ReplicaActor)
    actor._server = server  # type: ignore[assignment]
    return await actor._listen("h", (7400, 7402))


async def test_the_first_free_port_of_the_range_is_taken() -> None:
    assert await listen(server := Listener(OSError("in use"), None)) == ("h", 7401) and server.tried == [7400, 7401]
    with pytest.raises(OSError, match="no free port in 7400-7402 on h: in use"):
        await listen(Listener(*[OSError("in use")] * 3))


async def test_a_silent_engine_is_not_taken_for_a_taken_port() -> None:
    with pytest.raises(TimeoutError, match="said nothing"):
        await listen(server := Listener(*[TimeoutError("the engine said nothing in 60 s")] * 3))
    assert server.tried == [7400]
