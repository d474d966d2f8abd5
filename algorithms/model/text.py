"""Text to tokens and back: cached encoding, streaming decoding, stop strings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from agentrl.algorithms.model.load import Tokenizer
from agentrl.algorithms.model.tool_parser import parser_of

CACHED_PIECES = 8192  # cached encodings of texts between special tokens
_SPACE = "\u2581"  # SentencePiece's
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece's token of one byte
_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that GPT-2 spells as Latin-1
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]  # and those from U+0100 on
_BYTES = dict(
    zip(map(chr, (*_SHOWN, *range(256, 256 + len(_HIDDEN)))), _SHOWN + _HIDDEN, strict=True)
)
_PROBE = " a\n b "


class Codec:
    """A tokenizer with caches. Invariant: `encode` equals encoding the whole text at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.parser = tokenizer, parser_of(tokenizer)
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._hidden = frozenset(
            number
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.special and token.content not in self.parser.marks
        )
        self._piece = lru_cache(CACHED_PIECES)(self._encode)
        self.token = lru_cache(None)(self._token)
        self._special_tokens = self._special_token_pattern()

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text, in which special tokens are written out."""
        if self._special_tokens is None:
            return self._encode(text)
        # Texts between special tokens repeat in a conversation, and encoding is the largest cost
        # of a request besides the model.
        return [
            token
            for piece in self._special_tokens.split(text)
            if piece
            for token in self._piece(piece)
        ]

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the tokenizer adds."""
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

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

    def _encode(self, text: str) -> list[int]:
        if self._backend is None:
            ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = self._backend.encode(text, add_special_tokens=False).ids
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
