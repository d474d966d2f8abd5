"""Loading of policies (a Hugging Face decoder and its tokenizer) and of weights of checkpoints.

A policy's checkpoint is a Hugging Face directory. Other trained models of a run (a critic, a
reference that follows the policy, a reward model) are one safetensors file each. Weights are
checked to fit before anything changes.

`Adapters` is the protocol of a model's adapters that several policies share. Invariant: the base
is never written; a forward pass outside `using` and `routed` is that of the base; only one thread
at a time is inside either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Embedding, Module, Parameter
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from agentrl.algorithms.model import products
from agentrl.algorithms.model.chat import Tokenizer
from agentrl.algorithms.model.templates import choose
from agentrl.core.config import RunConfig
from agentrl.core.errors import ConfigError, DamagedError, PolicyError
from agentrl.core.types import one_line

CONFIG = "adapter_config.json"  # in the directory of an adapter

Selection = Sequence[tuple[str, Tensor | None]]
"""Adapters of one forward pass, each with its tokens: int64 indices into the second-last axis of
activations; None: all tokens."""


class Adapters(Protocol):
    """The adapters of one model, by name."""

    model: PreTrainedModel

    @property
    def names(self) -> list[str]: ...

    def add(
        self, name: str, *, rank: int, alpha: float, targets: Sequence[str] = (), seed: int = 0
    ) -> None:
        """Add an adapter scale * B A with scale = alpha / rank and B = 0, which has no effect yet.

        targets: names of linear layers, such as "q_proj", or of experts, such as "gate_up_proj" or
        "experts"; empty: all of the text decoder but routers. The same seed and name give the same
        A. Raises PolicyError for a target the model does not have."""

    def open(self, name: str, directory: Path) -> None:
        """Add an adapter that `save` or peft wrote. Raises PolicyError if it does not fit."""

    def fits(self, directory: Path) -> bool:
        """Whether the files of an adapter name this base."""

    def copy(self) -> Adapters:
        """A copy of adapters and modules on the same base weights, so that another thread can be
        inside `using` or `routed` of it."""

    def duplicate(self, name: str, source: Adapters, original: str) -> None:
        """Add a copy of the adapter `original` of `source`."""

    def keep_reference(self, name: str) -> None:
        """Keep a copy of the adapter as it is now: the reference of its policy."""

    def reference(self, name: str) -> str | None:
        """The adapter that was kept as the reference of adapter `name`; None: the base alone."""

    def close(self, name: str) -> None:
        """Remove an adapter. Raises PolicyError for the first one."""

    def parameters(self, name: str) -> dict[str, Parameter]:
        """The parameters of one adapter, by names without the adapter's name."""

    def coverage(self, name: str) -> str:
        """A sentence: the layers with the adapter, their share of the weights, and the layers
        without it."""

    def rank(self, name: str) -> int: ...

    def using(self, name: str | None, *, wide: bool = False) -> AbstractContextManager[None]:
        """Context in which forward passes apply one adapter to all tokens; None: the base alone.

        wide: see `routed`. Run the backward pass inside as well: it may recompute layers."""

    def routed(self, selection: Selection, *, wide: bool = True) -> AbstractContextManager[None]:
        """Context in which forward passes apply these adapters, each to its tokens.

        wide: on a CPU, multiply in the adapter's float32 and not in the dtype of the base: faster
        for few tokens, and the bits of a token do not depend on how many there are."""

    def save(self, name: str, directory: Path) -> None:
        """Write one adapter in peft's format, with the base's fingerprint in the metadata."""

    def read(self, name: str, directory: Path) -> dict[str, Tensor]:
        """The weights that `save` wrote, by the names of `parameters`. Raises PolicyError for
        another base, rank, scale or target, and DamagedError for incomplete files."""

    def restore(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Copy the weights that `read` returned into the adapter."""

    def merge(self, name: str, directory: Path) -> None:
        """Write base + adapter as an ordinary Hugging Face directory, without changing memory."""

    def merged(self, name: str) -> dict[str, Tensor]:
        """Weights of base + adapter, by the base's names, without changing memory."""

    def save_base(self, directory: Path) -> None:
        """Write the base alone as an ordinary Hugging Face directory."""


Model = torch.nn.Module

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
MAX_PADDING_ROWS = 1024  # rows of an embedding without a token, which pad its size
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(
    path_or_name: str | Path,
    dtype: str = "float32",
    device: str = "auto",
    *,
    template: bool = True,
    head: bool = True,
    quantized: Mapping[str, Any] | None = None,
    config: RunConfig | None = None,
) -> tuple[Model, Tokenizer]:
    """Load a checkpoint directory or hub name as (model in eval mode, tokenizer).

    device: see `device_of`. template, head: require a chat template, and weights
    of the language-model head. quantized: arguments of `from_pretrained` with which it quantises
    the weights, on their device. config: a policy's view of the run, with settings for the
    tokenizer. Raises PolicyError if the directory, a weight or a required part is missing or
    unreadable.
    """
    name = str(path_or_name)
    check_directory(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        if config is not None:
            choose(tokenizer, config)
        options = {"dtype": DTYPES[dtype], "output_loading_info": True, **(quantized or {})}
        model, loading = _load(name, config, options)
    except (PolicyError, ConfigError):
        raise
    except Exception as error:  # transformers and safetensors document no exception types
        raise PolicyError(f"model {name!r}: cannot be loaded: {one_line(str(error))}") from error
    _check_weights(name, model, loading["missing_keys"], head)
    if template and not getattr(tokenizer, "chat_template", None):
        raise PolicyError(
            f"model {name!r}: its tokenizer has no chat template; add chat_template.jinja to the "
            "directory or train an instruction-tuned model"
        )
    try:
        # Quantised weights cannot be moved to another device.
        model = model if quantized else model.to(device_of(device))
    except (RuntimeError, AssertionError) as error:  # unknown name, or no such device here
        reason = str(error).splitlines()[0]
        raise PolicyError(f"policy.device = {device!r}: cannot be used: {reason}") from None
    products.install(model)
    # Eval mode turns off dropout, which would make sampler and learner disagree.
    return model.eval(), tokenizer


def _load(name: str, config: RunConfig | None, options: dict[str, Any]) -> tuple[Any, Any]:
    """The model, with its vision tower if the run uses it, and transformers' loading info."""
    from agentrl.algorithms.vision.loading import load as load_with_tower

    shape = AutoConfig.from_pretrained(name)
    if (with_tower := load_with_tower(name, shape, config, options)) is not None:
        return with_tower
    model, loading = AutoModelForCausalLM.from_pretrained(name, **options)
    if type(model.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise PolicyError(
            f"model {name!r}: {type(model).__name__} is only a part of the model, and "
            "transformers could not "
            f"load what would be saved, of type {model.config.model_type!r}; choose a model whose "
            "decoder is a model of its own"
        )
    return model, loading


def device_of(setting: str) -> str:
    """The device of `policy.device`, where "auto" is the GPU if there is one."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if setting == "auto" else setting


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Hide transformers' progress bars, which would disturb the live view."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def checkpoint_weights(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a state dict of the model to the names and shapes that `save_pretrained` writes. Tied
    weights are included once."""
    distinct = {name: weights[name] for name in weights if name not in model.all_tied_weights_keys}
    written: Mapping[str, Tensor] = revert_weight_conversion(model, distinct)
    return {name: tensor.detach() for name, tensor in written.items()}


def save_weights(module: Module, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    # Only parameters, each once: buffers follow from the configuration, and tied weights are one
    # parameter with two names.
    save_file({name: p.detach().contiguous() for name, p in module.named_parameters()}, file)


def read_weights(module: Module, file: Path) -> dict[str, Tensor]:
    """Read a file of `save_weights`, for `copy_weights`. Raises DamagedError if it is missing or
    incomplete, PolicyError if it is of another model."""
    try:
        saved: dict[str, Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise DamagedError(
            f"checkpoint {file.parent}: {file.name} is missing or incomplete ({error}); "
            "resume from another checkpoint"
        ) from None
    if mismatch := shape_mismatch(saved, dict(module.named_parameters())):
        raise PolicyError(
            f"checkpoint {file.parent}: {file.name} is of another model ({mismatch} here); "
            "resume with the model it was made with"
        )
    return saved


def read_policy(policy: Module, directory: Path) -> dict[str, Tensor]:
    """Read weights and buffers of a checkpoint of this policy, by name. Raises PolicyError for an
    incomplete one and one of another model."""
    with no_progress_bars():
        model, _ = load_model(directory, device="cpu")
    saved: dict[str, Tensor] = model.state_dict()
    _restore_padding(model, directory, saved)
    if mismatch := shape_mismatch(saved, policy.state_dict()):
        raise PolicyError(
            f"checkpoint {directory}: it is of another model ({mismatch} in the policy); "
            "resume with the model it was made from"
        )
    return saved


def _restore_padding(model: Module, directory: Path, saved: Mapping[str, Tensor]) -> None:
    """Set rows of padding tokens to those of the files: transformers fills them with zeros when it
    loads some classes, and a tied head has trained them."""
    for path, module in model.named_modules():
        if not isinstance(module, Embedding) or module.padding_idx is None:
            continue
        key, row = f"{path}.weight", module.padding_idx
        for file in directory.glob("model*.safetensors"):
            with safe_open(file, framework="pt") as opened:
                if key in opened.keys():  # noqa: SIM118
                    saved[key][row] = opened.get_slice(key)[row : row + 1][0]


def shape_mismatch(saved: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """Describe the first name whose shapes differ: "NAME is [2, 3] there and [3]"."""
    for name in sorted(saved.keys() | expected.keys()):
        saved_shape, shape = (
            list(of[name].shape) if name in of else None for of in (saved, expected)
        )
        if saved_shape != shape:
            return f"{name} is {saved_shape} there and {shape}"
    return None


def copy_weights(module: Module, saved: Mapping[str, Tensor]) -> None:
    """Copy saved weights into a module, by name."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(saved[name])


def vocabulary_size(model: Model) -> int:
    """The number of token ids that a model has an embedding for."""
    network: Any = model
    return int(network.get_input_embeddings().weight.shape[0])


def vocabulary_gap(model: Model, tokenizer: Tokenizer) -> str:
    """A sentence if the vocabularies of model and tokenizer do not belong together; else ""."""
    rows, tokens = vocabulary_size(model), len(tokenizer)
    if 0 <= rows - tokens <= MAX_PADDING_ROWS:
        return ""
    return (
        f"its tokenizer has {tokens} tokens, and the model embeddings for {rows}; put the tokenizer"
        " files of this very model there"
    )


def end_tokens(model: Model, tokenizer: Tokenizer) -> list[int]:
    """Token ids that end a completion: the model's, which may be several, and the tokenizer's."""
    generation: Any = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    tokens = {ids} if isinstance(ids, int) else set(ids or ())
    if tokenizer.eos_token_id is not None:
        tokens.add(tokenizer.eos_token_id)
    if not tokens:
        raise PolicyError("the model has no end-of-sequence token; set eos_token in its tokenizer")
    return sorted(tokens)


def check_directory(name: str) -> None:
    """Raise PolicyError for a missing path, which transformers would look up as a hub name."""
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise PolicyError(
                f"model {name!r}: the directory has no config.json; give a Hugging Face checkpoint"
            )
    elif not _HUB_NAME.fullmatch(name):
        raise PolicyError(
            f"model {name!r}: no such directory; give a checkpoint directory or a hub name"
        )


def _check_weights(name: str, model: Model, missing: set[str], head: bool) -> None:
    """Raise PolicyError for missing weights, which transformers would initialise at random."""
    network: Any = model
    optional = set() if head else set(network.get_output_embeddings().parameters())
    lost = sorted(key for key in missing if network.get_parameter_or_buffer(key) not in optional)
    if lost:
        raise PolicyError(
            f"model {name!r}: {len(lost)} of its weights are missing, such as {lost[0]}; give a "
            "complete checkpoint of a decoder with a language-model head"
        )
