"""Small random copies of models, with the same class and kinds of layers, and small sizes; and the
protocol for inputs besides text, such as images. The computation of a model depends on its class
and on the numbers in its configuration: windows, chunks, the keys that an index keeps, the context
before positions were extended. A copy has all of these, scaled down so that a row of a few dozen
tokens exceeds them; its forward pass takes milliseconds, whatever the size of the model.
`forward.prove` compares ways to compute a model on its copy.

In a batch and in the rows of the embedded engine, token ids below 0 stand for inputs that are not
text. Only the `Inputs` that created them know their meaning; other code only compares and counts
ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module
from transformers import PretrainedConfig, PreTrainedModel

from agentrl.core.types import Json

if TYPE_CHECKING:
    from agentrl.algorithms.model.chat import Chat, Codec
    from agentrl.algorithms.model.packing import Pack
    from agentrl.core.types import Transition
    from agentrl.store.base import Store


ATTRIBUTE = "agentrl_inputs"


class ReadPrompt(tuple[int, ...]):
    """The token ids of a prompt, and the ids that the engine reads instead."""

    read: NDArray[np.int32]  # ids that the engine reads, of the same length
    rotary: NDArray[np.int64] | None = None  # [axes, P]; None: each token's place


class Inputs(Protocol):
    """Resolves ids below 0. One per model; the learner and the engine may call it concurrently."""

    def of_pack(self, pack: Pack) -> tuple[Module, dict[str, Any]]:
        """The decoder, and its inputs: embeddings [1, T, H] and positions of a pack,
        differentiable."""
        ...

    def generate(self, *, input_ids: Tensor, logits_to_keep: int, **options: Any) -> Any:
        """The model's output for a step of the engine; called in place of the model."""
        ...

    def changed(self) -> None:
        """Called when the engine's weights have changed."""
        ...

    def save(self, directory: Path) -> None:
        """Write files that a checkpoint needs besides those of model and tokenizer."""
        ...

    def chat(self, tokenizer: Any, codec: Codec) -> Chat:
        """Renders requests to `ReadPrompt`s."""
        ...

    async def fetch(self, store: Store, run: str, calls: Iterable[Transition]) -> None:
        """Read the images that calls name from the store, and keep them until the next call."""
        ...

    def check(self, model: Module) -> str:
        """The reason why another model does not support the same ids; empty if it does."""
        ...

    def probe(self) -> list[dict[str, Json]]:
        """Messages with images, to compare a policy server's log-probs with the learner's; empty:
        only text is trained."""
        ...

    def prompt(self, tokenizer: Any) -> list[int]:
        """The learner's ids for `probe`, rendered by the chat template. Raises PolicyError if that
        fails."""
        ...

    def read(self, prompt: Sequence[int], messages: Sequence[dict[str, Json]]) -> list[int]:
        """The learner's ids for a prompt that a server has rendered from messages. Raises
        PolicyError if the prompt does not match the messages."""
        ...


def attach(model: Module, inputs: Inputs) -> None:
    """Make `inputs` resolve the ids below 0 of a model and its copies."""
    setattr(model, ATTRIBUTE, inputs)


def inputs_of(model: Module) -> Inputs | None:
    inputs: Inputs | None = getattr(model, ATTRIBUTE, None)
    return inputs


