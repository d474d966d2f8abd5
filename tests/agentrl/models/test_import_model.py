"""`agentrl model import`, with GGUF files made on the spot."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tokenizers import Regex, pre_tokenizers
from transformers import AutoModelForCausalLM
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.utils import quantization_config

from agentrl.algorithms.model.chat import Codec
from agentrl.algorithms.model.load import end_tokens, load_model
from agentrl.cli.main import cli
from agentrl.core.config import RunConfig
from agentrl.core.errors import ConfigError, PolicyError
from agentrl.models.importing import GPT2, WORDS, GgufFile, find, import_gguf, tokenizer_of
from agentrl.tiny.models import make_model, make_tokenizer

gguf = pytest.importorskip("gguf", reason="needs the extra gguf")

TALK = [{"role": "user", "content": "Which lamp?"}, {"role": "assistant", "content": "The red one"}]
NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "model.layers": "blk",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm"}  # fmt: skip


@pytest.fixture(scope="module")
def original() -> tuple[Any, Any]:
    torch.manual_seed(0)
    tokenizer = make_tokenizer(["Which lamp? The red one costs 48 dollars."] * 9)
    return make_model(tokenizer), tokenizer


Write = Callable[..., Path]


@pytest.fixture
def write(original: tuple[Any, Any], tmp_path: Path) -> Write:
    """Writes the model as llama.cpp would, with other metadata, and tensors replaced or left out
    (None)."""

    def written(tensors: dict[str, Any] | None = None, **metadata: Any) -> Path:
        model, tokenizer = original
        path = tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(path, metadata.get("architecture", "llama"))
        merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
        tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        added = tokenizer.added_tokens_decoder
        values = {
            "block_count": 2, "context_length": 512, "embedding_length": 64,
            "feed_forward_length": 128, "head_count": 4, "head_count_kv": 2,
            "layer_norm_rms_eps": 1e-6, "rope_freq_base": 1e4, "vocab_size": len(tokens),
            "tokenizer_model": "gpt2", "tokenizer_pre": "gpt-2", "token_list": tokens,
            "token_types": [1 if n not in added else 3 if added[n].special else 4
                            for n in range(len(tokens))],
            "token_merges": [" ".join(pair) for pair in merges],
            "bos_token_id": 0, "eos_token_id": 1, "chat_template": tokenizer.chat_template,
        }  # fmt: skip
        for name, value in (values | metadata).items():
            if value is not None and name != "architecture":
                getattr(writer, f"add_{name}")(value)
        held = {_gguf_name(n): _as_gguf(n, t) for n, t in model.state_dict().items()}
        for name, tensor in (held | (tensors or {})).items():
            if tensor is not None and name != "lm_head.weight":
                writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return written


def _gguf_name(name: str) -> str:
    for own, other in NAMES.items():
        name = name.replace(f"{own}.", f"{other}.")
    return name


def _as_gguf(name: str, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """llama.cpp stores the two halves of each rotated pair beside each other."""
    heads = 4 if "q_proj" in name else 2
    if "q_proj" in name or "k_proj" in name:
        tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
    return tensor.contiguous().numpy()


def test_the_imported_model_computes_and_writes_what_the_original_does(
    write: Write, original: tuple[Any, Any], tmp_path: Path
) -> None:
    command = ["model", "import", str(write().parent), str(tmp_path / "out"), "--dtype", "float32"]
    result = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert f'set policy.model = "{tmp_path / "out"}"' in result.output
    assert "tiny.gguf: unnamed, llama, 0.1 M parameters" in result.output
    model, tokenizer = load_model(tmp_path / "out", device="cpu")
    (wanted, own), tokens = original, torch.arange(7, 60)[None]
    with torch.inference_mode():
        assert torch.allclose(model(tokens).logits, wanted.eval()(tokens).logits, atol=1e-5)
    assert tokenizer.chat_template == own.chat_template
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert Codec(tokenizer).encode("<tool_call>") == own.encode("<tool_call>")
    assert end_tokens(model, tokenizer) == [own.eos_token_id]


def test_where_transformers_can_keep_the_files_blocks_it_is_asked_for_weights(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions since 5.17 keep them by default, and then refuse to save the model."""
    load, blocks = AutoModelForCausalLM.from_pretrained, []
    theirs = getattr(quantization_config, "GgufConfig", None)

    class Blocks(dict[str, bool]):
        """transformers.GgufConfig of those versions."""

    def from_pretrained(*arguments: Any, **given: Any) -> Any:
        if "gguf_file" in given:
            blocks.append(given.pop("quantization_config"))
            if theirs is not None:
                given["quantization_config"] = theirs(**blocks[-1])
        return load(*arguments, **given)

    monkeypatch.setattr(quantization_config, "GgufConfig", Blocks, raising=False)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    import_gguf(GgufFile(write()), tmp_path / "out")
    assert blocks == [{"dequantize": True}]


