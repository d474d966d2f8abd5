"""Text to tokens and back: cached encoding, streaming decoding, stop strings."""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from threading import Lock
from typing import Any, Generic, TypeVar

from agentrl.algorithms.formats.tool_formats import parser_of
from agentrl.algorithms.model.load import Tokenizer

T = TypeVar("T")
CACHED_PIECES = 2**26  # bytes of cached encodings of texts between special tokens
TOKEN_BYTES = 36  # of a token id in a sequence of Python
LARGE = 2**16  # characters whose encoding takes long, so that other threads run meanwhile
LARGEST_SPLIT = 2**20  # characters of a text that is encoded in pieces
SPREAD = 1024  # bytes that a token is thought to stand for at most, if it may stand for any number
KEPT = {"ByteLevel", "Split", "Digits", "Metaspace", "Sequence", "Punctuation", "UnicodeScripts"}
KEPT |= {"NFC", "Prepend"}
"""Steps of tokenizers that drop no character, unless they remove what they split at."""
COMPOSED = 3  # characters of Hangul that NFC makes one of the same size, the most of all scripts
_SPACE = "\u2581"  # SentencePiece's
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece's token of one byte
_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that GPT-2 spells as Latin-1
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]  # and those from U+0100 on
_BYTES = dict(
    zip(map(chr, (*_SHOWN, *range(256, 256 + len(_HIDDEN)))), _SHOWN + _HIDDEN, strict=True)
)
_PROBE = " a\n b "


