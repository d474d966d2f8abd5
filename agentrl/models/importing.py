"""`agentrl model import`: converts a GGUF file to a Hugging Face folder that can be trained. The
file is given by its path, or by a folder or a package that contains it. It has metadata, tensors,
and a tokenizer with special tokens. transformers reads these files, too, but mistakes the first
token of a conversation for the end of a turn, drops added tokens that are not special, and splits
all byte-level vocabularies in the same way.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import jinja2
import torch
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import quantization_config

from agentrl.algorithms.model.chat import Codec, Tokenizer
from agentrl.algorithms.model.load import DTYPES, Model, load_model, no_progress_bars
from agentrl.algorithms.model.templates import choose, template_fix
from agentrl.core.config import RunConfig
from agentrl.core.errors import ConfigError, PolicyError, install_command
from agentrl.core.files import atomic_directory, delete_partial
from agentrl.core.types import one_line

TEXTS = (
    "Hello, world!",
    "12 345.67 + 8",
    "  two  spaces\n\n\tand a tab",
    "naïve 日本語 🙂",
    "it's <b>",
)
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."
DEFAULTS = RunConfig()
RARE = 0.01  # a model trained with this end of turn gives it a higher probability


class Imported(NamedTuple):
    """The result of an import. end: the token that ends a turn; probability: of that token after a
    complete answer."""

    end: str
    probability: float
    warnings: list[str]


def import_gguf(
    file: GgufFile, target: Path, *, dtype: str = "bfloat16", config: RunConfig = DEFAULTS
) -> Imported:
    """Write model, tokenizer and chat template into `target`, which is created after all checks
    have passed. config: its policy settings apply to the tokenizer. Raises ConfigError if `target`
    is not empty or its disk has no space, PolicyError if the file cannot be read or the result is
    not a valid model.
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
        raise ConfigError(f"{target} exists already: give another folder, or delete it")
    delete_partial(target)  # left by a killed import; before the free space is measured
    near = next(path for path in target.absolute().parents if path.is_dir())
    needed, free = file.parameters * size * 1.05, shutil.disk_usage(near).free
    if needed > free:
        raise ConfigError(
            f"{target} needs {needed / 2**30:.2g} GiB, and {near} has {free / 2**30:.2g} free: give"
            " a folder on another disk, or make room" + (" or --dtype bfloat16" * (size > 2))
        )


