"""Renders requests with images: the template writes a placeholder for each, which becomes as many
as the image has visual embeddings.

A placeholder that stands in the text of a message, such as one that the policy sampled, is text: it
is hidden from the search by a mark while the template renders.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from hashlib import sha256
from typing import Any

import jinja2
import msgspec
import numpy as np

from agentrl.algorithms.model.chat import (
    Chat,
    RequestError,
    WrittenArguments,
    template_message,
    text_content,
)
from agentrl.algorithms.model.inputs import ReadPrompt
from agentrl.algorithms.model.load import Tokenizer
from agentrl.algorithms.model.text import Codec
from agentrl.base.images import SCHEME, url_of
from agentrl.types import Json
from agentrl.vision.eyes import ImageInputs
from agentrl.vision.images import ImageError, Seen, ids_of, positions

DATA = "data:"  # how the URL of an image begins that is there itself
MARK = "\ufdd0"  # no character of any text
OTHERS = ("input_audio", "audio_url", "video_url", "video", "file")


class SeeingChat(Chat):
    """A `Chat` of a policy with `ImageInputs`."""

    text_only = False

    def __init__(self, tokenizer: Tokenizer, codec: Codec, eyes: ImageInputs) -> None:
        super().__init__(tokenizer, codec)
        self._eyes = eyes
        self._id = int(eyes.model.config.image_token_id)
        self._placeholder: str = tokenizer.convert_ids_to_tokens(self._id)
        self._parts = self._wants_parts()

    async def fetch(self, messages: bytes) -> None:
        """Number the images of a request. Raises RequestError for one that cannot be seen."""
        # Images may be large, so they are read beside the event loop.
        catalogue, urls = self._eyes.catalogue, await asyncio.to_thread(_urls_in, messages)
        named = [url.removeprefix(SCHEME) for url in urls if url.startswith(SCHEME)]
        missing = [digest for digest in named if catalogue.find(digest) is None]
        # A known image may have to be encoded again, once its embeddings are dropped.
        gone = [d for d in named if d not in self._eyes.served and catalogue.file(d) is None]
        wanted = list(dict.fromkeys([*missing, *gone]))
        files = dict(await self._eyes.source(wanted)) if wanted and self._eyes.source else {}
        files |= await asyncio.to_thread(_files_in, urls)
        if lost := [digest for digest in wanted if digest not in files]:
            raise RequestError(
                f"image {lost[0][:12]} is not in the store of this run; send it as a data URL",
                param="messages",
            )
        try:
            for digest, body in files.items():
                await asyncio.to_thread(catalogue.add, body, digest)
        except ImageError as error:
            raise RequestError(str(error), param="messages") from None

    def message(self, message: dict[str, Json], index: int) -> dict[str, Json]:
        found = template_message(message, index, self._content)
        return {key: x if key == "content" else self._hidden(x) for key, x in found.items()}

    def tokens(self, text: str, messages: bytes) -> ReadPrompt:
        images = [self._seen(url) for url in image_urls(msgspec.json.decode(messages))]
        pieces = text.split(self._placeholder)
        if len(pieces) != len(images) + 1:
            raise RequestError(
                f"the model's chat template renders {len(pieces) - 1} of the request's "
                f"{len(images)} images, so the model would not see them all; send images in the "
                "messages of users, or replace its chat_template.jinja",
                param="messages",
            )
        # In one piece, because what is beside a placeholder decides how a tokenizer splits it.
        tokens, own = self._marked(text)
        ids, read = list[int](), list[int]()
        left, placeholders = iter(images), iter(own)
        for token in tokens:
            if token == self._id and next(placeholders):
                seen = next(left)
                ids += [token] * seen.size
                read += ids_of(seen).tolist()
            else:
                ids.append(token)
                read.append(token)
        prompt = ReadPrompt(ids)
        prompt.read = np.array(read, np.int32)
        if images and len(images[0].places) > 1:
            distinct = sorted(set(images), key=lambda seen: seen.first)
            prompt.rotary = positions(np.array(read, np.int64), distinct)
        return prompt

    def _marked(self, text: str) -> tuple[list[int], list[bool]]:
        """Token ids of a rendered text, and of each placeholder whether it is the template's."""
        found = re.findall(f"{MARK}|{re.escape(self._placeholder)}", text)
        own = [each != MARK for each in found]
        ids = list(self._codec.encode(text.replace(MARK, self._placeholder)))
        if ids.count(self._id) != len(own):
            raise RequestError(
                f"the tokenizer does not keep {self._placeholder!r} as one token; put the files of"
                " the model's own tokenizer there"
            )
        return ids, own

    def _content(self, content: Json, where: str) -> Json:
        """Content for the template: text, or parts of which each is text or an image."""
        if not isinstance(content, list):
            text: Json = self._hidden(text_content(content, where))
            return [{"type": "text", "text": text}] if self._parts else text
        parts: list[dict[str, Json]] = []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "image_url":
                parts.append({"type": "image"})
                continue
            if kind in OTHERS:
                raise RequestError(
                    f"{where}.content has a part of type {kind!r}: this model reads text and images"
                    " only; leave it out",
                    param="messages",
                )
            parts.append({"type": "text", "text": self._hidden(text_content([part], where))})
        if self._parts or any(part["type"] == "image" for part in parts):
            return parts
        return "".join(str(part["text"]) for part in parts)

    def _hidden(self, value: Json) -> Json:
        """A value whose texts have a mark in place of each placeholder."""
        if isinstance(value, str):
            return value.replace(MARK, "").replace(self._placeholder, MARK)
        if isinstance(value, list):
            return [self._hidden(item) for item in value]
        if not isinstance(value, dict):
            return value
        found = {key: self._hidden(item) for key, item in value.items()}
        if isinstance(value, WrittenArguments):
            return WrittenArguments(found, str(self._hidden(value.written)))
        return found

    def _seen(self, url: str) -> Seen:
        digest = url.removeprefix(SCHEME)
        if body := data_of(url):
            digest = sha256(body).hexdigest()
        seen = self._eyes.catalogue.find(digest)
        if seen is None:
            raise RequestError(f"image {digest[:12]} was not fetched", param="messages", status=500)
        return seen

    def _wants_parts(self) -> bool:
        """Whether the template reads text only as a list of parts, as LLaVA's does."""
        try:
            text = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": "agentrl"}], tokenize=False
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError):
            return True
        return "agentrl" not in text


