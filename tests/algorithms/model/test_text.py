from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentrl.algorithms.model import chat
from agentrl.algorithms.model.chat import (
    ByteCache,
    Codec,
    TextStream,
    TooLongError,
    bytes_per_token,
    text_before_stop,
)

TEXTS = [
    "",
    " a  b\n",
    "Grüße, 世界 🙂",
    "<|im_start|>user\n hi<|im_end|>\n<tool_call>\n{}</tool_call>",
]


@pytest.fixture(scope="module")
def codec(tiny_model_dir: Path) -> Codec:
    return Codec(AutoTokenizer.from_pretrained(tiny_model_dir))


@pytest.mark.parametrize("text", TEXTS)
def test_encoding_in_pieces_equals_encoding_the_whole(codec: Codec, text: str) -> None:
    assert codec._special_tokens is not None
    whole = codec._tokenizer(text, add_special_tokens=False)["input_ids"]
    assert codec.encode(text) == whole
    assert codec.encode(text) == whole  # the second time from what was remembered


def test_a_tokenizer_that_cannot_be_split_encodes_the_whole(tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.add_tokens([AddedToken("<mark>", lstrip=True, rstrip=True, normalized=False)])
    codec = Codec(tokenizer)
    assert codec._special_tokens is None
    text = "a <mark> b"
    assert codec.encode(text) == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_decoding_hides_special_tokens_but_not_tool_tags(codec: Codec) -> None:
    tokens = codec.encode("<|im_start|><tool_call>x</tool_call><|im_end|>")
    assert codec.decode(tokens) == "<tool_call>x</tool_call>"


@given(st.text(max_size=30))
def test_a_stream_of_tokens_gives_the_text(codec: Codec, text: str) -> None:
    tokens = codec.encode(text)
    stream = TextStream(codec)
    parts = [stream.push((token,)) for token in tokens]
    assert "".join(parts) + stream.finish() == codec.decode(tokens)
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text


@given(st.text(alphabet="ab ", max_size=30), st.lists(st.text("ab ", min_size=1), max_size=3))
def test_stop_strings_cut_a_stream_as_the_whole(codec: Codec, text: str, stop: list[str]) -> None:
    stream = TextStream(codec, stop)
    shown, sampled = "", []
    for token in codec.encode(text):
        sampled.append(token)
        shown += stream.push((token,))
        if stream.stopped:  # a completion ends with the token that completes a stop string
            break
    shown += stream.finish()
    assert (shown, stream.ended_by) == text_before_stop(codec.decode(sampled), stop)
    assert stream.stopped == any(string in text for string in stop)


TEXT = " Zoë says \u2014 «日本 😀» \ufffd <0xE2> \u00a0\u2581x<|im_end|> "


@pytest.fixture
def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2's: a space is U+2581, and what no token spells is one token per byte."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581", *"Zosay", "\u2581s", "ë"]
    backend = Tokenizer(models.BPE({p: n for n, p in enumerate(pieces)}, [], byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("text", [TEXT, "é", "😀", "\ufffd", "  ", "plain"])
def test_the_bytes_of_all_tokens_are_the_text(
    codec: Codec, byte_fallback: PreTrainedTokenizerFast, text: str
) -> None:
    tokens = codec.encode(text)
    assert bytes(byte for token in tokens for byte in codec.token(token)[1]) == text.encode()
    other = Codec(byte_fallback)
    tokens = other.encode(text)
    raw = bytes(byte for token in tokens for byte in other.token(token)[1]).decode()
    assert raw == " " + text.replace("\u2581", " ")  # which that tokenizer cannot tell apart


# -- large texts -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


def test_a_large_text_has_the_tokens_that_the_tokenizer_gives(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "LARGE", 2**10)
    monkeypatch.setattr(chat, "MAX_SPLIT_CHARS", 2**14)
    limited = Codec(tokenizer, 30_000)
    for text in ("Hello <|im_end|> world\n" * 160, "x" * 1100, "Ada <tool_call>" * 1250):
        assert limited.encode(text) == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert limited.encode_plain(text) == tokenizer(text)["input_ids"]


@pytest.mark.parametrize("text", ["Ada, " * 200_000, "x" * 5_000_000, "Ada<|im_end|>" * 100_000])
def test_a_text_that_is_too_long_is_refused_and_leaves_nothing(tokenizer: Any, text: str) -> None:
    codec = Codec(tokenizer, 512)
    with pytest.raises(TooLongError):
        codec.encode(text)
    with pytest.raises(TooLongError):
        codec.encode_plain(text)
    assert codec._pieces.size == 0


def test_a_text_is_refused_by_its_bytes_only_if_sure(tokenizer: Any) -> None:
    longest = max(tokenizer.get_vocab(), key=lambda token: len(token.encode()))
    text = longest * 511  # a token each
    assert len(Codec(tokenizer, 512).encode(text)) == 511
    other = copy.deepcopy(tokenizer)
    other.backend_tokenizer.normalizer = None
    assert bytes_per_token(other) == len(longest.encode())
    other.backend_tokenizer.normalizer = normalizers.NFC()
    assert bytes_per_token(other) == 3 * len(longest.encode())
    for change in (normalizers.Strip(), normalizers.Lowercase()):
        other.backend_tokenizer.normalizer = change
        assert bytes_per_token(other) == 1024
    words = Tokenizer(models.WordLevel({"Ada": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert bytes_per_token(PreTrainedTokenizerFast(tokenizer_object=words)) == 1024


def test_limits_in_the_file_of_a_tokenizer_cut_no_text(tokenizer: Any) -> None:
    other = copy.deepcopy(tokenizer)
    other.backend_tokenizer.enable_truncation(2)
    assert Codec(other).encode("Hello world") == tokenizer("Hello world")["input_ids"]


def test_a_cache_keeps_what_was_used_last_up_to_its_bytes() -> None:
    cache = ByteCache[str](10)
    cache.put("a", "A", 4)
    cache.put("b", "B", 4)
    assert cache.get("a") == "A"
    cache.put("c", "C", 4)
    assert [cache.get(key) for key in "abc"] == ["A", None, "C"]
    cache.put("a", "A", 5)
    assert cache.size == 9
    cache.put("d", "D", 11)  # alone too large
    assert cache.get("d") is None
    assert cache.size == 0
