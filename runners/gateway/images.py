"""Images in a gateway's calls: removed from messages, stored once, named by their digests.

The agent sends images as data URLs. Calls are stored, compared and replayed with `image:DIGEST` in
their place, so two conversations are equal only if their images are. Invariant: an image is stored
before the call that names it. A policy server gets the agent's original messages, except the
embedded one, which reads images from the store. Owns: the digests of images that this process has
stored recently. Writer: the gateway's event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from agentrl.core.config import RunConfig
from agentrl.core.config.derived import seeing_policies
from agentrl.core.config.infrastructure import EmbeddedEngineConfig
from agentrl.core.errors import NotFound, StoreError
from agentrl.core.images import KIND, SCHEME, ImageRefusedError, read_image, with_data_urls
from agentrl.core.types import Image, Json, Transition
from agentrl.runners.gateway.attribution import ActiveAttempt, ReceivedCall
from agentrl.runners.gateway.features import Feature
from agentrl.runners.gateway.refusals import UpstreamError
from agentrl.runners.gateway.request import (
    Fields,
    ImagePolicy,
    is_empty,
    kind_of,
    media_field,
    not_text,
    other_model,
    parts_of,
)
from agentrl.runners.gateway.upstream import Messages, Route
from agentrl.store.base import Store

ADVICE = "; a policy sees images with policy.vision, which takes an image-text model"
PIXELS = ("media_io_kwargs", "mm_processor_kwargs")  # fields that change the pixels for the policy
MAX_IMAGES = 100  # images of one call; each is in memory until it is stored
PUT_AGAIN = 1200.0  # seconds after which a prune may have removed an unreferenced image
MAX_REMEMBERED = 100_000  # digests
MAX_PUT_BYTES = 2**24  # bytes sent to the store at a time


class Put(NamedTuple):
    """An image that is in the store, or on its way there."""

    at: float  # time.monotonic()
    task: asyncio.Task[None] | None  # None when it is done


class StoredImages(Feature):
    """The feature that allows images in attempts, even if only upstreams read them."""

    def __init__(self, store: Store, config: RunConfig) -> None:
        digests, seeing = isinstance(config.engine, EmbeddedEngineConfig), seeing_policies(config)
        self._image_policy = StoredImagePolicy(store, seeing, digests=digests)
        self._needed = bool(seeing or config.upstreams)  # otherwise every image is rejected

    def join(self, active: ActiveAttempt) -> None:
        if not self._needed:
            active.image_policy = ImagePolicy(ADVICE)
            return
        active.changes.append(self._image_policy.read)
        active.image_policy = self._image_policy


class StoredImagePolicy(ImagePolicy):
    """Accepts images, and stores them. digests: the policy server reads images from the store."""

    def __init__(self, store: Store, seeing: Collection[str], *, digests: bool) -> None:
        super().__init__(ADVICE)
        self._store, self._seeing, self._digests = store, seeing, digests
        self._put = OrderedDict[str, Put]()  # digest -> time

    def read(self, call: ReceivedCall) -> ReceivedCall:
        """Return the call with digests in place of images. An unreadable image is unchanged, which
        is an error only for trained calls (`rejection_reason`)."""
        request = call.request
        count = sum(1 for _ in _images(request.messages))
        if not count:
            return call
        if count > MAX_IMAGES:
            unseen = f"{count} images, more than {MAX_IMAGES}"
            return replace(call, request=replace(request, unseen=unseen))
        images, unseen = list[Image](), ""
        messages = list(request.messages)
        for number, index, part in _images(request.messages):
            try:
                image = read_image(part)
            except ImageRefusedError as error:
                where = f"messages[{number}].content[{index}]"
                unseen = unseen or f"an image in {where} that it cannot see: {error}"
                continue
            images.append(image)
            messages[number] = _with_part(messages[number], index, _named(part, image.digest))
        digests, files = tuple(image.digest for image in images), {i.digest: i for i in images}
        new: dict[str, Any] = {"messages": messages, "images": digests, "files": files}
        return replace(call, request=replace(request, **new, unseen=unseen))

    def rejection_reason(self, call: ReceivedCall, policy: str) -> str:
        request = call.request
        if policy.partition("@")[0] not in self._seeing:  # a snapshot is named policy@steps
            return super().rejection_reason(call, policy)
        content = media_field(request.fields) or not_text(request.messages, frozenset({KIND}))
        if content:
            return (
                f"the policy {policy!r} is trained on text and images, and this call has {content},"
                f" which training would not see: leave it out, or {other_model(call.role)}"
            )
        pixel_options = (name for name in PIXELS if not is_empty(request.fields.get(name)))
        if request.images and (name := next(pixel_options, "")):
            return (
                f"this call has {name}, and training shows the policy {policy!r} the images as its"
                " model's own processor makes them: leave it out"
            )
        if request.unseen:
            return f"the policy {policy!r} is trained, and this call has {request.unseen}"
        return ""

    async def sent(self, call: ReceivedCall, messages: Messages, route: Route) -> Fields:
        request = call.request
        if route.frozen or not request.images:
            return await super().sent(call, messages, route)
        if not call.active.scoring:  # calls of verifiers are not recorded
            tasks = self._begin(call)  # while the model answers, unless it has to read them
            if self._digests:
                try:
                    await _all(tasks)
                except StoreError as error:
                    raise UpstreamError(f"an image was not stored: {error}", final=True) from error
                return request.fields | {"messages": messages}
        if messages is request.messages:
            return request.fields
        return request.fields | {"messages": with_data_urls(messages, request.files)}

    async def add(
        self, store: Store, call: ReceivedCall, rows: Sequence[Transition]
    ) -> Sequence[bool]:
        await _all(self._begin(call))
        try:
            return await super().add(store, call, rows)
        except NotFound:
            if not call.request.files:
                raise
            for digest in call.request.files:  # they may have been pruned
                self._put.pop(digest, None)
            await _all(self._begin(call))
            return await super().add(store, call, rows)

    def _begin(self, call: ReceivedCall) -> list[asyncio.Task[None]]:
        """Begin to store the images of a call that were not stored recently; return the futures to
        await. Several calls may wait for the same image."""
        now, files = time.monotonic(), call.request.files
        old = Put(-math.inf, None)
        new = [files[d] for d in files if now - self._put.get(d, old).at >= PUT_AGAIN]
        run = call.active.attempt.rollout.run
        for batch in _batches(new):
            task = asyncio.create_task(self._store.put_images(run, batch))
            self._put |= dict.fromkeys((image.digest for image in batch), Put(now, task))
            task.add_done_callback(partial(self._ended, [image.digest for image in batch]))
        while len(self._put) > MAX_REMEMBERED:
            self._put.popitem(last=False)
        pending = (self._put[digest].task for digest in files if digest in self._put)
        return list({task for task in pending if task is not None})

    def _ended(self, digests: Sequence[str], task: asyncio.Task[None]) -> None:
        failed = task.cancelled() or task.exception() is not None
        for digest in digests:
            put = self._put.get(digest)
            if put is not None and put.task is task:
                self._put[digest] = put._replace(task=None)
                if failed:
                    del self._put[digest]


async def _all(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Wait for tasks, which others may wait for too. Raises their errors."""
    for task in tasks:
        await asyncio.shield(task)


def _images(messages: Iterable[Mapping[str, Json]]) -> Iterator[tuple[int, int, dict[str, Json]]]:
    """Yield the parts that are images, with the numbers of message and part."""
    for number, message in enumerate(messages):
        for index, part in enumerate(parts_of(message)):
            if not isinstance(part, str) and kind_of(part) == KIND:
                yield number, index, part


def _with_part(message: Mapping[str, Json], index: int, part: Json) -> dict[str, Json]:
    parts = [*parts_of(message)]
    parts[index] = part
    return {**message, "content": parts}


def _named(part: Mapping[str, Json], digest: str) -> dict[str, Json]:
    """Return a part with a digest for its image."""
    content = part[KIND]
    about = content if isinstance(content, dict) else {}
    return {**part, "type": KIND, KIND: {**about, "url": SCHEME + digest}}


def _batches(images: Sequence[Image]) -> Iterator[list[Image]]:
    """Split images so that each request to a store has a bounded size."""
    batch, size = list[Image](), 0
    for image in images:
        if batch and size + len(image.body) > MAX_PUT_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(image)
        size += len(image.body)
    if batch:
        yield batch
