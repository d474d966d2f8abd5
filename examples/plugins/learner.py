"""A custom learner, for `learner.kind = "learner.py:half"`: torch's with half the learning rate."""

from agentrl.algorithms.learners.torch import TorchLearner


class HalfLearner(TorchLearner):
    def step(self, batch, psi, *, lr, **terms):
        return super().step(batch, psi, lr=lr / 2, **terms)


def half(config, algo, model, tokenizer, adapters, name):
    return HalfLearner(model, tokenizer, adapters=adapters, policy=name)
