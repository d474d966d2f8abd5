"""`agentrl export model --push`, against a hub of the test's own."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agentrl.algorithms.train.checkpoint import save_checkpoint
from agentrl.cli.main import cli
from agentrl.core.errors import AgentRLError
from agentrl.models.export import push


class Hub(ThreadingHTTPServer):
    """What `huggingface_hub` asks for when a folder is uploaded, with every file in the commit."""

    def __init__(self) -> None:
        self.repos: dict[str, bool] = {}  # by name: whether it is private
        self.files: dict[str, bytes] = {}
        super().__init__(("127.0.0.1", 0), Request)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Request(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("authorization") != "Bearer hf_mine":
            return self.answer({"error": "who are you"}, 401)
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization', 'me')}/{asked['name']}"
            self.server.repos[name] = asked.get("visibility") == "private"
            return self.answer({"url": f"{self.server.url}/{name}"})
        if "/preupload/" in self.path:
            files = [file["path"] for file in json.loads(body)["files"]]
            mode = {"uploadMode": "regular", "shouldIgnore": False}
            return self.answer({"files": [{"path": path, **mode} for path in files]})
        if "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    value = line["value"]
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
            return self.answer(
                {"commitUrl": f"{self.server.url}/me/mine/commit/1", "commitOid": "1" * 40}
            )
        return self.answer({"errors": [], "warnings": []})  # of the model card

    def answer(self, content: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *given: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


class Weights:
    """A learner that saves a file of weights."""

    def save(self, directory: Path) -> None:
        import torch
        from safetensors.torch import save_file

        save_file({"w": torch.ones(2)}, directory / "model.safetensors")
        (directory / "config.json").write_text("{}")
        (directory / "optimizer.safetensors").write_bytes(b"moments")

    def load(self, directory: Path) -> None: ...


def test_a_policy_is_uploaded_without_what_only_the_run_needs(hub: Hub, tmp_path: Path) -> None:
    checkpoint, target = tmp_path / "checkpoints" / "000003", tmp_path / "out"
    save_checkpoint(checkpoint, Weights(), {})
    words = ["export", "model", str(checkpoint), "--to", str(target), "--push", "me/mine"]
    result = CliRunner().invoke(cli, [*words, "--private"], catch_exceptions=False)
    assert result.output.endswith(f"uploaded it to {hub.url}/me/mine\n")
    assert hub.repos == {"me/mine": True}
    assert hub.files.keys() == {"README.md", "config.json", "model.safetensors"}
    assert hub.files["model.safetensors"] == (target / "model.safetensors").read_bytes()
    assert b"library_name: transformers" in hub.files["README.md"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"HF_TOKEN": "hf_wrong"}, "401"),
        ({"offline": True}, "unset HF_HUB_OFFLINE"),
        ({"repo": "a/b/c"}, "hf upload a/b/c"),
    ],
)
def test_what_the_hub_does_not_take_is_one_sentence(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", setting.get("HF_TOKEN", "hf_mine"))
    if setting.get("offline"):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("huggingface_hub.utils._http._GLOBAL_CLIENT", None)
    with pytest.raises(AgentRLError, match=message) as caught:
        push(tmp_path, setting.get("repo", "me/mine"), private=False)
    assert f"{tmp_path} is written" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert hub.files == {}
