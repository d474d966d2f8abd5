"""Builds verl's engines of one rank from the settings, and names their weights as checkpoints do.
Imports verl, so only processes that have it may import this."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
import verl.utils.model
from torch.nn import Module
from transformers import AutoModelForTokenClassification
from verl.trainer.config import CheckpointConfig
from verl.workers.config import (
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine import EngineRegistry

from agentrl.algorithms.learners.verl.settings import FSDP2, MEGATRON, VerlSettings
from agentrl.errors import ConfigError, nearest

ADAPTER, WEIGHT = "base_model.model.", ".default.weight"  # around peft's names for an adapter
CONFIGS = {  # verl's classes of an engine and its optimizer
    FSDP2: (FSDPEngineConfig, FSDPOptimizerConfig),
    MEGATRON: (McoreEngineConfig, McoreOptimizerConfig),
}
LORA = ("lora_rank", "lora_alpha", "target_modules")


def policy_config(settings: VerlSettings) -> TrainingWorkerConfig:
    """Configuration of the policy's engine, which verl's worker builds itself."""
    engine, optimizer = CONFIGS[settings["engine"]["strategy"]]
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=_verl_config(HFModelConfig, settings["model"]),
        engine_config=_verl_config(engine, settings["engine"]),
        optimizer_config=_verl_config(optimizer, settings["optimizer"]),
        checkpoint_config=CheckpointConfig(),
    )


def check_options(settings: VerlSettings) -> None:
    """Raise ConfigError for options that verl's own configuration classes refuse, and for an engine
    that is not installed."""
    strategy = settings["engine"]["strategy"]
    parts = dict(zip(("engine", "optimizer"), CONFIGS[strategy], strict=True))
    _check_keys(HFModelConfig, settings["model"])  # building it would load the model's files
    for part, kind in parts.items():
        try:
            _verl_config(kind, settings[part])
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(f"learner.verl.options.{part}: verl refuses it: {error}") from None
    try:
        EngineRegistry.get_engine_cls("language_model", strategy)
    except (AssertionError, ValueError) as error:
        raise ConfigError(
            f"learner.verl.options.engine.strategy = {strategy!r}: verl does not have it here "
            f"({error}); install what verl's documentation names for it on every node"
        ) from None


def scoring_engine(settings: VerlSettings, path: str) -> Any:
    """The forward-only engine of a frozen model. path: directory or hub name."""
    model = {key: value for key, value in settings["model"].items() if key not in LORA}
    engine = settings["engine"] | {"forward_only": True}
    # Megatron's engine looks into the optimizer's settings even without one.
    return _open_engine("language_model", model | {"path": path}, engine, settings["optimizer"])


def value_engine(settings: VerlSettings) -> Any:
    """The engine of the critic: a decoder with a new head, one number initialised to 0."""
    asked = settings["critic"]
    with _value_models():
        return _open_engine("value_model", asked["model"], settings["engine"], asked["optimizer"])


def checkpoint_names(module: Module, of: str) -> dict[str, str]:
    """Checkpoint name -> verl's name of every weight and buffer. In checkpoints a critic has
    "decoder.*" and "head.*", an adapter peft's without ADAPTER and WEIGHT, others their own."""
    if of == "values":
        decoder = f"{module.base_model_prefix}."
        return {_of_critic(key, decoder): key for key in module.state_dict()}
    return {key.removeprefix(ADAPTER).removesuffix(WEIGHT): key for key in module.state_dict()}


def _of_critic(key: str, decoder: str) -> str:
    if key.startswith(decoder):
        return "decoder." + key.removeprefix(decoder)
    return "head." + key.rpartition(".")[2]


def _open_engine(
    kind: str, model: Mapping[str, Any], engine: Mapping[str, Any], optimizer: Mapping[str, Any]
) -> Any:
    engine_kind, optimizer_kind = CONFIGS[engine["strategy"]]
    config, own = _verl_config(HFModelConfig, model), _verl_config(engine_kind, engine)
    config.model_type, own.use_remove_padding = kind, config.use_remove_padding
    made = EngineRegistry.new(
        model_type=kind,
        backend=engine["strategy"],
        model_config=config,
        engine_config=own,
        optimizer_config=_verl_config(optimizer_kind, optimizer),
        checkpoint_config=CheckpointConfig(),
    )
    made.initialize()
    return made


def _verl_config(kind: type, asked: Mapping[str, Any]) -> Any:
    """A configuration object of verl. Raises ConfigError for a setting this release lacks."""
    _check_keys(kind, asked)
    return kind(**asked)


def _check_keys(kind: type, asked: Mapping[str, Any]) -> None:
    known = {field.name for field in fields(kind)}
    for key in asked:
        if key not in known:
            raise ConfigError(
                f"learner.kind = 'verl': {kind.__name__} of the verl that is installed has no "
                f"{key!r}; {nearest(key, known)} in learner.verl.options"
            )


@contextmanager
def _value_models() -> Iterator[None]:
    """Context in which verl's engine loads value models by `_value_model`: verl 0.9's own loader
    needs flash attention whatever the settings say, and otherwise trl."""
    before = verl.utils.model.load_valuehead_model
    verl.utils.model.load_valuehead_model = _value_model
    try:
        yield
    finally:
        verl.utils.model.load_valuehead_model = before


def _value_model(
    local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool
) -> Module:
    """A decoder with a new head of zeros, with the signature of verl's own loader."""
    model: Module = AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
    )
    decoder = model.get_submodule(str(model.base_model_prefix))
    inside = {id(parameter) for parameter in decoder.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in inside:
            torch.nn.init.zeros_(parameter)
    return model