def test_another_template_comes_by_name_or_from_a_file(write: Write, tmp_path: Path) -> None:
    mine = tmp_path / "mine.jinja"
    mine.write_text("{% for m in messages %}{{ m.role + m.content }}<|endoftext|>{% endfor %}")
    for given, end in ((str(mine), "<|endoftext|>"), ("chatml", "<|im_end|>")):
        out = tmp_path / end[2:5]
        command = ["model", "import", str(write(chat_template=None)), str(out)]
        result = CliRunner().invoke(cli, command)
        assert "policy.chat_template = 'chatml'" in str(result.exception)
        result = CliRunner().invoke(cli, [*command, "--chat-template", given])
        assert f"ends an answer with {end}" in result.output, result.exception
        _, tokenizer = load_model(out, device="cpu")
        assert tokenizer.eos_token == end
        if given != "chatml":
            assert tokenizer.chat_template == mine.read_text()


@pytest.mark.parametrize("named", [0, 2, None])
def test_a_turn_ends_with_what_the_template_writes_whatever_the_file_says(
    write: Write, tmp_path: Path, named: int | None
) -> None:
    file = GgufFile(write(eos_token_id=named))
    assert import_gguf(file, tmp_path / "out").end == "<|im_end|>"
    model, tokenizer = load_model(tmp_path / "out", device="cpu")
    ends = {1} if named is None else {1, named}
    assert set(end_tokens(model, tokenizer)) == ends


def test_without_a_mark_in_the_template_the_files_own_token_ends_a_turn(write: Write) -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer, _ = tokenizer_of(GgufFile(write(chat_template=plain, eos_token_id=2)), RunConfig())
    assert tokenizer.eos_token == "<|endoftext|>"
    with pytest.raises(PolicyError, match="which token ends a turn"):
        tokenizer_of(GgufFile(write(chat_template=plain, eos_token_id=None)), RunConfig())


TEXT = "It's 12345 + 678,\n\n  we'LL see: naïve   Café\t日本\r\n x=1;\n /a"


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [("llama-bpe", TikTokenConverter("").pattern), ("qwen2", PRETOKENIZE_REGEX)],
)
def test_words_are_split_as_transformers_own_tokenizers_do(kind: str, pattern: str) -> None:
    own, theirs = (
        pre_tokenizers.Split(Regex(one), "isolated").pre_tokenize_str(TEXT)
        for one in (WORDS[kind][0], pattern)
    )
    assert own == theirs
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ours = [pre_tokenizers.Split(Regex(GPT2), "isolated"), bytes_of]
    assert pre_tokenizers.Sequence(ours).pre_tokenize_str(TEXT) == pre_tokenizers.ByteLevel(
        add_prefix_space=False
    ).pre_tokenize_str(TEXT)