def image_urls(messages: Any) -> list[str]:
    """The URLs of a request's images, in order. Raises RequestError for one of another kind."""
    found: list[str] = []
    for index, message in enumerate(messages if isinstance(messages, list) else []):
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else []:
            if (url := url_of(part)) is None:
                continue
            if not url.startswith((SCHEME, DATA)):
                raise RequestError(
                    f"messages[{index}] has an image by its address, which is not fetched; "
                    "send it as a data URL",
                    param="messages",
                )
            found.append(url)
    return found


def _urls_in(messages: bytes) -> list[str]:
    return image_urls(msgspec.json.decode(messages))


def _files_in(urls: list[str]) -> dict[str, bytes]:
    """The files of data URLs by digest."""
    return {sha256(body).hexdigest(): body for body in map(data_of, urls) if body}


def image_files(messages: Any) -> list[bytes]:
    """The files of the images that messages have as data URLs."""
    return [body for body in map(data_of, image_urls(messages)) if body]


def data_of(url: str) -> bytes:
    """The file in a data URL; empty for other URLs."""
    if not url.startswith(DATA):
        return b""
    head, _, data = url.partition(",")
    try:
        if not head.endswith(";base64") or not data:
            raise ValueError
        return base64.b64decode(data, validate=True)
    except (ValueError, binascii.Error):
        raise RequestError(
            "an image's data URL is not base64; send it as data:image/png;base64,...",
            param="messages",
        ) from None
