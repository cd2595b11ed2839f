"""Chat and text completions in this process: every option that shapes a request or its answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from router.backend import EngineFault, Job
from tests.router.http_fakes import FakeBackend, FakeTicket, asgi_client, make_card, make_tokenizer, saying

TOKENIZER = make_tokenizer()
CARD = make_card(TOKENIZER)
EOS_ID = TOKENIZER.eos_token_ids[0]
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "Say it"}
ANSWER = "Paris is 👩‍👩‍👧 the capital. 日本"


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def backend(text: str = ANSWER, **changes: Any) -> FakeBackend:
    return FakeBackend(saying(TOKENIZER, text), **changes)


async def ask(fake: FakeBackend, body: dict[str, Any], path: str | None = None, **options: Any) -> dict[str, Any]:
    path = path or ("/v1/chat/completions" if "messages" in body else "/v1/completions")
    async with asgi_client(fake, CARD, **options) as client:
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()


def events(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    parts = response.text.split("\n\n")
    assert parts.pop() == "" and all(part.startswith("data: ") for part in parts)
    return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]


async def stream(fake: FakeBackend, body: dict[str, Any], **options: Any) -> list[Any]:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with asgi_client(fake, CARD, **options) as client:
        return events(await client.post(path, json={**body, "stream": True}))


def joined(chunks: list[Any], index: int = 0) -> str:
    choices = [c for chunk in chunks if chunk != "[DONE]" for c in chunk["choices"] if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


async def test_chat_whole_and_streamed_agree() -> None:
    whole = await ask(backend(num_cached=5), CHAT)
    (choice,) = whole["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert choice["finish_reason"] == "stop" and whole["object"] == "chat.completion"
    prompt = ids_of("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert whole["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(ids_of(ANSWER)) + 1,
        "total_tokens": len(prompt) + len(ids_of(ANSWER)) + 1,
        "prompt_tokens_details": {"cached_tokens": 5},
    }
    fake = backend(num_cached=5)
    chunks = await stream(fake, {**CHAT, "stream_options": {"include_usage": True}})
    assert fake.jobs[0].prompt == prompt
    assert chunks.pop() == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert joined(chunks) == ANSWER
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"]][-1] == "stop"
    assert len({chunk["id"] for chunk in chunks}) == 1 and chunks[0]["object"] == "chat.completion.chunk"
    assert all("\ufffd" not in json.dumps(chunk) for chunk in chunks)
    plain = await stream(backend(), CHAT)
    assert plain[-1] == "[DONE]" and all("usage" not in chunk for chunk in plain[:-1])


async def test_continuous_usage_counts_up() -> None:
    chunks = await stream(backend(), {**CHAT, "stream_options": {"continuous_usage_stats": True}})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]]
    assert counts == sorted(counts) and counts[-1] == len(ids_of(ANSWER)) + 1


async def test_left_out_max_tokens_means_the_rest_of_the_context() -> None:
    for body in (CHAT, TEXT):
        fake = backend()
        await ask(fake, body)
        (job,) = fake.jobs
        assert job.sampling.max_tokens == 512 - len(job.prompt)


async def test_max_tokens_under_both_names() -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        answer = await ask(backend(), {**CHAT, field: 3})
        assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 3
    await ask(backend(), {**CHAT, "max_tokens": 3, "max_completion_tokens": 3})
    async with asgi_client(backend(), CARD) as client:
        response = await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 3, "max_completion_tokens": 4})
        assert response.status_code == 400 and response.json()["error"]["param"] == "max_completion_tokens"


async def test_every_sampling_field_reaches_the_engine() -> None:
    fake = backend()
    sent = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": -1, "stop_token_ids": [7, 7, 9],
        "min_tokens": 2, "frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.2,
        "logit_bias": {"9": -1.5, "3": 2}, "allowed_token_ids": [5, 6, 2], "bad_words": ["the"], "max_tokens": 5,
        "logprobs": 3, "prompt_logprobs": 2,
    }  # fmt: skip
    await ask(fake, {**TEXT, **sent})
    sampling = fake.jobs[0].sampling
    assert sampling.seed == (1 << 64) - 1
    assert sampling.stop_token_ids == (EOS_ID, 7, 9)
    assert sampling.logit_bias == ((3, 2.0), (9, -1.5))
    assert sampling.allowed_token_ids == (5, 6, 2)
    assert set(sampling.bad_words) == {tuple(ids_of("the")), tuple(ids_of(" the"))}
    same = ["temperature", "top_p", "top_k", "min_p", "min_tokens", "frequency_penalty", "presence_penalty"]
    same += ["repetition_penalty", "logprobs", "prompt_logprobs", "max_tokens"]
    assert {name: getattr(sampling, name) for name in same} == {name: sent[name] for name in same}


async def test_defaults_come_from_the_checkpoint_and_null_means_default() -> None:
    card = make_card(TOKENIZER, default_sampling={"temperature": 0.6, "top_k": 20})
    fake = backend()
    async with asgi_client(fake, card) as client:
        await client.post("/v1/completions", json={**TEXT, "top_k": None, "n": None, "stop": None, "stream": None})
        await client.post("/v1/completions", json={**TEXT, "temperature": 0, "top_k": -1})
    first, second = (job.sampling for job in fake.jobs)
    assert (first.temperature, first.top_k, first.top_p) == (0.6, 20, 1.0)
    assert (second.temperature, second.top_k) == (0.0, 0)
    assert first.seed != second.seed


async def test_ignore_eos_keeps_other_stops() -> None:
    fake = backend()
    answer = await ask(fake, {**TEXT, "ignore_eos": True, "max_tokens": 40, "stop_token_ids": [390]})
    assert fake.jobs[0].sampling.stop_token_ids == (390,)
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
async def test_stop_strings_end_the_answer_and_the_engine_hears(include: bool, streamed: bool) -> None:
    body = {**CHAT, "stop": ["capital", "zzz"], "include_stop_str_in_output": include}
    expected = ANSWER[: ANSWER.index("capital")] + ("capital" if include else "")
    fake = backend()
    if streamed:
        chunks = await stream(fake, {**body, "stream_options": {"include_usage": True}})
        text, usage = joined(chunks), chunks[-2]["usage"]
        last = chunks[-3]["choices"][0]
    else:
        answer = await ask(fake, body)
        last, usage = answer["choices"][0], answer["usage"]
        text = last["message"]["content"]
    assert text == expected and (last["finish_reason"], last["stop_reason"]) == ("stop", "capital")
    assert fake.cancelled == [fake.jobs[0].request_id]
    assert usage["completion_tokens"] < len(ids_of(ANSWER))


async def test_stop_token_id_is_named() -> None:
    stop_id = ids_of(" the")[0]
    answer = await ask(backend("Paris is the city"), {**CHAT, "stop_token_ids": [stop_id]})
    assert answer["choices"][0]["stop_reason"] == stop_id
    assert answer["choices"][0]["message"]["content"] == "Paris is"


async def test_special_tokens_are_shown_on_request() -> None:
    fake = backend("a<|im_start|>b")
    assert (await ask(fake, TEXT))["choices"][0]["text"] == "ab"
    assert (await ask(fake, {**TEXT, "skip_special_tokens": False}))["choices"][0]["text"] == "a<|im_start|>b"


async def test_n_answers_have_their_own_seeds() -> None:
    fake = FakeBackend(lambda job: [*ids_of(f"seed {job.sampling.seed % 1000}"), EOS_ID])
    body = {**CHAT, "n": 3, "seed": 5}
    whole = await ask(fake, body)
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2] and len(set(texts)) == 3
    assert texts[0] == (await ask(fake, {**body, "n": 1}))["choices"][0]["message"]["content"]
    chunks = await stream(fake, body)
    assert [joined(chunks, index) for index in range(3)] == texts
    assert whole["usage"]["prompt_tokens"] == len(fake.jobs[0].prompt)


async def test_completions_take_prompts_of_every_kind() -> None:
    ids = ids_of("one two")
    cases: list[tuple[Any, list[list[int]]]] = [
        ("one two", [ids]),
        (["one two", "x"], [ids, ids_of("x")]),
        (ids, [ids]),
        ([ids, [5]], [ids, [5]]),
    ]
    for prompt, expected in cases:
        fake = FakeBackend(lambda job: [*job.prompt, EOS_ID])
        answer = await ask(fake, {**TEXT, "prompt": prompt, "n": 2, "temperature": 0})
        assert [job.prompt for job in fake.jobs] == [p for p in expected for _ in range(2)]
        assert [c["text"] for c in answer["choices"]] == [TOKENIZER.decode(p) for p in expected for _ in range(2)]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_one_refused_choice_cancels_the_others() -> None:
    fake = backend()
    fake.script = lambda job: [] if job.prompt == [5] else ids_of("x")
    async with asgi_client(fake, CARD) as client:
        response = await client.post("/v1/completions", json={**TEXT, "prompt": [[6], [5], [7]]})
    assert response.status_code == 400
    assert sorted(fake.cancelled) == sorted(t.job.request_id for t in fake.tickets) and len(fake.tickets) == 2


async def test_a_client_that_leaves_between_two_admissions_leaves_none() -> None:
    class Slow(FakeBackend):
        async def admit(self, job: Job) -> FakeTicket:
            if len(self.jobs) == 2:
                await asyncio.sleep(30)
            return await super().admit(job)

    fake = Slow(saying(TOKENIZER, "hi"))
    asking = asyncio.create_task(ask(fake, {**TEXT, "n": 3}))
    while len(fake.tickets) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.sleep(0.01)
    assert len(fake.tickets) == len(fake.cancelled) == 2


async def test_too_many_answers_are_refused() -> None:
    async with asgi_client(backend(), CARD, max_choices=5) as client:
        response = await client.post("/v1/completions", json={**TEXT, "prompt": ["a", "b"], "n": 3})
        assert response.status_code == 400 and "at most 5" in response.json()["error"]["message"]
        too_long = [1] * CARD.max_model_len  # refused, too, but nobody has looked at it yet
        response = await client.post("/v1/completions", json={**TEXT, "prompt": [too_long] * 6})
        assert response.json()["error"]["param"] == "n"


async def test_chat_logprobs() -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 2}
    whole = await ask(backend(), body)
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == whole["usage"]["completion_tokens"]
    assert b"".join(bytes(e["bytes"]) for e in content[:-1]).decode() == ANSWER
    assert all(len(e["top_logprobs"]) == 2 and e["logprob"] == -0.5 for e in content)
    chunks = await stream(backend(), body)
    streamed = [e for c in chunks[:-1] for ch in c["choices"] if ch["logprobs"] for e in ch["logprobs"]["content"]]
    assert streamed == content
    bare = await ask(backend(), {**CHAT, "logprobs": True})
    assert bare["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    named = await ask(backend(), {**CHAT, "logprobs": True, "return_tokens_as_token_ids": True})
    assert named["choices"][0]["logprobs"]["content"][0]["token"] == f"token_id:{ids_of(ANSWER)[0]}"


async def test_legacy_logprobs_are_in_step_with_the_text() -> None:
    body = {**TEXT, "logprobs": 2, "stop": "capital"}
    whole = await ask(backend(), body)
    (choice,) = whole["choices"]
    logprobs, text = choice["logprobs"], choice["text"]
    assert text == ANSWER[: ANSWER.index("capital")]
    assert len({len(values) for values in logprobs.values()}) == 1
    assert all(offset < len(text) for offset in logprobs["text_offset"])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        # The last token may reach over the stop string's beginning; its first character is shown.
        assert token.startswith(("bytes:", text[offset : offset + len(token)]))
    assert all(len(top) in (2, 3) for top in logprobs["top_logprobs"])
    chunks = await stream(backend(), body)
    merged: dict[str, list[Any]] = {name: [] for name in logprobs}
    for chunk in chunks[:-1]:
        for name in merged:
            merged[name] += chunk["choices"][0]["logprobs"][name]
    assert merged == logprobs and joined(chunks) == text


async def test_echo_with_logprobs_as_lm_eval_reads_it() -> None:
    prompts = [ids_of("The quick brown fox"), ids_of("日本 capital")]
    body = {**TEXT, "prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    fake = backend()
    whole = await ask(fake, body)
    assert all(job.sampling.prompt_logprobs == 1 for job in fake.jobs)
    for choice, prompt in zip(whole["choices"], prompts, strict=True):
        logprobs = choice["logprobs"]
        assert choice["text"].startswith(TOKENIZER.decode(prompt))
        assert len(logprobs["token_logprobs"]) == len(prompt) + 1
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert all(value == -0.5 for value in logprobs["token_logprobs"][1:])
        assert all(
            token in top for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True)
        )
    only = await ask(backend(), {**body, "max_tokens": 0})
    for choice, prompt in zip(only["choices"], prompts, strict=True):
        assert choice["text"] == TOKENIZER.decode(prompt) and choice["finish_reason"] == "length"
        assert len(choice["logprobs"]["tokens"]) == len(prompt)
    assert only["usage"]["completion_tokens"] == 0


async def test_echo_of_text_is_what_the_client_wrote() -> None:
    body = {**TEXT, "prompt": "日本<|im_end|> ok", "echo": True, "logprobs": 0}
    whole = (await ask(backend(), body))["choices"][0]
    assert whole["text"] == "日本<|im_end|> ok" + ANSWER
    for token, offset in zip(whole["logprobs"]["tokens"], whole["logprobs"]["text_offset"], strict=True):
        assert token.startswith("bytes:") or token == "<|im_end|>" or whole["text"].startswith(token, offset)
    chunks = await stream(backend(), body)
    assert joined(chunks) == whole["text"]


async def test_prompt_logprobs_and_token_ids() -> None:
    for body in (TEXT, CHAT):
        fake = backend()
        whole = await ask(fake, {**body, "prompt_logprobs": 1, "return_token_ids": True})
        prompt, holder = fake.jobs[0].prompt, whole["choices"][0] if body is TEXT else whole
        values = holder["prompt_logprobs"]
        assert values[0] is None and len(values) == len(prompt)
        assert all(str(i) in value for i, value in zip(prompt[1:], values[1:], strict=True))
        assert holder["prompt_token_ids"] == prompt
        assert whole["choices"][0]["token_ids"] == [*ids_of(ANSWER), EOS_ID]
        chunks = await stream(backend(), {**body, "return_token_ids": True})
        ids = [i for c in chunks[:-1] for ch in c["choices"] for i in ch.get("token_ids", [])]
        assert ids == [*ids_of(ANSWER), EOS_ID]
        assert "prompt_token_ids" in json.dumps(chunks[0])


async def test_prompts_are_truncated_from_the_left() -> None:
    fake = backend()
    await ask(fake, {**TEXT, "prompt": list(range(5, 305)), "truncate_prompt_tokens": 10})
    await ask(fake, {**TEXT, "prompt": [5] * 5000, "truncate_prompt_tokens": -1, "max_tokens": 12})
    await ask(fake, {**TEXT, "prompt": "word " * 9000, "truncate_prompt_tokens": 100})
    assert [len(job.prompt) for job in fake.jobs] == [10, 500, 100] and fake.jobs[0].prompt == list(range(295, 305))


async def test_chat_messages_of_every_role() -> None:
    fake = backend()
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "bob"},
        {"role": "assistant", "content": "calling", "tool_calls": [call], "audio": None, "annotations": []},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "user", "content": "and?"},
    ]
    await ask(fake, {**CHAT, "messages": messages})
    text = TOKENIZER.decode(fake.jobs[0].prompt, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nrules<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n")


async def test_final_message_can_be_continued() -> None:
    fake = backend()
    messages = [*CHAT["messages"], {"role": "assistant", "content": "The answer is "}]
    await ask(fake, {**CHAT, "messages": messages, "continue_final_message": True})
    await ask(fake, {**CHAT, "messages": messages, "add_generation_prompt": False})
    texts = [TOKENIZER.decode(job.prompt, skip_special_tokens=False) for job in fake.jobs]
    assert texts[0].endswith("assistant\nThe answer is ") and texts[1].endswith("The answer is <|im_end|>\n")


async def test_a_stream_that_fails_ends_with_an_error_and_no_done() -> None:
    for failure in ("error", "abort", "deadline", EngineFault("nan in the logits")):
        for body in (CHAT, {**CHAT, "n": 2}):
            fake = backend(fail_after=3, failure=failure)
            chunks = await stream(fake, body)
            assert chunks[-1]["error"]["message"] and "[DONE]" not in chunks
            async with asgi_client(fake, CARD) as client:
                response = await client.post("/v1/chat/completions", json=body)
                assert response.status_code in (408, 500, 503) and response.json()["error"]["code"]


async def test_a_deadline_ends_both_kinds_of_answers() -> None:
    for streamed in (False, True):
        fake = backend(delay_s=0.02)
        async with asgi_client(fake, CARD) as client:
            body = {**CHAT, "stream": streamed, "ignore_eos": True}
            response = await client.post("/v1/chat/completions", json=body, headers={"x-request-timeout": "0.1"})
        error = events(response)[-1]["error"] if streamed else response.json()["error"]
        assert error["code"] == "deadline_exceeded" and "0.1 s" in error["message"]
        assert fake.cancelled


async def test_long_texts_are_tokenized_off_the_loop_and_equal() -> None:
    text = "The capital of 日本 is " * 30
    fakes = [backend(), backend()]
    for fake, inline in zip(fakes, (100_000, 0), strict=True):
        body = {**CHAT, "messages": [{"role": "user", "content": text}]}
        await ask(fake, body, tokenize_inline_chars=inline)
        await ask(fake, {**TEXT, "prompt": text}, tokenize_inline_chars=inline)
    assert [job.prompt for job in fakes[0].jobs] == [job.prompt for job in fakes[1].jobs]


async def test_requests_do_not_mix() -> None:
    fake = FakeBackend(lambda job: [*job.prompt, EOS_ID])
    async with asgi_client(fake, CARD) as client:

        async def one(i: int) -> None:
            body = {**TEXT, "prompt": f"request {i} ünïq", "stream": bool(i % 2)}
            response = await client.post("/v1/completions", json=body)
            text = joined(events(response)) if i % 2 else response.json()["choices"][0]["text"]
            assert text == f"request {i} ünïq"

        await asyncio.gather(*(one(i) for i in range(40)))
        assert "everwarm:http_requests_in_flight 0.0" in (await client.get("/metrics")).text
