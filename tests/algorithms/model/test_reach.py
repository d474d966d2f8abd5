"""The chosen template and format reach everything that renders or reads a policy's calls."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from agentrl.algorithms.engines.vllm import process, server
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.model.lora import LoraAdapters
from agentrl.algorithms.model.templates import templates
from agentrl.algorithms.model.tool_formats import TOOL_FORMAT, parser_of
from agentrl.algorithms.train.load_policies import load_policies
from agentrl.algorithms.train.serving import PolicyServers
from agentrl.core.config import resolve
from agentrl.core.errors import PolicyError
from agentrl.models.export import export_merged


def test_a_vllm_child_gets_the_parser_of_the_policys_format(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(server, "VllmProcess", lambda *_, **how: made.append(how))
    monkeypatch.setattr(server, "VllmServer", lambda *_, **__: None)
    monkeypatch.setattr(process, "check_installed", lambda: None)
    model, tokenizer = load_model(tiny_model_dir, device="cpu")

    def parser(**vllm: Any) -> str:
        engine = {"kind": "vllm", "vllm": vllm}
        config = resolve({"engine": engine, "output": str(tmp_path)}, source="test")
        server.vllm_server(config, model, tokenizer)
        return str(made[-1]["tool_format"])

    assert parser() == "hermes"
    tokenizer.init_kwargs[TOOL_FORMAT] = "llama3_json"
    assert parser() == "llama3_json"
    tokenizer.init_kwargs[TOOL_FORMAT] = "/home/me/mine.py:Shout"
    with pytest.raises(PolicyError, match=r"vLLM cannot read it; set engine.vllm.arguments"):
        parser()
    parser(arguments=["--tool-call-parser", "shout"])


def settings(folder: Path, model: Path, **more: Any) -> Any:
    policy = {"model": str(model), "device": "cpu", "chat_template": "chatml", **more.pop("p", {})}
    return resolve(
        {"root": str(folder), "output": str(folder / "out"), "policy": policy, **more},
        source="test",
    )


def test_an_exported_adapter_has_the_template_of_its_run(
    tiny_llama_dir: Path, tmp_path: Path
) -> None:
    (loaded,) = load_policies(settings(tmp_path, tiny_llama_dir, p={"lora": {"rank": 4}}))
    assert loaded.adapters is not None
    loaded.adapters.save("policy", tmp_path / "adapter")
    loaded.tokenizer.save_pretrained(tmp_path / "adapter")
    export_merged(tmp_path / "adapter", tmp_path / "merged")
    exported = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert exported.chat_template == templates()["chatml"].text
    assert exported.init_kwargs[TOOL_FORMAT] == "hermes"
    assert AutoTokenizer.from_pretrained(tiny_llama_dir).chat_template != exported.chat_template
    other = LoraAdapters(load_model(tiny_llama_dir, device="cpu")[0])  # saved without a tokenizer
    other.add("plain", rank=2, alpha=2, targets=("q_proj",), seed=0)
    other.save("plain", tmp_path / "plain")
    export_merged(tmp_path / "plain", tmp_path / "again")
    again = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again.chat_template == AutoTokenizer.from_pretrained(tiny_llama_dir).chat_template


def test_the_warm_up_imitates_in_the_chosen_template(tiny_llama_dir: Path, tmp_path: Path) -> None:
    shown = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
    (tmp_path / "shown.jsonl").write_text(json.dumps({"messages": shown}) + "\n")
    warmup = {"data": "shown.jsonl", "steps": 2, "batch": 1}
    (loaded,) = load_policies(settings(tmp_path, tiny_llama_dir, warmup=warmup))
    assert loaded.source == str(tmp_path / "out" / "warmup")
    saved = AutoTokenizer.from_pretrained(loaded.source)
    assert saved.chat_template == templates()["chatml"].text


def test_policies_that_share_a_model_share_its_template(
    tiny_llama_dir: Path, tmp_path: Path
) -> None:
    members = {name: {"roles": [name], "lora": {"rank": 2}} for name in ("first", "second")}
    (loaded,) = load_policies(settings(tmp_path, tiny_llama_dir, policies=members))
    assert loaded.tokenizer.chat_template == templates()["chatml"].text
    members["second"] = {
        "roles": ["second"],
        "model": str(tiny_llama_dir),
        "chat_template": "mistral",
    }
    with pytest.raises(
        PolicyError, match=r"policies.second: policy.chat_template = 'mistral': the mod"
    ):
        load_policies(settings(tmp_path, tiny_llama_dir, policies=members))


async def test_an_untrained_policy_is_served_with_its_own_template(
    tiny_llama_dir: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_llama_dir, bare)
    (bare / "chat_template.jinja").unlink()
    members = {
        "first": {"roles": ["x"], "lora": {"rank": 2}},
        "second": {"roles": ["y"], "model": str(bare), "chat_template": "chatml"},
    }
    config = settings(tmp_path, tiny_llama_dir, p={"chat_template": ""}, policies=members)
    servers = PolicyServers(config, load_policies(config))
    await servers.start()
    try:
        async with servers.updating():
            await servers.freeze("second@000000", bare, 0)
        assert "second@000000" in [row[0] for row in servers.table()]
    finally:
        await servers.close()


def test_a_checkpoint_of_the_run_needs_no_settings(tiny_llama_dir: Path, tmp_path: Path) -> None:
    (loaded,) = load_policies(settings(tmp_path, tiny_llama_dir))
    loaded.model.save_pretrained(tmp_path / "saved")
    loaded.tokenizer.init_kwargs[TOOL_FORMAT] = "qwen3_coder"
    loaded.tokenizer.save_pretrained(tmp_path / "saved")
    tokenizer = load_model(tmp_path / "saved", device="cpu")[1]
    assert tokenizer.chat_template == templates()["chatml"].text
    assert parser_of(tokenizer).__name__ == "Qwen3Coder"