def _unread(file: GgufFile) -> Iterator[str]:
    """Warnings about what transformers leaves out."""
    if towers := sorted(file.path.parent.glob("*mmproj*.gguf")):
        yield (
            f"{towers[0].name} is the vision tower of the model, which is left out: the result "
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
    """Dequantise the weights: newer versions of transformers keep the file's blocks if the machine
    has a kernel for them, and blocks can neither be saved nor trained."""
    settings = getattr(quantization_config, "GgufConfig", None)
    return {} if settings is None else {"quantization_config": settings(dequantize=True)}


def _check_tokens(file: GgufFile, tokenizer: Tokenizer) -> None:
    """Raise PolicyError unless the saved tokenizer has the tokens of the file at their ids, keeps
    marks whole, and reads back the texts that it writes."""
    codec = Codec(tokenizer)
    converted = tokenizer.convert_ids_to_tokens(range(len(file.tokens)))
    for number, (token, converted_token, kind) in enumerate(
        zip(file.tokens, converted, file.kinds, strict=True)
    ):
        same = kind == BYTE or _spelled(token) == _spelled(converted_token)
        if kind in (CONTROL, USER_DEFINED) and token.strip() and token == converted_token:
            same = codec.encode(token) == [number]
        if not same:
            difference = f"token {number} is {token!r} in the file and {converted_token!r} here"
            raise _not_converted(file, difference)
    for text in TEXTS:
        if (read_back := codec.decode(codec.encode(text))) != text:
            raise _not_converted(file, f"{text!r} is read back as {read_back!r}")


def _spelled(token: str | None) -> str:
    return (token or "").replace("\u2581", " ")


def _not_converted(file: GgufFile, difference: str) -> PolicyError:
    return PolicyError(
        f"{file.path}: its tokenizer was not converted correctly: {difference}; take the model's "
        "Hugging Face folder instead"
    )


def _ends_a_turn(model: Model, tokenizer: Tokenizer) -> float:
    """The probability with which the model ends a turn after a complete answer. Raises PolicyError
    if it is not finite."""
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


SUFFIX = ".gguf"


def find(source: str) -> Path:
    """The GGUF file at a path, the only one in a folder, or the only one of an installed package.
    Raises ConfigError if there is none, or more than one."""
    path = Path(source)
    if path.is_file():
        return path
    files = sorted(path.rglob(f"*{SUFFIX}") if path.is_dir() else _of_package(source))
    if not files:
        raise ConfigError(f"{source}: it has no {SUFFIX} file; give one, or what contains one")
    if len(files) > 1:
        names = ", ".join(map(str, files[:5]))
        raise ConfigError(f"{source}: it has {len(files)} {SUFFIX} files; give one of {names}")
    return files[0]


def _of_package(name: str) -> Iterator[Path]:
    try:
        files = distribution(name).files or ()
    except (PackageNotFoundError, ValueError):
        raise ConfigError(
            f"{name}: there is no such file or folder, and no package of this name is installed"
        ) from None
    return (Path(str(file.locate())) for file in files if file.suffix == SUFFIX)


# Kinds of tokens, as `tokenizer.ggml.token_type` numbers them.
CONTROL, USER_DEFINED, BYTE = 3, 4, 6
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


class GgufFile:
    """The metadata of a file. Raises PolicyError if it is not a whole GGUF file, ConfigError if the
    package `gguf` is missing."""

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ModuleNotFoundError:
            raise ConfigError(f"gguf is missing: {install_command('gguf')}") from None
        try:
            reader = GGUFReader(path)
        except (ValueError, LookupError, OverflowError, MemoryError, OSError) as error:
            raise PolicyError(
                f"{path}: it is not a GGUF file, or it is incomplete ({error}); fetch it again"
            ) from None
        self.path, self._fields = path, reader.fields
        self.shapes = {tensor.name: [int(n) for n in tensor.shape] for tensor in reader.tensors}
        if int(self.value("split.count", 1)) > 1:
            raise PolicyError(
                f"{path}: it is one of {self.value('split.count')} parts; join them first, with "
                "llama-gguf-split --merge"
            )
        self.architecture = str(self.value("general.architecture", "unknown"))
        self.tokens: list[str] = self.value("tokenizer.ggml.tokens", [])
        self.kinds: list[int] = self.value("tokenizer.ggml.token_type", [1] * len(self.tokens))
        self._check_vocabulary()

    def value(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def token(self, role: str) -> int | None:
        """The id of a special token by its role, such as "eos"."""
        number = self.value(f"tokenizer.ggml.{role}_token_id")
        return None if number is None or number >= len(self.tokens) else int(number)

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def _check_vocabulary(self) -> None:
        if not self.tokens or EMBEDDING not in self.shapes:
            raise PolicyError(
                f"{self.path}: it has no tokenizer or no embedding of tokens, so it is not a "
                "language model; give the file of the model itself"
            )
        rows, head = (self.shapes.get(name, [0])[-1] for name in (EMBEDDING, HEAD))
        declared = self.value(f"{self.architecture}.vocab_size", len(self.tokens))
        if rows < len(self.tokens) or declared != rows or head not in (0, rows):
            raise PolicyError(
                f"{self.path}: its tokenizer has {len(self.tokens)} tokens, its embedding {rows} "
                f"and its head {head or rows}, and its metadata say {declared}: they do not belong"
                " to one model; take another conversion of it"
            )


ENDINGS = r"'(?:s|t|re|ve|m|ll|d)"
MARKS = r" ?[^\s\p{L}\p{N}]+"
SPACES = r"\s+(?!\S)|\s+"
LINES = rf"{MARKS}[\r\n]*|\s*[\r\n]+|{SPACES}"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
CASED = "|".join(
    rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]{upper_repeat}[{LOWER}]{lower_repeat}"
    for upper_repeat, lower_repeat in ("*+", "+*")
)
GPT2 = rf"{ENDINGS}| ?\p{{L}}+| ?\p{{N}}+|{MARKS}|{SPACES}"
LLAMA3 = rf"(?i:{ENDINGS})|{WORD}|\p{{N}}{{1,3}}|{LINES}"
QWEN2 = rf"(?i:{ENDINGS})|{WORD}|\p{{N}}|{LINES}"
TEKKEN = rf"{CASED}|\p{{N}}|{MARKS}[\r\n/]*|\s*[\r\n]+|{SPACES}"
# `tokenizer.ggml.pre` -> patterns with which a byte-level vocabulary splits text into words,
# applied in order. The names are those of llama.cpp.
WORDS = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "gigachat"), (GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (r"\p{N}", GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe"), (LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), (QWEN2,)),
    "tekken": (TEKKEN,),
}
# Words of the vocabulary are not split.
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
# Special tokens: name in transformers -> name in the file.
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
COMPOSED = ("qwen2", "deepseek-r1-qwen")  # texts are normalised to NFC


def tokenizer_of(file: GgufFile, config: RunConfig) -> tuple[Tokenizer, list[str]]:
    """The tokenizer with its chat template, and warnings. config: its policy settings apply to the
    tokenizer. Raises PolicyError if it cannot be created, or has no valid template."""
    warnings: list[str] = []
    byte_level = (
        _byte_level(file, warnings) if file.value("tokenizer.ggml.model") == "gpt2" else None
    )
    tokenizer = byte_level or _read_by_transformers(file)
    _add_marks(tokenizer, file)
    for role, key in ROLES.items():
        number = file.token(key)
        setattr(tokenizer, f"{role}_token", None if number is None else file.tokens[number])
    tokenizer.name_or_path = str(file.path)
    tokenizer.chat_template = file.value("tokenizer.chat_template")
    if config == RunConfig():
        _check_template(file, tokenizer)
    choose(tokenizer, config)
    if (end := end_of_turn(tokenizer)) is not None:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    if tokenizer.eos_token is None:
        raise PolicyError(
            f"{file.path}: neither its metadata nor its chat template says which token ends a turn;"
            " give a template that writes it, with --chat-template"
        )
    return tokenizer, warnings


def _check_template(file: GgufFile, tokenizer: Tokenizer) -> None:
    if not tokenizer.chat_template:
        raise PolicyError(
            f"{file.path}: it has no chat template, so it is not an instruction-tuned model or a "
            f"poor conversion of one; give --chat-template ({template_fix(tokenizer)})"
        )
    end_of_turn(tokenizer)


def ends_of(tokenizer: Tokenizer, file: GgufFile) -> list[int]:
    """Ids of the tokens that end a completion: first the end of a turn, then the file's end
    token."""
    named = [tokenizer.eos_token_id, file.token("eos"), file.token("eot")]
    return list(dict.fromkeys(number for number in named if number is not None))


def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """The special token that the chat template writes after an assistant message, if any. Raises
    PolicyError if it cannot render a conversation."""
    marker = uuid4().hex
    talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": marker}]
    try:
        text: str = tokenizer.apply_chat_template(talk, tokenize=False)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise PolicyError(
            f"the chat template has an error: {one_line(str(error))}; give one that renders a "
            "question and an answer, with --chat-template"
        ) from None
    added = tokenizer.added_tokens_decoder
    ids = tokenizer(text.rpartition(marker)[2], add_special_tokens=False)["input_ids"]
    return next((number for number in ids if number in added and added[number].special), None)


def _byte_level(file: GgufFile, warnings: list[str]) -> Tokenizer:
    """A byte-level byte-pair encoding like GPT-2's, with the word patterns of its kind."""
    kind = str(file.value("tokenizer.ggml.pre", "unnamed"))
    if kind not in WORDS:
        warnings.append(
            f"the tokenizer splits words as {kind!r}, which is unknown: it will split them as "
            "GPT-2 does, so the model may see other tokens than in its training"
        )
    vocabulary = {token: number for number, token in enumerate(file.tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in file.value("tokenizer.ggml.merges", [])]
    try:
        backend = FastTokenizer(BPE(vocabulary, merges, ignore_merges=kind in WHOLE_WORDS))
    except Exception as error:  # tokenizers raises no specific class
        reason = one_line(str(error))
        raise PolicyError(f"{file.path}: its tokenizer is damaged: {reason}") from error
    words = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in WORDS.get(kind, (GPT2,))
    ]
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*words, spelling])
    backend.decoder = decoders.ByteLevel()
    if kind in COMPOSED:
        backend.normalizer = normalizers.NFC()
    first = file.token("bos")
    if file.value("tokenizer.ggml.add_bos_token", False) and first is not None:
        name = file.tokens[first]
        backend.post_processor = processors.TemplateProcessing(
            single=[name, "$A"], special_tokens=[(name, first)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


def _read_by_transformers(file: GgufFile) -> Tokenizer:
    try:
        return AutoTokenizer.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    except Exception as error:  # transformers documents no exception types
        kind: Any = file.value("tokenizer.ggml.model")
        raise PolicyError(
            f"{file.path}: its tokenizer, of kind {kind!r}, cannot be read by transformers "
            f"({one_line(str(error))}); take the model's Hugging Face folder instead"
        ) from error


def _add_marks(tokenizer: Tokenizer, file: GgufFile) -> None:
    """Add tokens that are never split: control tokens, and tags such as <tool_call>."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    for kind in (CONTROL, USER_DEFINED):
        marks = [
            AddedToken(token, normalized=False, special=kind == CONTROL)
            for token, token_kind in zip(file.tokens, file.kinds, strict=True)
            if token_kind == kind
            and token not in special
            and not re.fullmatch(r"[\s\u2581\u0120]*", token)
        ]
        tokenizer.add_tokens(marks, special_tokens=kind == CONTROL)
