"""Decode tokens with the policy's tokenizer, without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from agentrl.config import from_store
from agentrl.config import policies as team
from agentrl.errors import AgentRLError
from agentrl.types import Json

REPLACEMENT = "\ufffd"  # the text of a token that is part of a character


class Spelling:
    """Decodes the tokens of one policy. `missing`: why it cannot, and shows ids instead."""

    def __init__(self, file: Path | None, missing: str = "") -> None:
        self._tokenizer, self.missing = None, missing
        self._image: int | None = None  # the token that stands for images
        if file is not None:
            try:
                from tokenizers import Tokenizer

                self._tokenizer = Tokenizer.from_buffer(file.read_bytes())
                self._image = _image_token(file.parent)
            except (ImportError, OSError, ValueError) as error:
                self.missing = f"{file} cannot be read ({error})"

    def text(self, ids: Sequence[int]) -> str:
        """The text of all tokens, including special ones; their ids without a tokenizer."""
        if self._tokenizer is None:
            return " ".join(map(str, ids))
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def prompt(self, ids: Sequence[int], images: Sequence[str]) -> str:
        """The text of a prompt, with these descriptions of its images in place of placeholders."""
        runs = [(image, [*run]) for image, run in groupby(ids, self._image.__eq__)]
        sizes = [len(run) for image, run in runs if image is True]
        if not sizes or not images or self._tokenizer is None:
            return self.text(ids)
        once = [id for image, run in runs for id in (run[:1] if image is True else run)]
        texts = self.text(once).split(self._tokenizer.id_to_token(self._image))
        if len(texts) != len(sizes) + 1:  # its text is also that of other tokens
            return self.text(ids)
        # Images side by side are one run, and the policy may have sampled a placeholder itself.
        named = images if len(images) == len(sizes) else ["[image]"] * len(sizes)
        shown = (f"{one[:-1]}, {n} tokens]" for one, n in zip(named, sizes, strict=True))
        return "".join(text + next(shown, "") for text in texts)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token; joined they are `text(ids)`. Tokens that end inside a character
        have the text '', and the token that completes it has the whole character.

        Each is decoded together with only the one before it, so the time is linear in their
        number."""
        if self._tokenizer is None:
            return [f"{id} " for id in ids[:-1]] + [str(id) for id in ids[-1:]]
        found, start, read = list[str](), 0, 0
        for end in range(1, len(ids) + 1):
            text, known = self.text(ids[start:end]), self.text(ids[start:read])
            if text.endswith(REPLACEMENT) and end < len(ids):
                found.append("")
                continue
            found.append(text[len(known) :])
            start, read = read, end
        return found


def _image_token(folder: Path) -> int | None:
    """The token for images of the model in a folder, if it reads images."""
    file = folder / "config.json"
    shape = json.loads(file.read_bytes()) if file.is_file() else {}
    found = shape.get("image_token_id", shape.get("image_token_index"))
    return found if isinstance(found, int) else None


def spelling(config: dict[str, Json], policy: str) -> Spelling:
    """The spelling of a policy's tokens, from the settings that its run stored."""
    try:
        run = from_store(config)
        name = (team.view(run, policy) if policy in run.policies else run).model_path()
    except AgentRLError as error:
        return Spelling(None, f"the settings of the run cannot be read: {error}")
    file = Path(name, "tokenizer.json")
    if name and file.is_file():
        return Spelling(file)
    try:
        from huggingface_hub import try_to_load_from_cache  # never downloads

        cached = try_to_load_from_cache(name, file.name)
    except (ImportError, ValueError):  # not a hub name
        cached = None
    if isinstance(cached, str):
        return Spelling(Path(cached))
    return Spelling(None, f"the tokenizer of {name or policy} is not on this machine")
