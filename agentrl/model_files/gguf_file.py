"""What a GGUF file says of itself: its metadata and the shapes of its tensors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, PolicyError, install_command

# Kinds of tokens, as `tokenizer.ggml.token_type` numbers them.
CONTROL, USER_DEFINED, BYTE = 3, 4, 6
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


class GgufFile:
    """The metadata of a file. Raises PolicyError if it is not a whole GGUF file, ConfigError if the
    package `gguf` is missing."""

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ModuleNotFoundError:
            raise ConfigError(f"gguf is missing: {install_command('gguf')}") from None
        try:
            reader = GGUFReader(path)
        except (ValueError, LookupError, OverflowError, MemoryError, OSError) as error:
            raise PolicyError(
                f"{path}: it is not a GGUF file, or not all of it is there ({error}); fetch "
                "it again"
            ) from None
        self.path, self._fields = path, reader.fields
        self.shapes = {one.name: [int(n) for n in one.shape] for one in reader.tensors}
        if int(self.value("split.count", 1)) > 1:
            raise PolicyError(
                f"{path}: it is one of {self.value('split.count')} parts; join them first, with "
                "llama-gguf-split --merge"
            )
        self.architecture = str(self.value("general.architecture", "unknown"))
        self.tokens: list[str] = self.value("tokenizer.ggml.tokens", [])
        self.kinds: list[int] = self.value("tokenizer.ggml.token_type", [1] * len(self.tokens))
        self._check_vocabulary()

    def value(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def token(self, role: str) -> int | None:
        """The id of the token of a role, such as "eos"."""
        number = self.value(f"tokenizer.ggml.{role}_token_id")
        return None if number is None or number >= len(self.tokens) else int(number)

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def _check_vocabulary(self) -> None:
        if not self.tokens or EMBEDDING not in self.shapes:
            raise PolicyError(
                f"{self.path}: it has no tokenizer or no embedding of tokens, so it is not a "
                "language model; give the file of the model itself"
            )
        rows, head = (self.shapes.get(name, [0])[-1] for name in (EMBEDDING, HEAD))
        known = self.value(f"{self.architecture}.vocab_size", len(self.tokens))
        if rows < len(self.tokens) or known != rows or head not in (0, rows):
            raise PolicyError(
                f"{self.path}: its tokenizer has {len(self.tokens)} tokens, its embedding {rows} "
                f"and its head {head or rows}, and it says {known}: they are not of one model; "
                "take another conversion of it"
            )
