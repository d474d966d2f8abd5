"""Make a Hugging Face folder of a GGUF file, and prove that it is a model that can be trained."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import quantization_config

from agentrl.algorithms.model.load import DTYPES, Model, Tokenizer, load_model, no_progress_bars
from agentrl.algorithms.model.text import Codec
from agentrl.base.failures import one_line
from agentrl.base.files import atomic_directory, delete_partial
from agentrl.config import RunConfig
from agentrl.errors import ConfigError, PolicyError
from agentrl.model_files.gguf_file import BYTE, CONTROL, USER_DEFINED, GgufFile
from agentrl.model_files.tokenizer import end_of_turn, ends_of, tokenizer_of

TEXTS = (
    "Hello, world!",
    "12 345.67 + 8",
    "  two  spaces\n\n\tand a tab",
    "naïve 日本語 🙂",
    "it's <b>",
)
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."
DEFAULTS = RunConfig()
RARE = 0.01  # a probability of the end of a turn that no model has which was trained with it


class Imported(NamedTuple):
    """end: the token that ends a turn; probability: of it after a whole answer."""

    end: str
    probability: float
    warnings: list[str]


def import_gguf(
    file: GgufFile, target: Path, *, dtype: str = "bfloat16", config: RunConfig = DEFAULTS
) -> Imported:
    """Write model, tokenizer and chat template into `target`, which appears when all is checked.

    config: whose policy's settings the tokenizer gets. Raises ConfigError if `target` has something
    or no room for it, PolicyError if the file cannot be read, or what was made of it is no model.
    """
    _check_target(file, target, DTYPES[dtype].itemsize)
    tokenizer, warnings = tokenizer_of(file, config)
    warnings += _unread(file)
    try:
        with no_progress_bars(), atomic_directory(target) as folder:
            _write(file, tokenizer, folder, DTYPES[dtype])
            model, tokenizer = load_model(folder, dtype, "cpu")
            _check_tokens(file, tokenizer)
            probability = _ends_a_turn(model, tokenizer)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written ({error.strerror or error})") from None
    if probability < RARE:
        warnings.append(
            f"the model ends an answer with {tokenizer.eos_token} in {probability:.1%} of cases "
            "only: it may not have been trained with this chat template"
        )
    return Imported(str(tokenizer.eos_token), probability, warnings)


def _check_target(file: GgufFile, target: Path, size: int) -> None:
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"{target} is there already: give another folder, or delete it")
    delete_partial(target)  # of a killed import, before the room is measured
    near = next(path for path in target.absolute().parents if path.is_dir())
    needed, free = file.parameters * size * 1.05, shutil.disk_usage(near).free
    if needed > free:
        raise ConfigError(
            f"{target} needs {needed / 2**30:.2g} GiB, and {near} has {free / 2**30:.2g} free: give"
            " a folder on another disk, or make room" + (" or --dtype bfloat16" * (size > 2))
        )


def _unread(file: GgufFile) -> Iterator[str]:
    """Warnings about what transformers leaves out."""
    if eyes := sorted(file.path.parent.glob("*mmproj*.gguf")):
        yield (
            f"{eyes[0].name} is the vision tower of the model, which is left out: what is made "
            "reads text only; take its Hugging Face folder for a policy that sees images"
        )
    if any(name.startswith("rope_") for name in file.shapes):
        yield (
            "the file scales its positions (rope_freqs), which transformers does not read: long "
            "contexts differ from the original's; take its Hugging Face folder for them"
        )


def _write(file: GgufFile, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype) -> None:
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            str(file.path.parent), gguf_file=file.path.name, dtype=dtype,
            output_loading_info=True, **_unpacked(),
        )  # fmt: skip
    except Exception as error:  # transformers and gguf document no exception types
        raise PolicyError(
            f"{file.path}: transformers cannot read this {file.architecture!r} model "
            f"({one_line(str(error))}); take its Hugging Face folder instead"
        ) from error
    if lost := sorted(loading["missing_keys"]):
        raise PolicyError(
            f"{file.path}: {len(lost)} weights are missing, such as {lost[0]}; take another "
            "conversion of the model"
        )
    ends = ends_of(tokenizer, file)
    for settings in (model.config, model.generation_config):
        settings.bos_token_id = tokenizer.bos_token_id
        settings.pad_token_id = tokenizer.pad_token_id
    model.config.eos_token_id = ends[0]
    model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _unpacked() -> dict[str, Any]:
    """Weights instead of the file's blocks, which newer versions of transformers keep where the
    machine has a kernel for them: these can neither be saved nor trained."""
    settings = getattr(quantization_config, "GgufConfig", None)
    return {} if settings is None else {"quantization_config": settings(dequantize=True)}


def _check_tokens(file: GgufFile, tokenizer: Tokenizer) -> None:
    """Raise PolicyError unless the saved tokenizer has the tokens of the file at their ids, keeps
    marks whole, and reads back the texts that it writes."""
    codec = Codec(tokenizer)
    own = tokenizer.convert_ids_to_tokens(range(len(file.tokens)))
    for number, (token, made, kind) in enumerate(zip(file.tokens, own, file.kinds, strict=True)):
        same = kind == BYTE or _spelled(token) == _spelled(made)
        if kind in (CONTROL, USER_DEFINED) and token.strip() and token == made:
            same = codec.encode(token) == [number]
        if not same:
            raise _not_converted(file, f"token {number} is {token!r} there and {made!r} here")
    for text in TEXTS:
        if (found := codec.decode(codec.encode(text))) != text:
            raise _not_converted(file, f"{text!r} is read back as {found!r}")


def _spelled(token: str | None) -> str:
    return (token or "").replace("\u2581", " ")


def _not_converted(file: GgufFile, what: str) -> PolicyError:
    return PolicyError(
        f"{file.path}: its tokenizer is not converted right: {what}; take the model's Hugging Face "
        "folder instead"
    )


def _ends_a_turn(model: Model, tokenizer: Tokenizer) -> float:
    """The probability with which the model ends a turn after a whole answer. Raises PolicyError if
    what it computes is not finite."""
    talk = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    text: str = tokenizer.apply_chat_template(talk, tokenize=False)
    before = text[: text.rindex(ANSWER) + len(ANSWER)]
    tokens = torch.tensor([Codec(tokenizer).encode(before)])
    network: Any = model
    with torch.inference_mode():
        logits = network(tokens).logits[0].float()
    if not torch.isfinite(logits).all():
        raise PolicyError("what the model computes is not finite: its file is damaged; fetch it")
    end = end_of_turn(tokenizer)
    return float(logits[-1].softmax(-1)[tokenizer.eos_token_id if end is None else end])
