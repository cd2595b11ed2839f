"""Bytes forced through the sampler: what a stream shows is what the whole answer shows, and no character is broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stack import Stack, stack

TEXTS = [
    "👩‍👩‍👧‍👦🏳️‍🌈👍🏽",
    "e\u0301\u0302 ñ ộ क्षि",
    "日本語、漢字と한국어",
    "العَرَبِيَّة مرحبًا",
    "𝔘𐍈\u200d\u2060z\u0000\ufffd!",
]
"""Joined emoji, combining marks, CJK, Arabic, beyond the BMP; the last holds a U+FFFD of its own."""
PARTS: dict[str, list[int]] = {
    "continuations": list(range(0x80, 0xC0)),
    "leads and continuations": [0x80, 0x9F, 0xBF, 0xC3, 0xE2, 0xF0],
    "surrogates and overlongs": [0xED, 0xA0, 0xC0, 0xAF, 0xE0, 0x80],
    "mixed with ASCII": [0x41, 0x20, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80],
    "never valid": [0xC0, 0xC1, 0xF5, 0xFE, 0xFF],
}


async def both(made: Stack, body: dict[str, Any]) -> tuple[list[str], list[str], list[list[int]]]:
    """(whole texts, streamed texts, token ids), by choice; holds every delta to the whole text."""
    body = {"prompt": "x", "temperature": 1, "return_token_ids": True, **body}
    response = await made.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    whole = [choice["text"] for choice in choices]
    deltas: list[list[str]] = [[] for _ in whole]
    streamed = (await made.http.post("/v1/completions", json={**body, "stream": True})).text
    for line in streamed.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                deltas[choice["index"]].append(choice["text"])
    for text, parts in zip(whole, deltas, strict=True):
        assert "".join(parts) == text
        assert sum(part.count("\ufffd") for part in parts) == text.count("\ufffd")
    return whole, ["".join(parts) for parts in deltas], [choice["token_ids"] for choice in choices]


async def test_text_and_broken_bytes_stream_as_they_read(tiny: Path) -> None:
    async with stack(str(tiny), 1, max_num_pages=512) as made:
        tokenizer = made.api.services.card.tokenizer
        by_byte = {raw[0]: i for i, raw in enumerate(tokenizer.token_bytes) if len(raw) == 1}
        assert len(by_byte) == 256, "one token per byte"
        for text in TEXTS:
            whole, _, _ = await both(made, {"structured_outputs": {"choice": [text]}, "max_tokens": 200})
            assert whole == [text]
            stops = {"structured_outputs": {"choice": [text + "END"]}, "max_tokens": 200, "stop": ["END"]}
            assert (await both(made, stops))[0] == [text]
            cut = {"structured_outputs": {"choice": [text]}, "max_tokens": len(text.encode()) - 1}
            ((short,), _, (ids,)) = await both(made, cut)
            raw = b"".join(tokenizer.token_bytes[i] for i in ids)
            assert raw == text.encode()[:-1] and short == raw.decode("utf-8", "replace")
        for name, values in PARTS.items():
            allowed = [by_byte[value] for value in values]
            forced = {"allowed_token_ids": allowed, "max_tokens": 60, "ignore_eos": True, "seed": 9, "n": 6}
            whole, _, ids_of = await both(made, {**forced, "stop": ["\ufffdA"]} if "ASCII" in name else forced)
            for text, ids in zip(whole, ids_of, strict=True):
                assert set(ids) <= set(allowed)
                raw = b"".join(tokenizer.token_bytes[i] for i in ids)
                expected = raw.decode("utf-8", "replace")
                assert text == expected.partition("\ufffdA")[0], name


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/messages"])
async def test_chat_routes_break_no_character_either(tiny: Path, route: str) -> None:
    async with stack(str(tiny), 1, max_num_pages=512) as made:
        tokenizer = made.api.services.card.tokenizer
        emoji = [bytes([byte]) for byte in "😀".encode()]
        biased = {str(i): 30 for i, raw in enumerate(tokenizer.token_bytes) if raw in emoji}
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 80, "model": "tiny"}
        if route == "/v1/chat/completions":
            body |= {"logit_bias": biased, "seed": 3, "temperature": 1, "ignore_eos": True}
        else:
            body |= {"temperature": 0}
        whole = (await made.http.post(route, json=body)).json()
        text = whole["choices"][0]["message"]["content"] if "choices" in whole else whole["content"][0]["text"]
        streamed = (await made.http.post(route, json={**body, "stream": True})).text
        parts = []
        for line in streamed.splitlines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                parts += [choice["delta"].get("content", "") for choice in event.get("choices", ())]
                parts.append(event.get("delta", {}).get("text", ""))
        assert "".join(parts) == text and text
        assert sum(part.count("\ufffd") for part in parts) == text.count("\ufffd")