class TooLongError(ValueError):
    """A text has more tokens than fit. what: how long it is, for a sentence."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} do not fit")
        self.what = what


class ByteCache(Generic[T]):
    """The values that were used last, up to a number of bytes. For any thread."""

    def __init__(self, most: int) -> None:
        self._most, self._size, self._lock = most, 0, Lock()
        self._found: OrderedDict[object, tuple[T, int]] = OrderedDict()

    def get(self, key: object) -> T | None:
        with self._lock:
            if (entry := self._found.get(key)) is None:
                return None
            self._found.move_to_end(key)
            return entry[0]

    def put(self, key: object, value: T, size: int) -> None:
        """size: bytes of key and value."""
        with self._lock:
            self._size += size - self._found.pop(key, (value, 0))[1]
            self._found[key] = value, size
            while self._size > self._most:
                _, (_, freed) = self._found.popitem(last=False)
                self._size -= freed

    @property
    def size(self) -> int:
        return self._size


class Codec:
    """A tokenizer with caches. Invariant: `encode` equals encoding the whole text at once.

    limit: tokens that are too many. A text that certainly has as many is refused before it is
    encoded wholly, and no text with as many is cached."""

    def __init__(self, tokenizer: Tokenizer, limit: int | None = None) -> None:
        self._tokenizer, self.parser = tokenizer, parser_of(tokenizer)
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:  # its file may have limits, which transformers removes late
            self._backend.no_truncation()
            self._backend.no_padding()
        self._hidden = frozenset(
            number
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.special and token.content not in self.parser.marks
        )
        self.limit = math.inf if limit is None else limit
        self.most_bytes = self.limit if limit is None else limit * bytes_per_token(tokenizer)
        self._pieces = ByteCache[list[int]](CACHED_PIECES)
        self.token = lru_cache(None)(self._token)
        self._special_tokens = self._special_token_pattern()

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text, in which special tokens are written out.

        Raises TooLongError for a text that certainly has `limit` tokens or more."""
        self.check(text)
        if self._special_tokens is None or len(text) > LARGEST_SPLIT:
            return self._encode(text)
        # Texts between special tokens repeat in a conversation, and encoding is the largest cost
        # of a request besides the model.
        ids, new = list[int](), dict[str, list[int]]()
        for piece in filter(None, self._special_tokens.split(text)):
            found = self._pieces.get(piece) or new.get(piece)
            if found is None:
                found = new[piece] = self._encode(piece)
            ids += found
            if len(ids) > 2 * self.limit:
                raise TooLongError(f"over {len(ids)} tokens")
        if len(ids) < self.limit:
            for piece, found in new.items():
                self._pieces.put(piece, found, 4 * len(piece) + TOKEN_BYTES * len(found))
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the tokenizer adds. Raises as
        `encode`."""
        self.check(text)
        return self._encode(text, special=True)

    def check(self, text: str) -> None:
        """Raise TooLongError for a text of so many bytes that no tokens below `limit` have them."""
        if 4 * len(text) > self.most_bytes and (size := len(text.encode())) > self.most_bytes:
            raise TooLongError(f"{size} bytes")

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        visible = [token for token in tokens if token not in self._hidden]
        return str((self._backend or self._tokenizer).decode(visible, skip_special_tokens=False))

    def _token(self, token: int) -> tuple[str, list[int]]:
        """The text of one token, and its bytes: those of all tokens together are UTF-8."""
        text, piece = str(self._tokenizer.decode([token])), self._piece_of(token)
        if (byte := _BYTE.fullmatch(piece)) and "\ufffd" in text:
            return text, [int(byte[1], 16)]
        if "\ufffd" in text and all(character in _BYTES for character in piece):
            return text, [_BYTES[character] for character in piece]
        if piece.startswith(_SPACE) and not text.startswith(" "):
            text = f" {text}"  # the decoder drops it from the start of a text
        return text, list(text.encode())

    def _piece_of(self, token: int) -> str:
        """The token as its vocabulary spells it."""
        return str(self._tokenizer.convert_ids_to_tokens(token) or "")

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        """special: with the special tokens that the tokenizer adds."""
        if self._backend is None:
            found = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        elif len(text) <= LARGE:
            found = self._backend.encode(text, add_special_tokens=special).ids
        else:
            found = self._encode_large(text, special)
        ids: list[int] = found
        return ids

    def _encode_large(self, text: str, special: bool) -> list[int]:
        """The start of a text tells that it is too long, whatever follows: an end changes only the
        tokens beside it. All of a text takes over a hundred times its memory."""
        size = len(text) if math.isinf(self.limit) else max(LARGE, 16 * int(self.limit))
        while size < len(text):
            if (count := len(self._encode_aside(text[:size], special))) > 2 * self.limit:
                raise TooLongError(f"over {count} tokens")
            size *= 2
        return self._encode_aside(text, special)

    def _encode_aside(self, text: str, special: bool) -> list[int]:
        """As `backend.encode`, which keeps other threads of Python from running."""
        assert self._backend is not None
        (found,) = self._backend.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = found.ids
        return ids

    def _special_token_pattern(self) -> re.Pattern[str] | None:
        """A pattern of the added tokens; None if separate encoding would change the tokens."""
        added = list(self._tokenizer.added_tokens_decoder.values())
        if not added or any(token.lstrip or token.rstrip or token.single_word for token in added):
            return None
        names = sorted((token.content for token in added), key=len, reverse=True)
        border = re.compile(f"({'|'.join(map(re.escape, names))})")
        probe = _PROBE + _PROBE.join(names) + _PROBE
        pieces = [token for piece in border.split(probe) if piece for token in self._encode(piece)]
        return border if pieces == self._encode(probe) else None


def bytes_per_token(tokenizer: Tokenizer) -> int:
    """Most bytes of text for which one token stands. Where a token may stand for any number, such
    as that of unknown words, SPREAD at least, for more of which on average no model is of use."""
    vocabulary = tokenizer.get_vocab()
    longest = max((len(text.encode()) for text in vocabulary), default=1)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return max(longest, SPREAD)
    steps = [_state(backend.normalizer), _state(backend.pre_tokenizer)]
    for step in steps:  # what a step consists of follows it
        steps += step.get("normalizers", []) + step.get("pretokenizers", [])
    kinds = {str(step["type"]) for step in steps if step and step != SPACES}
    removes = any(step.get("behavior") == "Removed" for step in steps)
    added = backend.get_added_tokens_decoder().values()
    strips = any(token.lstrip or token.rstrip for token in added)
    spelled = "ByteLevel" in kinds and vocabulary.keys() >= _BYTES.keys()
    if not (spelled or getattr(backend.model, "byte_fallback", False)):
        strips = True  # as one token may stand for many unknown characters
    longest *= COMPOSED if "NFC" in kinds else 1
    return max(longest, SPREAD) if removes or strips or not kinds <= KEPT else longest


SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}


def _state(part: Any) -> dict[str, Any]:
    return {} if part is None else json.loads(part.__getstate__())


class TextStream:
    """Streams the text of one completion in whole characters, up to a stop string."""

    def __init__(self, codec: Codec, stop: Sequence[str] = ()) -> None:
        self._codec, self._stop = codec, stop
        self._keep = max(map(len, stop), default=1) - 1  # withheld: may start a stop string
        self._tokens: list[int] = []
        self._read = 0  # number of decoded tokens
        self._shown = 0  # of these, the number not decoded again as context of the next ones
        self._text = ""  # decoded, not yet returned
        self.stopped = False

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens; returns the text that is final."""
        return self._add(tokens, last=False)

    def finish(self) -> str:
        """The remaining text, including incomplete characters."""
        return self._add((), last=True)

    def _add(self, tokens: Sequence[int], *, last: bool) -> str:
        self._tokens += tokens
        known = self._codec.decode(self._tokens[self._shown : self._read])
        text = self._codec.decode(self._tokens[self._shown :])
        if last or not text.endswith("\ufffd"):
            self._text += text[len(known) :]
            self._shown, self._read = self._read, len(self._tokens)
        if self.stopped:
            return ""
        keep = 0 if last else self._keep
        whole = text_before_stop(self._text, self._stop)
        if len(whole) < len(self._text):
            self.stopped, keep = True, 0
        end = max(len(whole) - keep, 0)
        given, self._text = whole[:end], whole[end:]
        return given


def text_before_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string."""
    ends = [at for at in (text.find(string) for string in stop) if at >= 0]
    return text[: min(ends)] if ends else text