def test_each_kind_splits_numbers_in_its_own_way(write: Write) -> None:
    def words(kind: str) -> list[str]:
        tokenizer, warnings = tokenizer_of(GgufFile(write(tokenizer_pre=kind)), RunConfig())
        assert [kind in one for one in warnings] == [True] * (kind == "mine")
        split = tokenizer.backend_tokenizer.pre_tokenizer
        return [word for word, _ in split.pre_tokenize_str("a 12345")]

    assert words("smollm") == ["a", "Ġ", "1", "2", "3", "4", "5"]
    assert words("qwen2") == ["a", "Ġ", "1", "2", "3", "4", "5"]
    assert words("llama-bpe") == ["a", "Ġ", "123", "45"]
    assert words("tekken") == ["a", "Ġ", "1", "2", "3", "4", "5"]
    assert words("mine") == ["a", "Ġ12345"]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"architecture": "mamba7"}, "'mamba7'"),
        ({"architecture": "t5"}, "'t5'"),
        ({"chat_template": None}, "no chat template"),
        ({"chat_template": "{% for %}"}, "template has an error"),
        ({"chat_template": "{{ raise_exception('no') }}"}, "template has an error: no;"),
        ({"token_list": ["a"] * 2000, "token_types": [1] * 2000}, "2000 tokens"),
        ({"vocab_size": 12}, "its metadata say 12"),
        ({"tensors": {"output.weight": np.zeros((9, 64), np.float32)}}, "its head 9"),
        ({"tensors": {"token_embd.weight": None}}, "not a language model"),
        ({"tensors": {"blk.1.ffn_up.weight": None}}, "1 weights are missing"),
        ({"tensors": {"output_norm.weight": np.full(64, np.nan, np.float32)}}, "not finite"),
        ({"token_merges": ["zz yy"]}, "tokenizer is damaged"),
        ({"tokenizer_model": "rwkv"}, "tokenizer"),
    ],
)
def test_a_file_that_cannot_be_trained_is_one_sentence_and_leaves_nothing(
    write: Write, tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(PolicyError, match=message) as caught:
        import_gguf(GgufFile(write(**metadata)), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_a_part_of_a_file_is_refused_wherever_it_ends(write: Write) -> None:
    whole = write().read_bytes()
    for hundredth in range(0, 100, 4):
        part = write().with_name("part.gguf")
        part.write_bytes(whole[: len(whole) * hundredth // 100])
        with pytest.raises(PolicyError, match="it is incomplete"):
            GgufFile(part)


def test_the_target_must_be_free_and_have_room(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = GgufFile(write())
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        import_gguf(file, tmp_path / "used")
    usage = type(shutil.disk_usage(tmp_path))(1, 1, 100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match=r"needs .* GiB, and .* or --dtype bfloat16"):
        import_gguf(file, tmp_path / "new" / "out", dtype="float32")
    assert not (tmp_path / "new").exists()


def test_a_source_is_a_file_a_folder_or_a_package(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write()
    assert find(str(file)) == find(str(tmp_path)) == file
    package = tmp_path / "site" / "llm_mine-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-mine\nVersion: 1\n")
    (package / "RECORD").write_text("mine/m.gguf,,\nmine/__init__.py,,\n")
    monkeypatch.syspath_prepend(package.parent)
    assert find("llm-mine") == package.parent / "mine" / "m.gguf"
    with pytest.raises(ConfigError, match="no package of this name is installed"):
        find("llm-other")
    with pytest.raises(ConfigError, match=r"no \.gguf file"):
        find(str(package))
    shutil.copy(file, tmp_path / "two.gguf")
    with pytest.raises(ConfigError, match=r"has 2 \.gguf files"):
        find(str(tmp_path))


def test_without_the_package_the_extra_is_named(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[gguf\]'"):
        GgufFile(file)


@pytest.mark.parametrize(
    ("named", "settings"),
    [
        ("policy.model", '[policy]\nmodel = "tiny.gguf"'),
        ("policy.model", '[policy]\nmodel = "."'),
        ("policies.a.model", '[policies.a]\nroles = ["x"]\nmodel = "tiny.gguf"'),
    ],
)
def test_a_run_on_a_gguf_file_names_the_command(write: Write, named: str, settings: str) -> None:
    run_file = write().with_name("run.toml")
    agent = '[agent]\npath = "agent.py:agent"\n[verifier]\npath = "agent.py:verify"\n'
    run_file.write_text(f'{agent}[tasks]\ntrain = "t.jsonl"\n{settings}\n')
    result = CliRunner().invoke(cli, ["train", str(run_file), "--dry-run"])
    assert f"{named} = " in str(result.exception)
    assert f"agentrl model import {run_file.parent}" in str(result.exception)
    run_file.with_name("config.json").write_text("{}")  # a checkpoint that has the file as well
    result = CliRunner().invoke(cli, ["train", str(run_file), "--dry-run"])
    assert ("model import" in str(result.exception)) == ("tiny" in settings)


def test_a_vision_tower_beside_the_file_is_said_to_be_left_out(
    write: Write, tmp_path: Path
) -> None:
    file = GgufFile(write())
    (file.path.parent / "mmproj-tiny-f16.gguf").write_bytes(b"GGUF")
    said = import_gguf(file, tmp_path / "out").warnings
    (own,) = [one for one in said if "mmproj-tiny-f16.gguf is the vision tower" in one]
    assert "reads text only" in own
