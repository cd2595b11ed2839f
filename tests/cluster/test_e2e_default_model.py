"""The embedded model behind the whole stack, asked through the client that users have."""

from __future__ import annotations

import pytest
from conftest import Deployed
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240, func_only=True)]
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]


def test_the_capital_of_france_streamed_and_not(default_model: Deployed) -> None:
    client = OpenAI(base_url=f"{default_model.url}/v1", api_key="none", timeout=120)
    model = client.models.list().data[0].id
    assert model == "SmolLM2-135M-Instruct"
    whole = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=24)
    text, usage = whole.choices[0].message.content, whole.usage
    assert text and "Paris" in text and usage is not None
    assert whole.id == f"chatcmpl-{whole._request_id}"  # the header is there once, though Serve adds it too
    stream = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces, last = [], None
    for chunk in stream:
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        last = chunk.usage or last
    assert "".join(pieces) == text
    assert sum(map(bool, pieces)) == usage.completion_tokens or whole.choices[0].finish_reason == "stop"
    assert last is not None and last.prompt_tokens == usage.prompt_tokens
    assert last.completion_tokens == usage.completion_tokens
    assert last.prompt_tokens_details is not None
    # 37 tokens with the model's system prompt: the second time, every full page of them is cached on its holder.
    assert last.prompt_tokens_details.cached_tokens == (usage.prompt_tokens - 1) // 16 * 16 > 0
