"""Through a real server on loopback: the openai client, clients that leave, slow readers, the price of a chunk."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from router.api import ApiOptions, create_app
from router.backend import Overloaded
from tests.router.garbage import garbage_of
from tests.router.http_fakes import FakeBackend, make_card, make_tokenizer, saying, served

TOKENIZER = make_tokenizer()
ANSWER = "Paris is 👩‍👩‍👧 the capital. 日本"
MESSAGES: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def fake() -> FakeBackend:
    return FakeBackend(saying(TOKENIZER, ANSWER))


@pytest.fixture(scope="module")
def url(fake: FakeBackend) -> Iterator[str]:
    with served(create_app(fake, make_card(TOKENIZER), ApiOptions(api_keys=("secret",)))) as base:
        yield base


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
        yield client


@pytest.fixture(autouse=True)
def _fresh(fake: FakeBackend) -> None:
    fake.script = saying(TOKENIZER, ANSWER)
    fake.delay_s, fake.fail_after, fake.refuse = 0.0, None, None
    fake.jobs.clear()
    fake.tickets.clear()
    fake.cancelled.clear()


def test_openai_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0)
    assert answer.choices[0].message.content == ANSWER and answer.choices[0].finish_reason == "stop"
    assert answer.usage and answer.usage.prompt_tokens_details
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    assert chunks[-1].usage == answer.usage


def test_openai_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=1) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.delta" in kinds and final.choices[0].message.content == ANSWER
    assert final.choices[0].logprobs and final.choices[0].logprobs.content


def test_openai_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=4, logprobs=1, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].logprobs and len(answer.choices[0].logprobs.tokens or []) == 5
    text = "".join(c.choices[0].text for c in client.completions.create(model="tiny", prompt="a", stream=True))
    assert text == ANSWER


def test_openai_models_and_errors(client: openai.OpenAI, fake: FakeBackend) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "tiny-alias"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="served: tiny"):
        client.chat.completions.create(model="gpt", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=7)
    assert caught.value.param == "temperature" and caught.value.code == "invalid_value"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError, match="embedding"):
        client.embeddings.create(model="tiny", input="x")
    fake.refuse = Overloaded("all replicas are full", retry_after_s=2)
    with pytest.raises(openai.RateLimitError) as full:
        client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert full.value.response.headers["retry-after"] == "2"


def test_a_broken_stream_raises_in_the_client(client: openai.OpenAI, fake: FakeBackend) -> None:
    fake.fail_after = 3
    with pytest.raises(openai.APIError, match="the replica broke"):
        list(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True))


def test_overlong_body_over_a_socket(url: str, client: openai.OpenAI) -> None:
    response = httpx.post(
        f"{url}/v1/completions", content=b"x" * (10 << 20), headers={"authorization": "Bearer secret"}
    )
    assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"
    assert client.completions.create(model="tiny", prompt="a", max_tokens=2).choices


@pytest.mark.parametrize(("path", "sign"), [("chat/completions", ": still working"), ("messages", "event: ping")])
def test_a_silent_stream_shows_signs_of_life(path: str, sign: str) -> None:
    fake = FakeBackend(saying(TOKENIZER, ANSWER), delay_s=0.45)
    app = create_app(fake, make_card(TOKENIZER), ApiOptions(sse_keepalive_s=0.1))
    body = {"messages": MESSAGES, "max_tokens": 3, "stream": True, "model": "tiny"}
    with served(app) as base:
        started = time.monotonic()
        lines = httpx.post(f"{base}/v1/{path}", json=body).text.splitlines()
        most = (time.monotonic() - started) / 0.1
        assert 6 <= lines.count(sign) <= most, "four in each of three silences, fewer on a busy machine"
        with openai.OpenAI(base_url=f"{base}/v1", api_key="none") as client:
            chunks = list(client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3, stream=True))
        assert chunks[-1].choices[0].finish_reason == "length"
        fake.delay_s = 0.001
        lines = httpx.post(f"{base}/v1/{path}", json=body | {"max_tokens": 300}).text.splitlines()
        assert sign not in lines, "what is sent anyway is sign enough"


def _wait_for(condition: Any, seconds: float) -> float:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, "it did not happen in time"
        time.sleep(0.002)
    return time.monotonic() - started


def _post(url: str, body: dict[str, Any]) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    raw = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret\r\n"
    head += f"content-length: {len(raw)}\r\n"
    connection = socket.create_connection((host, int(port)))
    connection.sendall(head.encode() + b"\r\n" + raw)
    return connection


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_is_cancelled_within_100_ms(url: str, fake: FakeBackend, streamed: bool, n: int) -> None:
    fake.delay_s = 0.01
    body = {"prompt": "a", "n": n, "stream": streamed, "ignore_eos": True}
    connection = _post(url, body)
    _wait_for(lambda: len(fake.tickets) == n and all(ticket.iterated for ticket in fake.tickets), 5)
    time.sleep(0.05)
    connection.close()
    assert _wait_for(lambda: len(fake.cancelled) == n, 1) < 0.1
    assert not any(ticket.done for ticket in fake.tickets)


def test_a_client_that_leaves_before_admission(url: str, fake: FakeBackend) -> None:
    fake.admit_delay_s = 0.3
    connection = _post(url, {"prompt": "a"})
    time.sleep(0.05)
    connection.close()
    time.sleep(0.4)
    fake.admit_delay_s = 0.0
    assert not fake.tickets


def test_vanishing_clients_leave_nothing_in_flight(url: str, fake: FakeBackend) -> None:
    fake.delay_s = 0.005
    for connection in [_post(url, {"prompt": "a", "stream": bool(i % 2), "ignore_eos": True}) for i in range(60)]:
        connection.close()

    def idle() -> bool:
        return "everwarm:http_requests_in_flight 0.0" in httpx.get(f"{url}/metrics").text

    _wait_for(idle, 2)
    assert all(ticket.done or ticket.cancelled_at is not None for ticket in fake.tickets)


def test_a_reader_that_stalls_does_not_stall_others(url: str, client: openai.OpenAI, fake: FakeBackend) -> None:
    slow = _post(url, {"prompt": "a", "stream": True, "ignore_eos": True, "logprobs": 20})
    started = time.monotonic()
    for _ in range(5):
        client.completions.create(model="tiny", prompt="a", max_tokens=4)
    assert time.monotonic() - started < 2
    slow.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "path, body",
    [
        ("completions", {"prompt": "a", "max_tokens": 4, "n": 2}),
        ("chat/completions", {"messages": MESSAGES}),
        ("messages", {"messages": MESSAGES, "max_tokens": 4}),
        ("responses", {"input": "a"}),
        ("completions", {"prompt": []}),
    ],
)
def test_a_request_leaves_nothing_to_the_garbage_collector(
    url: str, fake: FakeBackend, path: str, body: dict[str, Any], stream: bool
) -> None:
    """It stops all streams while it works."""
    key = {"Authorization": "Bearer secret"}

    def idle() -> bool:
        return "everwarm:http_requests_in_flight 0.0" in httpx.get(f"{url}/metrics").text

    with garbage_of("router") as left:
        for _ in range(3):
            httpx.post(f"{url}/v1/{path}", json={**body, "stream": stream}, headers=key)
        _wait_for(idle, 2)
    assert not left


def test_price_of_a_streamed_token() -> None:
    """CPU per token of everything between the backend's delta and the ASGI server, without sockets."""
    import asyncio

    backend = FakeBackend(saying(TOKENIZER, ANSWER))

    async def instant() -> None:
        return None

    backend.pause = instant  # type: ignore[method-assign]
    card = make_card(TOKENIZER, max_model_len=4096)
    backend.limits = lambda: {"max_model_len": 4096}  # type: ignore[method-assign]
    app = create_app(backend, card, ApiOptions())
    body = json.dumps({"messages": MESSAGES, "stream": True, "ignore_eos": True, "max_tokens": 3000, "stop": "zzzz"})
    sent = 0

    async def receive() -> dict[str, Any]:
        if not sent:
            return {"type": "http.request", "body": body.encode()}
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        nonlocal sent
        sent += 1

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    started = time.process_time()
    asyncio.run(app(scope, receive, send))
    per_token_ms = 1e3 * (time.process_time() - started) / 3000
    assert sent > 1500
    assert per_token_ms < 0.04, f"{per_token_ms:.4f} ms"
