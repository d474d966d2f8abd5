"""Loading of image-text models whole, and the warnings for others that would lose their tower."""

from __future__ import annotations

import logging
from typing import Any

from transformers import AutoModelForImageTextToText
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.import_utils import is_torchvision_available

from agentrl.algorithms.model.scaled import attach
from agentrl.algorithms.vision.inputs import CLASSES, REASONS, ImageInputs, check_version
from agentrl.core.config import RunConfig
from agentrl.core.config.infrastructure import EmbeddedEngineConfig
from agentrl.core.errors import ConfigError, PolicyError, install_command
from agentrl.core.types import one_line

log = logging.getLogger("agentrl.algorithm")
MODALITIES = {"vision_config": "images", "audio_config": "audio"}


def load(
    name: str, shape: Any, config: RunConfig | None, options: dict[str, Any]
) -> tuple[Any, Any] | None:
    """The model and its loading info, or None for a model without a tower, or one that is trained
    as a text model. Raises PolicyError if it cannot be a policy, ConfigError for settings that do
    not allow images."""
    setting = config.policy.vision if config is not None else ""
    kind = CLASSES.get(shape.model_type)
    if kind is None:
        if sentence := _left_out(shape):
            if setting or shape.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
                raise PolicyError(f"model {name!r}: {sentence}; {_fix_hint()}")
            log.warning(
                "model %r: %s. Only its text is trained, and what is written may lack the weights "
                "of its tower; %s.",
                name,
                sentence,
                _fix_hint(),
            )
        elif setting:
            raise PolicyError(
                f"policy.vision = {setting!r}: model {name!r} has no vision tower; leave it out, or"
                f" choose a model of type {_types()}"
            )
        return None
    check_version(f"model {name!r}")
    if config is not None and setting:
        check(config, setting)
    try:
        processor = AutoImageProcessor.from_pretrained(name)
    except (OSError, ValueError, ImportError) as error:
        raise PolicyError(
            f"model {name!r}: its image processor cannot be loaded ({one_line(str(error))}); put "
            f"preprocessor_config.json of the model there, and {install_command('vision')}"
        ) from None
    model, loading = AutoModelForImageTextToText.from_pretrained(name, **options)
    sees = config is None or bool(setting)
    attach(
        model, ImageInputs(model, processor, kind(model), sees=sees, trained=setting == "trained")
    )
    return model, loading


def check(config: RunConfig, setting: str) -> None:
    """Raise ConfigError for settings with which images cannot be trained."""
    learner, engine, policy = config.learner, config.engine, config.policy
    where = f"policy.vision = {setting!r}"
    if learner.kind != "torch":
        raise ConfigError(f"learner.kind = {learner.kind!r}: {where} needs 'torch'")
    if not engine.serves_images:
        raise ConfigError(
            f"engine.kind = {engine.kind!r}: {where} needs an engine that serves images, 'embedded'"
            " or 'vllm'"
        )
    if not (isinstance(engine, EmbeddedEngineConfig) or is_torchvision_available()):
        log.warning(
            "Servers resize images with torchvision, which is not installed here, so the learner's "
            "pixels may differ a little; pip install the version that they have."
        )
    if getattr(learner, "liger_kernel", False):
        raise ConfigError(
            f"learner.liger_kernel: its kernels read no images; leave it out, {where}"
        )
    if config.critic.model:
        raise ConfigError(f"critic.model: a critic reads no images; leave it out, {where}")
    if policy.quantize:
        raise ConfigError(
            f"policy.quantize: a vision tower is not quantized; leave it out, {where}"
        )
    if setting == "trained" and config.initial_policy.lora.rank:
        raise ConfigError(
            f"{where}: an adapter (policy.lora) leaves the tower as it is; set it to 'frozen'"
        )


def _left_out(shape: Any) -> str:
    """A sentence about a multimodal model of an unsupported class; else ""."""
    modalities = [word for key, word in MODALITIES.items() if getattr(shape, key, None) is not None]
    if not modalities:
        return ""
    reason = REASONS.get(shape.model_type, "")
    return (
        f"it reads {' and '.join(modalities)}, and no policy here can look with a model of type "
        f"{shape.model_type!r}{', ' if reason else ''}{reason}"
    )


def _fix_hint() -> str:
    return f"an agent that looks needs a model of type {_types()}"


def _types() -> str:
    *others, last = CLASSES
    return f"{', '.join(others)} or {last}"
