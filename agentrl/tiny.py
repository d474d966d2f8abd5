"""Tiny starter policies of 0.1 M parameters, for experiments on a laptop without a download.

`policy.build` of a run file names a function (directory, seed) that calls `imitator`, which writes
a Hugging Face checkpoint that imitates the given conversations. It needs the extra `train`.
"""

from agentrl.algorithms.model.tiny import Conversation, imitator, make_model, word_tokenizer

__all__ = ["Conversation", "imitator", "make_model", "word_tokenizer"]
