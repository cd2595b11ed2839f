"""Text <-> token ids, built from a checkpoint directory or from GGUF metadata.

Decoding is by bytes: every token has a fixed byte string, and text is the UTF-8 decoding (with replacement) of their
concatenation. That is what ``tokenizers`` computes for byte-level vocabularies, and it is what makes decoding
incremental: no token's bytes depend on its neighbours.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_GGUF_CONTROL, _GGUF_USER_DEFINED = 3, 4
_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "</s>", "<end_of_turn>")
"""End a turn in some family. In a GGUF these are added to its own eos, which names only one."""


class TokenizerError(Exception):
    """The checkpoint's tokenizer can't be used; the message says which part and why."""


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of each byte (Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(b): b for b in printable}, **{chr(256 + i): b for i, b in enumerate(others)}}


class Tokenizer:
    """A ``tokenizers`` pipeline with the special tokens and the chat template of its checkpoint."""

    def __init__(
        self,
        backend: Backend,
        *,
        special: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
        templates: Mapping[str, str] | None = None,
    ) -> None:
        """``special`` maps bos_token, eos_token, ... to their text, as chat templates see them.

        Raises TokenizerError when the decoder isn't byte-exact (neither ByteLevel nor byte fallback).
        """
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special = dict(special or {})
        self.chat_template = chat_template
        self.templates = dict(templates or {})
        self.added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in self.added.items() if token.special)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        eos = self.token_id(self.special.get("eos_token"))
        self.eos_token_ids = tuple(dict.fromkeys([*([] if eos is None else [eos]), *eos_token_ids]))
        self.strips_leading_space = False
        self.token_bytes = self._byte_table()
        self.max_token_bytes = max(map(len, self.token_bytes), default=1)

    def token_id(self, text: str | None) -> int | None:
        return None if text is None else self.backend.token_to_id(text)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # A batch of one, since ``encode`` holds the interpreter: in a thread, too, it would stop the event loop.
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence; ids outside the vocabulary have none."""
        table, size, skip = self.token_bytes, self.vocab_size, self.special_ids if skip_special_tokens else ()
        text = b"".join([table[i] for i in ids if 0 <= i < size and i not in skip]).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def bytes_of(self, token_id: int) -> bytes:
        return self.token_bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of the whole pipeline: equal exactly when two processes tokenize alike."""
        return blake2b(self.backend.to_str().encode(), digest_size=16).hexdigest()

    def _byte_table(self) -> list[bytes]:
        steps = _decoder_steps(self.backend)
        kinds = [step["type"] for step in steps]
        table = [b""] * self.vocab_size
        vocab = self.backend.get_vocab(with_added_tokens=True)
        if kinds == ["ByteLevel"]:
            alphabet = {ord(char): chr(byte) for char, byte in _byte_alphabet().items()}
            latin = set(_byte_alphabet())
            for text, index in vocab.items():
                mapped = latin.issuperset(text)
                table[index] = text.translate(alphabet).encode("latin-1") if mapped else text.encode()
        elif "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
            self.strips_leading_space = "Strip" in kinds or "Metaspace" in kinds
            for text, index in vocab.items():
                byte = len(text) == 6 and text.startswith("<0x") and text.endswith(">")
                table[index] = bytes([int(text[3:5], 16)]) if byte else text.replace("\u2581", " ").encode()
            for index, token in self.added.items():
                table[index] = token.content.encode()
        else:
            raise TokenizerError(
                f"the tokenizer's decoder is {kinds or 'missing'}; only ByteLevel and byte-fallback decoders are known"
            )
        return table


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def from_hf(directory: str | Path) -> Tokenizer:
    """Reads tokenizer.json, tokenizer_config.json, generation_config.json and chat templates of a checkpoint.

    Without a tokenizer.json, transformers converts what is there. Raises TokenizerError when nothing can be read.
    """
    root = Path(directory)
    if (root / "tokenizer.json").is_file():
        backend = Backend.from_file(str(root / "tokenizer.json"))
    else:
        backend = _converted(root)
    config = _read_json(root / "tokenizer_config.json")
    special = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in {**_read_json(root / "special_tokens_map.json"), **config}.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }
    template = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(template, list):
        templates = {entry["name"]: entry["template"] for entry in template}
        template = templates.get("default")
    if (root / "chat_template.jinja").is_file():
        template = (root / "chat_template.jinja").read_text(encoding="utf-8")
    eos = _read_json(root / "generation_config.json").get("eos_token_id")
    if eos is None:
        eos = _read_json(root / "config.json").get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return Tokenizer(backend, special=special, eos_token_ids=ids, chat_template=template, templates=templates)


def _converted(root: Path) -> Backend:
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(root), local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise TokenizerError(f"no usable tokenizer in {root}: {error}") from None
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise TokenizerError(f"{type(loaded).__name__} in {root} has no fast form; a tokenizer.json is needed")
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _pre_tokenizer(pre: str) -> tuple[Any, Any, bool]:
    """(normalizer, pre-tokenizer, ignore_merges) of a ``tokenizer.ggml.pre`` name."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        return None, pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level]), False
    if pre in ("gpt-2", "gpt2", "default"):
        return None, byte_level, False
    splits = {"llama-bpe": _LLAMA3_SPLIT, "llama3": _LLAMA3_SPLIT, "qwen2": _QWEN2_SPLIT}
    if pre not in splits:
        known = "smollm, gpt-2, llama-bpe, qwen2"
        raise TokenizerError(f"tokenizer.ggml.pre is {pre!r}; known are {known}. Use the safetensors checkpoint.")
    split = pre_tokenizers.Split(Regex(splits[pre]), behavior="isolated")
    raw = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    normalizer = normalizers.NFC() if pre == "qwen2" else None
    return normalizer, pre_tokenizers.Sequence([split, raw]), pre != "qwen2"


def from_gguf_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer out of a GGUF's ``tokenizer.*`` keys. Raises TokenizerError for kinds not known here."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise TokenizerError(f"tokenizer.ggml.model is {kind!r}; only 'gpt2' (byte-level BPE) is supported")
    tokens: list[str] = list(metadata["tokenizer.ggml.tokens"])
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    types = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))]
    normalizer, pre_tokenizer, ignore_merges = _pre_tokenizer(metadata.get("tokenizer.ggml.pre", "default"))
    vocab = {text: index for index, text in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    pairs = list(zip(tokens, types, strict=True))
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, k in pairs if k == _GGUF_CONTROL])
    backend.add_tokens([AddedToken(t, normalized=False) for t, k in pairs if k == _GGUF_USER_DEFINED])

    def named(key: str) -> str | None:
        index = metadata.get(f"tokenizer.ggml.{key}")
        return None if index is None or not 0 <= int(index) < len(tokens) else tokens[int(index)]

    names = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}
    special = {name: text for name, key in {**names, "pad_token": "padding_token_id"}.items() if (text := named(key))}
    if metadata.get("tokenizer.ggml.add_bos_token") and "bos_token" in special:
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, vocab[bos])]
        )
    controls = {text for text, kind in pairs if kind == _GGUF_CONTROL}
    ends = [vocab[text] for text in _END_TOKENS if text in controls]
    ends += [
        int(metadata[key]) for key in ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id") if key in metadata
    ]
    return Tokenizer(
        backend, special=special, eos_token_ids=ends, chat_template=metadata.get("tokenizer.chat_template")
    )