def rotary_positions(
    prompts: Sequence[NDArray[np.int64] | None], rows: NDArray[np.int64], places: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Rotary positions of tokens at `places` of `rows`, int64 [N] each: their places, or [axes, N]
    if a row has others. prompts: `ReadPrompt.rotary` of each row; text after it continues from its
    largest position."""
    axes = max((len(prompt) for prompt in prompts if prompt is not None), default=0)
    if not axes:
        return places
    positions = np.tile(places, (axes, 1))
    for row, prompt in enumerate(prompts):
        if prompt is not None:
            of_row = np.flatnonzero(rows == row)
            at, size = places[of_row], prompt.shape[1]
            after = prompt.max() + 1 + at - size
            positions[:, of_row] = np.where(at < size, prompt[:, np.minimum(at, size - 1)], after)
    return positions


T = TypeVar("T")

HIDDEN, HEADS, HEAD = 64, 4, 16
VOCABULARY = 64
SPREAD = 2.0  # standard deviation of the logits
LAYERS = 8  # layers of a copy; more if needed to include each kind of layer
WINDOW, ORIGINAL, CONTEXT = 8, 16, 256
THRESHOLD = 32  # a larger number that is not the size of a weight is assumed to be a window

# Sizes of weights by their names in configurations, and their maximum in a copy. Products must
# match: heads times their size is the hidden size, and twice the hidden size for a state-space
# layer.
SIZES: dict[str, int] = {
    r"hidden_size|n_embd|d_model|emb_dim|embedding_dim|embedding_size|word_embed_proj_dim": HIDDEN,
    r"input_embedding_size|output_embedding_size|lru_width|n_embed|backbone_hidden_size": HIDDEN,
    r"out_hidden_size|projection_dim": HIDDEN,
    r"attention_hidden_size|mamba_d_ssm|mamba_intermediate_size|text_hidden_size": 2 * HIDDEN,
    r"(\w+_)?(intermediate_size|intermediate_size_mlp|ffn_dim|dim_ff|dff|d_inner)|n_inner": HIDDEN,
    r"ffn_hidden_size|\w+_ffn_hidden_size|feed_forward_size|block_multiple_of": HIDDEN,
    r"mamba_n_heads|n_mamba_heads|mamba_num_heads|mamba_heads": 2 * HEADS,
    r"(\w+_)?(attention_heads|num_heads|n_heads?)|n_heads?|index_n_heads": HEADS,
    r"head_dim|dim_head|d_head|attention_head_size|kv_channels|v_head_dim|qk_\w+_head_dim": HEAD,
    r"swa_head_dim|swa_v_head_dim|head_size": HEAD,
    r"global_head_dim|qk_head_dim|index_head_dim|attention_head_dim": 2 * HEAD,
    r"mamba_d_head|mamba_head_?dim|mamba_headdim|linear_\w+_head_dim": HEAD,
    r"linear_num_key_heads": HEADS // 2,
    r"linear_num_value_heads": HEADS,
    r"\w*lora_rank|laurel_rank|adapter_rank|hidden_size_per_layer_input|\w*state_size": HEAD,
    r"mamba_d_state|mamba_dt_rank|time_step_rank|rotary_dim": HEAD // 2,
    r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|zero_expert_num": 16,
    r"num_centroids": 16,
    r"(num_experts_per_tok|moe_topk|moe_k|top_k|num_experts_per_token|topk_group)": 2,
    r"n_group|n_groups|mamba_n_groups|mamba_ngroups|o_groups": 2,
    r"query_pre_attn_scalar|expand_ratio": HEAD,
    r"image_size": 28,
    r"patch_size|conv_kernel\w*|spatial_merge_size|temporal_patch_size": THRESHOLD,
    r"num_position_embeddings": 64,
}  # fmt: skip
POSITIONS = (
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_\w+_positions|context_length"
)
VOCABULARIES = r"(\w+_)?vocab_size|vocab_size_per_layer_input"
LAYER_COUNTS = (
    r"num_hidden_layers|num_layers|n_layers?|(en|de)coder_layers|num_(en|de)coder_layers|depth"
    r"|num_blocks|num_layers_per_stack"
)
KEY_HEADS = (
    r"num_key_value_heads|num_kv_heads|n_head_kv|num_query_groups|num_global_key_value_heads"
)
INTERVALS = r"\w*(interval|period|pattern|every_n\w*|_step)"
FIRST_LAYERS = r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|\w*offset"
TOKENS = r"\w*_token(_id|_index|_idx|)s?|\w+_index|image_token_id"
UNSET = ("_name_or_path", "output_attentions")  # not accepted by every class of configurations


class ScalingError(Exception):
    """A model has no small copy; the message is the reason."""


class DecoderWithHead(torch.nn.Module):
    """Adds a random head to a decoder without a language-model head, so that the learner and the
    engine can call it."""

    def __init__(self, decoder: PreTrainedModel) -> None:
        super().__init__()
        self.decoder = decoder
        width = decoder.get_input_embeddings().embedding_dim
        self.head = torch.nn.Linear(width, VOCABULARY, bias=False)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("decoder"), name)

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self.head

    def forward(self, input_ids: torch.Tensor, logits_to_keep: int = 0, **options: Any) -> Any:
        output = self.decoder.base_model(input_ids=input_ids, **options)
        output.logits = self.head(output.last_hidden_state[:, -logits_to_keep:])
        return output


def scaled_copy(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """A random copy on the CPU, in float32 and eval mode: of the text decoder alone if the model
    reads images through `inputs`. Raises ScalingError."""
    network = _network(model)

    def make() -> PreTrainedModel:
        copy = type(network)._from_config(scaled_config(network.config), dtype=torch.float32)
        copy = copy if copy.get_output_embeddings() else DecoderWithHead(copy)
        randomise(copy)
        soften(copy)
        return cast("PreTrainedModel", copy.eval())

    # The state of the process's random numbers is the run's.
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return attempt(make)


def attempt(make: Callable[[], T]) -> T:
    """Call `make`. Raises ScalingError for any error, because configurations and models may raise
    anything."""
    try:
        return make()
    except ScalingError:
        raise
    except Exception as error:
        raise ScalingError(f"{type(error).__name__}: {error}".splitlines()[0]) from error


def copy_key(model: PreTrainedModel) -> object:
    """Equal for models with equal copies."""
    network = _network(model)
    try:
        values = scaled_config(network.config).to_dict()
    except Exception:  # noqa: BLE001  see `attempt`
        values = network.config.to_dict()
    names = ("_name_or_path", "architectures", "transformers_version", "dtype", "id2label")
    relevant = {name: value for name, value in values.items() if name not in names}
    return type(network), json.dumps(relevant, sort_keys=True, default=str)


def _network(model: PreTrainedModel) -> PreTrainedModel:
    return cast("PreTrainedModel", model.get_decoder() if inputs_of(model) else model)


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    """Random weights with which attention is far from uniform, and each bias and gate matters."""
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
        else:
            size = parameter[0].numel() if parameter.dim() == 2 else parameter.shape[-1]
            parameter.normal_(std=1.5 * size**-0.5)
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    if hasattr(embedding, "weight"):
        embedding.weight.normal_(std=1.0)


@torch.no_grad()
def soften(model: PreTrainedModel) -> None:
    """Scale the head until its logits are a few nats apart: if one token had a probability near 1,
    errors of all others would be too small to detect."""
    tokens = torch.arange(VOCABULARY)[None, 4:24]
    for _ in range(3):  # the head may be tied to the embeddings
        spread = float(model(input_ids=tokens, use_cache=False).logits.std())
        if spread > SPREAD:
            model.get_output_embeddings().weight.mul_(SPREAD / spread)


def scaled_config(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration with small numbers, of the same class."""
    return type(config).from_dict(_scaled(config.to_dict(), {}))


def _scaled(values: Mapping[str, Any], outer: Mapping[str, Any]) -> dict[str, Any]:
    all_values = {**outer, **values}
    layers = _layers(values)
    scaled: dict[str, Any] = {}
    for name, value in values.items():
        if name == "quantization_config" or (name in UNSET and not value):
            continue
        if isinstance(value, Mapping):
            scaled[name] = (
                _scaled(value, all_values) if name not in ("id2label", "label2id") else value
            )
        elif isinstance(value, bool | str) or value is None:
            scaled[name] = value
        elif isinstance(value, list | tuple):
            scaled[name] = _list(name, list(value), layers, all_values)
        elif isinstance(value, int):
            scaled[name] = _number(name, value, layers[1], all_values)
        else:
            scaled[name] = value
    if "rope_parameters" in scaled:
        _positions(values, scaled)
    return scaled


def _layers(values: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of layers of the model and of a copy that has each kind of layer."""
    numbers = {name: value for name, value in values.items() if isinstance(value, int)}
    total = max((n for name, n in numbers.items() if re.fullmatch(LAYER_COUNTS, name)), default=0)
    interval, first = (
        max((min(n, LAYERS) for name, n in numbers.items() if re.fullmatch(names, name)), default=1)
        for names in (INTERVALS, FIRST_LAYERS)
    )
    least = max(2, interval + first)
    for value in values.values():
        if isinstance(value, list) and len(value) == total and not _are_indices(value):
            kinds = [str(kind_of_layer) for kind_of_layer in value]
            least = max(least, *(kinds.index(kind) + 1 for kind in set(kinds)))
    if values.get("num_kv_shared_layers"):
        least *= 2
    return total, min(total, least)


def _number(name: str, value: int, layers: int, all_values: Mapping[str, Any]) -> int:
    if re.fullmatch(TOKENS, name):
        return min(value, VOCABULARY - 1)
    if re.fullmatch(LAYER_COUNTS, name):
        return min(value, layers)
    if name == "num_kv_shared_layers":
        return min(value, layers // 2)
    if re.fullmatch(KEY_HEADS, name):
        heads = next(
            (
                all_values[k]
                for k in ("num_attention_heads", "n_head", "n_heads")
                if k in all_values
            ),
            0,
        )
        return min(value, HEADS if value == heads else HEADS // 2)
    if name == "attention_hidden_size" and value == all_values.get("hidden_size"):
        return min(value, HIDDEN)
    if re.fullmatch(POSITIONS, name):
        return CONTEXT
    if re.fullmatch(VOCABULARIES, name):
        return VOCABULARY
    if "original" in name:
        return min(value, ORIGINAL)
    if name == "num_heads" and "state_size" in all_values:
        return min(value, 2 * HEADS)  # heads of a state-space layer
    if re.fullmatch("mamba_n_heads|mamba_num_heads", name):
        heads = [
            v for k, v in all_values.items() if re.fullmatch("mamba_d_head|mamba_head_?dim", k)
        ]
        return min(value, 2 * HIDDEN // min(*heads, HEAD) if heads else 2 * HEADS)
    for pattern, most in SIZES.items():
        if re.fullmatch(pattern, name):
            return min(value, most)
    return value if value <= THRESHOLD else WINDOW


def _are_indices(value: list[Any]) -> bool:
    """Whether the values are indices of layers."""
    integers = all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    return integers and len(value) > 1 and value == sorted(set(value))


def _list(
    name: str, value: list[Any], layers: tuple[int, int], all_values: Mapping[str, Any]
) -> list[Any]:
    total, layers_kept = layers
    numbers = all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    if _are_indices(value) and value[-1] == total - 1:
        return [item for item in value if item < layers_kept]
    if len(value) == total and total:
        value = value[:layers_kept]
    elif numbers and re.search("layer|ids|indices|indexes", name) and "token" not in name:
        return [item for item in value if item < layers_kept]
    if numbers and not re.fullmatch(r"\w*section\w*|\w*_layers", name):
        return [_number(name, item, layers_kept, all_values) for item in value]
    if value and all(isinstance(item, list) for item in value):
        return [_list(name, item, layers, all_values) for item in value]
    return value


def _positions(values: Mapping[str, Any], scaled: dict[str, Any]) -> None:
    """Fit per-frequency factors and sections of rotary embeddings to the copy's head size."""
    for rope in _ropes(scaled):
        for name in ("short_factor", "long_factor", "mrope_section"):
            if name in rope and isinstance(rope[name], list):
                rotated = HEAD // 2
                sections = len(rope[name])
                rope[name] = (
                    [rotated - 2 * (rotated // sections), *[rotated // sections] * (sections - 1)]
                    if name == "mrope_section"
                    else [1.0 + (i if name == "long_factor" else 0.1 * i) for i in range(rotated)]
                )


def _ropes(config: dict[str, Any]) -> list[dict[str, Any]]:
    rope = config["rope_parameters"] or {}
    return [parameters for parameters in (rope, *rope.values()) if isinstance(parameters, dict)]
