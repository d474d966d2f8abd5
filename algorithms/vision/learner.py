"""The learner of an image-text policy: `TorchLearner`, with each image encoded once.

Packs read the embeddings of images as leaves. With a trained tower their gradients, summed over all
packs of a step, are propagated into the tower in one backward pass, or one for each part of the
images if they have more patches than `learner.token_budget`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.learners.base import StepReport
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.scaled import inputs_of
from agentrl.algorithms.vision.images import CatalogueImage
from agentrl.algorithms.vision.inputs import ImageInputs, chunks
from agentrl.core.errors import PolicyError


class ImageTextLearner(TorchLearner):
    """A `TorchLearner` of a model with `ImageInputs`."""

    encoder: ImageInputs

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        encoder = inputs_of(self.model)
        assert isinstance(encoder, ImageInputs)
        if self.critic is not None:
            raise PolicyError("critic.model: a critic cannot read images; leave it out")
        self.encoder = encoder

    def step(self, batch: Batch, *arguments: Any, **options: Any) -> StepReport:
        before = self.encoder.learned.encoded
        report = super().step(batch, *arguments, **options)
        report.metrics["images/encoded"] = float(self.encoder.learned.encoded - before)
        if report.applied:
            self._changed()
        return report

    def shrink(self, share: float) -> None:
        super().shrink(share)
        self._changed()

    def load(self, directory: Path) -> None:
        super().load(directory)
        # Even for a frozen tower, because an earlier run may have trained it.
        self.encoder.learned.forget()

    def _changed(self) -> None:
        if self.encoder.trained:
            self.encoder.learned.forget()

    def _backward(self, batch: Batch, *arguments: Any) -> StepReport:
        self.encoder.budget = self.token_budget
        if not self.encoder.trained:
            return super()._backward(batch, *arguments)
        parts = list(chunks(self._images(batch), self.token_budget))
        graphs: list[list[Tensor]] = []
        try:
            if len(parts) == 1:  # with a single part the graph is kept, and it is encoded only once
                with self._recomputing():
                    graphs.append(self.encoder.encode(parts[0]))
                self.encoder.learned.encoded += len(parts[0])
            for number, part in enumerate(parts):
                embeddings = (
                    graphs[number] if graphs else self.encoder.learned.of(self.encoder, part)
                )
                self.encoder.leaves |= {
                    image.digest: x.detach().requires_grad_()
                    for image, x in zip(part, embeddings, strict=True)
                }
            report = super()._backward(batch, *arguments)
            for number, part in enumerate(parts):
                self._backward_tower(part, graphs[number] if graphs else None)
            return report
        finally:
            self.encoder.leaves = {}

    def _backward_tower(self, images: list[CatalogueImage], graph: list[Tensor] | None) -> None:
        """Propagate the gradients of the leaves of `images` into the tower."""
        gradients = [self.encoder.leaves[image.digest].grad for image in images]
        if any(gradient is None for gradient in gradients):  # a log-prob was not finite
            return
        if graph is None:
            with self._recomputing():
                graph = self.encoder.encode(images)
        torch.autograd.backward(graph, gradients)

    def _images(self, batch: Batch) -> list[CatalogueImage]:
        """The distinct images of a batch that its packs read."""
        rows = [row.tokens[: int(row.actions[-1])] for row in batch.rows]
        ids = torch.cat([tokens[tokens < 0] for tokens in rows]) if rows else torch.empty(0)
        return self.encoder.catalogue.of(-1 - ids.long().numpy())
