"""Tiny starter policies of 0.1 M parameters, for experiments on a laptop without a download.

`policy.build` of a run file names a function (directory, seed) that calls `imitator`, which writes
a Hugging Face checkpoint that imitates the given conversations. It needs the extra `train`.
"""

from typing import TYPE_CHECKING

from agentrl.core import lazy_attributes

if TYPE_CHECKING:
    from agentrl.tiny.models import Conversation as Conversation
    from agentrl.tiny.models import imitator as imitator
    from agentrl.tiny.models import make_model as make_model
    from agentrl.tiny.models import word_tokenizer as word_tokenizer

# Imported at their first use, because torch takes seconds to import.
__getattr__ = lazy_attributes(
    __name__, {"models": "Conversation imitator make_model word_tokenizer"}
)
