"""The tokenizer that a GGUF file describes, with the special tokens that it names.

transformers reads these files too, but takes the first token of a conversation for the end of a
turn, forgets added tokens that are not special, and splits every byte-level vocabulary in one way.
"""

from __future__ import annotations

import re
from typing import Any
from uuid import uuid4

import jinja2
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentrl.algorithms.formats.choose import choose, template_cure
from agentrl.algorithms.model.load import Tokenizer
from agentrl.base.failures import one_line
from agentrl.config import RunConfig
from agentrl.errors import PolicyError
from agentrl.model_files.gguf_file import CONTROL, USER_DEFINED, GgufFile

ENDINGS = r"'(?:s|t|re|ve|m|ll|d)"
MARKS = r" ?[^\s\p{L}\p{N}]+"
SPACES = r"\s+(?!\S)|\s+"
LINES = rf"{MARKS}[\r\n]*|\s*[\r\n]+|{SPACES}"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
CASED = "|".join(
    rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]{many}[{LOWER}]{few}" for many, few in ("*+", "+*")
)
GPT2 = rf"{ENDINGS}| ?\p{{L}}+| ?\p{{N}}+|{MARKS}|{SPACES}"
LLAMA3 = rf"(?i:{ENDINGS})|{WORD}|\p{{N}}{{1,3}}|{LINES}"
QWEN2 = rf"(?i:{ENDINGS})|{WORD}|\p{{N}}|{LINES}"
TEKKEN = rf"{CASED}|\p{{N}}|{MARKS}[\r\n/]*|\s*[\r\n]+|{SPACES}"
# How a vocabulary of bytes splits text into words: by `tokenizer.ggml.pre`, one pattern after the
# other. The names are those of llama.cpp.
WORDS = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "gigachat"), (GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (r"\p{N}", GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe"), (LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), (QWEN2,)),
    "tekken": (TEKKEN,),
}
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")  # known ones are not merged
# Names of tokens here, and in the file.
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
COMPOSED = ("qwen2", "deepseek-r1-qwen")  # texts are normalised to NFC


def tokenizer_of(file: GgufFile, config: RunConfig) -> tuple[Tokenizer, list[str]]:
    """The tokenizer with its chat template, and warnings. config: whose policy's settings it gets.
    Raises PolicyError if it cannot be made, has no template, or one with an error."""
    warnings: list[str] = []
    made = _byte_level(file, warnings) if file.value("tokenizer.ggml.model") == "gpt2" else None
    tokenizer = made or _read_by_transformers(file)
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
            f"poor conversion of one; give --chat-template ({template_cure(tokenizer)})"
        )
    end_of_turn(tokenizer)


def ends_of(tokenizer: Tokenizer, file: GgufFile) -> list[int]:
    """Ids of the tokens that end a completion: what ends a turn first, then the file's own."""
    named = [tokenizer.eos_token_id, file.token("eos"), file.token("eot")]
    return list(dict.fromkeys(number for number in named if number is not None))


def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """The special token that the chat template writes after what the assistant said, if any.
    Raises PolicyError if it cannot render a conversation."""
    said = uuid4().hex
    talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": said}]
    try:
        text: str = tokenizer.apply_chat_template(talk, tokenize=False)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise PolicyError(
            f"the chat template has an error: {one_line(str(error))}; give one that renders a "
            "question and an answer, with --chat-template"
        ) from None
    added = tokenizer.added_tokens_decoder
    ids = tokenizer(text.rpartition(said)[2], add_special_tokens=False)["input_ids"]
    return next((number for number in ids if number in added and added[number].special), None)


def _byte_level(file: GgufFile, warnings: list[str]) -> Tokenizer:
    """A byte-pair encoding of bytes, as GPT-2's, which splits words as its kind does."""
    kind = str(file.value("tokenizer.ggml.pre", "unnamed"))
    if kind not in WORDS:
        warnings.append(
            f"the tokenizer splits words as {kind!r}, which is not known here: it splits them as "
            "GPT-2 does, so the model may see other tokens than in its training"
        )
    vocabulary = {token: number for number, token in enumerate(file.tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in file.value("tokenizer.ggml.merges", [])]
    try:
        backend = FastTokenizer(BPE(vocabulary, merges, ignore_merges=kind in WHOLE_WORDS))
    except Exception as error:  # tokenizers raises nothing more special
        reason = one_line(str(error))
        raise PolicyError(f"{file.path}: its tokenizer is damaged: {reason}") from error
    words = [pre_tokenizers.Split(Regex(one), "isolated") for one in WORDS.get(kind, (GPT2,))]
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
    """Tokens that are never split: those that control the model, and tags such as <tool_call>."""
    known = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    for kind in (CONTROL, USER_DEFINED):
        marks = [
            AddedToken(token, normalized=False, special=kind == CONTROL)
            for token, own in zip(file.tokens, file.kinds, strict=True)
            if own == kind and token not in known and not re.fullmatch(r"[\s\u2581\u0120]*", token)
        ]
        tokenizer.add_tokens(marks, special_tokens=kind == CONTROL)
