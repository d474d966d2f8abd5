"""The manifests of examples/deploy: what they start exists, and their parts fit together.

No container is started: neither a Docker daemon nor a Kubernetes API server runs here."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import pytest
import yaml

from agentrl.cli.main import cli
from agentrl.core.config import RunConfig, load
from agentrl.core.config.infrastructure import VllmEngineConfig
from agentrl.store.http.keys import Keys

DEPLOY = Path(__file__).parents[2] / "examples/deploy"
AGENT = DEPLOY.parent / "openai_sdk"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
OBJECTS: list[dict[str, Any]] = [
    each
    for file in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for each in yaml.safe_load_all(file.read_text())
]
SECRET = {"keys", "admin", "runner", "policy", "vllm"}  # as the how-to makes it
EXTRAS = {"agentrl": {"store", "runner"}, "agentrl-gpu": {"train"}}  # commands of each image


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    return [each for each in OBJECTS if each["kind"] in kinds]


def pods() -> dict[str, dict[str, Any]]:
    """Pod templates by the label that Services select."""
    made = of_kind("Deployment", "Job")
    return {
        each["spec"]["template"]["metadata"]["labels"]["app"]: each["spec"]["template"]["spec"]
        for each in made
    }


def containers() -> Iterator[tuple[str, dict[str, Any]]]:
    """What both ways start, as (name, image, entrypoint, arguments, environment)."""
    for name, service in COMPOSE["services"].items():
        entry, env = service.get("entrypoint", ["agentrl"]), service.get("environment", {})
        yield (
            f"compose {name}",
            {**service, "entry": entry, "given": service["command"], "env": env},
        )
    for name, pod in pods().items():
        (own,) = pod["containers"]
        env = {each["name"]: each.get("value") for each in own.get("env", [])}
        entry = own.get("command", ["agentrl"])
        yield f"kubernetes {name}", {**own, "entry": entry, "given": own["args"], "env": env}


CONTAINERS = dict(containers())


def parse(arguments: list[str]) -> click.Context:
    """Raises UsageError for a command or option that agentrl lacks."""
    command: click.Command = cli
    context = click.Context(cli, info_name="agentrl")
    while isinstance(command, click.Group):
        _, found, arguments = command.resolve_command(context, arguments)
        assert found is not None
        command = found
    return command.make_context("agentrl", list(arguments), parent=context)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """The run file where both ways have it: in the agent's folder."""
    folder = tmp_path_factory.mktemp("run")
    shutil.copytree(AGENT, folder, dirs_exist_ok=True)
    shutil.copy(DEPLOY / "run.toml", folder)
    return load(folder / "run.toml", [])


@pytest.mark.parametrize("name", CONTAINERS)
def test_what_is_started_is_a_command_with_such_options(name: str, tmp_path: Path) -> None:
    made = CONTAINERS[name]
    if made["entry"] != ["agentrl"]:
        assert (made["entry"], made["image"]) == (["vllm", "serve"], "agentrl-gpu")
        return
    # Files of the container stand for themselves here.
    (tmp_path / "keys").write_text("")
    places = {"/keys": f"{tmp_path}/keys", "/keys/keys": f"{tmp_path}/keys"}
    places |= {"/run/agentrl": str(tmp_path)}
    context = parse([places.get(word, word) for word in made["given"]])
    assert made["given"][0] in EXTRAS[made["image"]]
    if "run" in context.params:
        assert context.params["run"] == "guess"


def test_the_run_file_fits_what_is_started(run: RunConfig) -> None:
    assert run.name == "guess"
    assert isinstance(run.engine, VllmEngineConfig)
    store, (vllm,) = urlsplit(run.store), run.engine.vllm.urls
    assert run.engine.vllm.key_env in CONTAINERS["compose vllm"]["env"]
    ports = {"store": store.port, "vllm": urlsplit(vllm).port, "training": run.engine.port}
    for name, port in ports.items():
        assert name in COMPOSE["services"]
        (service,) = [each for each in of_kind("Service") if each["metadata"]["name"] == name]
        assert [each["port"] for each in service["spec"]["ports"]] == [port]
        (own,) = pods()[service["spec"]["selector"]["app"]]["containers"]
        assert own["ports"] == [{"containerPort": port}]
    assert (store.hostname, run.engine.advertise) == ("store", "training")


@pytest.mark.parametrize("way", ["compose", "kubernetes"])
def test_every_key_that_the_run_asks_for_is_given(run: RunConfig, way: str) -> None:
    assert isinstance(run.engine, VllmEngineConfig)
    training, runner = (CONTAINERS[f"{way} {name}"]["env"] for name in ("training", "runner"))
    both = {"AGENTRL_STORE_KEY", run.engine.key_env}
    assert both == set(runner)
    assert both | {run.engine.vllm.key_env} <= set(training)


def test_parts_that_manifests_name_exist() -> None:
    claims = {each["metadata"]["name"] for each in of_kind("PersistentVolumeClaim")}
    for pod in pods().values():
        named = {each["name"] for each in pod.get("volumes", [])}
        for container in pod["containers"]:
            assert {each["name"] for each in container.get("volumeMounts", [])} <= named
            for each in container.get("env", []):
                if source := each.get("valueFrom"):
                    assert source["secretKeyRef"]["name"] == "agentrl"
                    assert source["secretKeyRef"]["key"] in SECRET
        for volume in pod.get("volumes", []):
            if claim := volume.get("persistentVolumeClaim"):
                assert claim["claimName"] in claims
            assert volume.get("secret", {"secretName": "agentrl"})["secretName"] == "agentrl"
            assert volume.get("configMap", {"name": "run"})["name"] == "run"
    for each in of_kind("Deployment"):
        wanted = each["spec"]["selector"]["matchLabels"]
        assert wanted == each["spec"]["template"]["metadata"]["labels"]
    for service in COMPOSE["services"].values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            known = source in COMPOSE["volumes"] or (DEPLOY / source).exists()
            assert known or source == "./keys", mount
        assert set(service.get("networks", [])) <= {"default", *COMPOSE["networks"]}
        assert set(service.get("depends_on", [])) <= set(COMPOSE["services"])


def test_the_guide_makes_the_secret_and_the_files_that_manifests_read() -> None:
    guide = (DEPLOY.parents[1] / "docs/how-to/many-machines.md").read_text()
    made = set(re.findall(r"--from-literal=(\w+)=", guide)) | set(
        re.findall(r"generic agentrl --from-file=(\w+)", guide)
    )
    assert made == SECRET
    files = {Path(each).name for each in re.findall(r"--from-file=(\S+\.\w+)", guide)}
    assert files == {"run.toml", "agent.py", "tasks.py", "verifier.py"}
    example = (DEPLOY / "keys.example").read_text()
    Keys.parse(example.replace("REPLACE_ME_WITH_48_HEX_DIGITS_", ""), "keys.example")
