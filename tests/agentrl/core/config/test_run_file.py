from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentrl.core.config import RunConfig, differences, from_store, load, resolve, to_toml
from agentrl.core.errors import ConfigError
from tests.factories import Register


def run_file(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_defaults_and_overrides(tmp_path: Path) -> None:
    path = run_file(tmp_path, "seed = 3\n[algorithm]\nlr = 1e-5\n[sampling]\ntemperature = 0.8\n")
    config = load(path, ["algorithm.lr=1e-4", "steps=7", "policy.model=Qwen/Qwen2.5-0.5B"])
    assert (config.seed, config.steps, config.algorithm.lr) == (3, 7, 1e-4)
    assert config.sampling.temperature == 0.8
    assert config.policy.model == "Qwen/Qwen2.5-0.5B"
    assert config.name == tmp_path.name
    assert config.root == str(tmp_path)
    assert config.store.startswith("sqlite:////")


MISTAKES = [
    ("sed = 1", r"run\.toml: unknown key 'sed'; did you mean 'seed'\?"),
    (
        "[upstreams.judge]\nbase_url = 'http://x/v1'\nmodl = 'x'",
        r"'upstreams\.judge\.modl' in \[upstreams\.judge\]; did you mean 'model'\?",
    ),
    ("[upstreams.judge]\nbase_url = 'x'", r"upstreams"),
    ("[upstreams.judge]", r"either base_url, or text, the answer to every call .*upstreams"),
    ("[upstreams.judge]\nbase_url = 'http://x'\ntext = 'no'", r"either base_url, or text"),
    ("[upstreams.judge]\nmodel = 'x'\ntext = ''", r"key_env belong to a base_url"),
    ("[upstreams.policy]\nbase_url = 'http://x'", r"has the name of a policy"),
    ("[roles]\n'*' = 'policy'", r'roles\."\*" is for a run without a policy'),
    ("[roles]\ncritic = 'juge'", r"roles\.critic = 'juge'; valid: policy"),
    ("[algorithm]\nlrr = 1", r"'algorithm\.lrr' in \[algorithm\]; did you mean 'lr'\?"),
    ("[sampling]\ntemp = 1", r"'sampling\.temp' in \[sampling\]; valid: .*temperature"),
    ("[algorithm]\nlr = 'x'", r"algorithm\.lr"),
    ("[algorithm]\nlr = -1.0", r"algorithm\.lr"),
    ("[learner]\npacking = 'tree'", r"learner\.packing = 'tree'; did you mean 'trie'\?"),
    ("[policy]\ndtype = 'half'", r"policy\.dtype = 'half'; valid: bfloat16, float32"),
    (
        "[reward_models.judge]\nmodel = 'x'\nkind = 'scalr'",
        r"reward_models\.judge\.kind = 'scalr'; did you mean 'scalar'\?",
    ),
    ("[algorithm]\nlr = inf", r"algorithm\.lr = inf; it must be finite"),
    ("[sampling]\ntemperature = nan", r"sampling\.temperature = nan; it must be finite"),
    ("[sampling]\ntemperature = -1.0", r"sampling\.temperature = -1\.0; .* 0 \(greedy\)"),
    ("[sampling]\ntop_p = 2.0", r"sampling\.top_p = 2\.0; it must be above 0"),
    ("[sampling]\ntop_p = 0.0", r"sampling\.top_p = 0\.0; it must be above 0"),
    ("[sampling]\ntop_k = -1", r"sampling\.top_k = -1; it must be 0 \(no limit\)"),
    ("[metrics]\nsinks = ['mlflow', 'mlflow']", r"metrics\.sinks names 'mlflow' twice"),
    ("[sampling]\nmax_tokens = 0", r"sampling\.max_tokens = 0; it must be 1 or above"),
    ("[algorithm]\nmax_staleness = -1", r"algorithm\.max_staleness"),
    ("steps = 9\n[algorithm]\nmax_staleness = 10", r"max_staleness = 10 .* steps = 9"),
    ("[algorithm]\nasync_sampling = 'drained'", r"async_sampling = 'drained': .* set that too"),
    ("[algorithm]\ngroup_order = 'completed'", r"group_order = 'completed': .* set that too"),
    (
        "[algorithm]\nasync_sampling = 'none'\nmax_staleness = 1",
        r"async_sampling = 'none' .*max_staleness = 1 requests it; remove one",
    ),
    (
        "[algorithm]\ngroup_order = 'completed'\nmax_staleness = 1\nbranching = {kind = 'mc'}",
        r"group_order: with algorithm.branching or counterfactual, rollouts join a",
    ),
    ("[selfplay]\nopponents = 'latest'", r"selfplay\.seats is missing"),
    ("[[roles.match]]\nmodel = 'x'", r"roles\.match\[0\]\.role is missing"),
    ("[runner]\nexecutor = 'container'", r"runner\.container\.image is missing"),
    ("[data]\nname = 'likes'\n[algorithm]\ngroup_size = 4", r"has no effect in a run on \[data\]"),
    ("steps = 1.5", r"steps"),
    ("name = 'a/b'", r"name"),
    ("steps = ", r"not a readable TOML file"),
]
WRONG_OVERRIDES = [
    ("", ["algorithm.min_lr=1e-7"], r"algorithm\.min_lr: a constant"),
    (
        "",
        ["algorithm.schedule=cosine", "algorithm.min_lr=1"],
        r"algorithm\.min_lr: it is above algorithm\.lr = 1e-06",
    ),
    ("", ["steps"], r"override 'steps': write it as key\.sub=value"),
    ("steps = 1", ["steps.x=1"], r"'steps' is a value, not a table"),
    ("", ["nothing.x=1"], r"unknown key 'nothing'"),
]


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [*((text, [], message) for text, message in MISTAKES), *WRONG_OVERRIDES],
)
def test_every_mistake_is_one_sentence(
    tmp_path: Path, text: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(run_file(tmp_path, text), overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("size", "least"), [(1, 1), (2, 2), (8, 2)])
def test_one_rollout_is_a_group_only_where_it_is_alone(
    tmp_path: Path, size: int, least: int
) -> None:
    config = load(run_file(tmp_path, f"[algorithm]\ngroup_size = {size}\n"))
    assert config.algorithm.min_group == least


def test_a_limit_may_be_infinite(tmp_path: Path) -> None:
    text = "[critic]\nmodel = 'shared'\nclip = inf\n[algorithm.options]\ncap = inf\n"
    assert load(run_file(tmp_path, text)).critic.clip == float("inf")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such run file"):
        load(tmp_path / "none.toml")


def test_printed_settings_read_back_the_same(tmp_path: Path) -> None:
    config = load(run_file(tmp_path, 'name = "x"\n[algorithm.options]\nclip_low = 0.1\n'))
    again = load(run_file(tmp_path, to_toml(config)))
    assert again == config


def test_settings_of_vllm_are_refused_without_it() -> None:
    tables = {"kind": "vllm", "vllm": {"key_env": "KEY", "arguments": ["--seed", "1"]}}
    assert resolve({"engine": tables}, source="test").engine.vllm.key_env == "KEY"
    with pytest.raises(ConfigError, match=r"test: engine\.vllm\.key_env is for engine\.kind = 'v"):
        resolve({"engine": tables | {"kind": "embedded"}}, source="test")


def test_settings_of_a_vllm_child_are_refused_for_servers_that_run_already() -> None:
    vllm = {"urls": ["http://127.0.0.1:8000"], "key_env": "KEY"}
    resolve({"engine": {"kind": "vllm", "vllm": vllm}}, source="test")
    for name, value in {"arguments": ["--seed", "1"], "gpu_memory": 0.5}.items():
        tables = {"kind": "vllm", "vllm": vllm | {name: value}}
        with pytest.raises(ConfigError, match=rf"engine\.vllm\.{name} is for a vLLM child"):
            resolve({"engine": tables}, source="test")
    tables = {"kind": "vllm", "vllm": {"urls": ["localhost:8000"]}}
    with pytest.raises(ConfigError, match=r"engine\.vllm\.urls = 'localhost:8000': .*http://"):
        resolve({"engine": tables}, source="test")


def test_differences_name_what_changes_learning_only() -> None:
    old = resolve({"seed": 0, "steps": 5}, source="test")
    new = resolve({"seed": 1, "steps": 9, "runner": {"concurrency": 2}}, source="test")
    assert differences(old, new) == ["seed: 0 -> 1"]
    assert differences(old, old) == []


def test_a_run_may_go_on_with_another_learner() -> None:
    learner = {"kind": "verl", "verl": {"nodes": 2}}
    old, new = resolve({}, source="test"), resolve({"learner": learner}, source="test")
    assert differences(old, new) == []
    new = resolve({"learner": {"optimizer": "adamw8bit"}}, source="test")
    assert differences(old, new) == ["learner.optimizer: 'adamw' -> 'adamw8bit'"]
    assert isinstance(old, RunConfig)


def test_upstreams_and_roles_survive_the_dry_run(tmp_path: Path) -> None:
    text = '[upstreams.judge]\nbase_url = "https://x/v1"\nkey_env = "K"\n'
    text += '[roles]\n"the critic" = "judge"\n'
    config = load(run_file(tmp_path, text))
    assert config.upstreams["judge"].key_env == "K"
    assert config.roles == {"the critic": "judge"}
    printed = run_file(tmp_path, to_toml(config))  # with the name that it has from its folder
    assert load(printed) == msgspec.structs.replace(config, file="")


def test_a_schedule_has_a_floor(tmp_path: Path) -> None:
    load(run_file(tmp_path, ""), ["algorithm.schedule=linear", "algorithm.min_lr=1e-7"])


@pytest.mark.parametrize(
    ("section", "field", "message"),
    [
        ("engine", "kind", r"engine\.kind = 'vlm'; did you mean 'vllm'\?"),
        ("learner", "kind", r"learner\.kind = 'vlm'; valid: torch, verl"),
        ("runner", "executor", r"runner\.executor = 'vlm'; valid: async, auto, command,"),
    ],
)
def test_kinds_from_outside_have_free_options(
    tmp_path: Path, section: str, field: str, message: str
) -> None:
    table = {field: "mine.py:Own", "options": {"cap": float("inf"), "deep": {"x": 1}}}
    config = resolve({"root": str(tmp_path), section: table}, source="test")
    made = getattr(config, section)
    assert (getattr(made, field), made.options) == ("mine.py:Own", table["options"])
    printed = to_toml(config)
    assert f'{field} = "mine.py:Own"\n' in printed
    assert load(run_file(tmp_path, printed)) == config
    assert from_store(msgspec.to_builtins(config)) == config
    with pytest.raises(ConfigError, match=message):
        resolve({section: {field: "vlm"}}, source="test")
    with pytest.raises(
        ConfigError, match=rf"{section}\.options\.x is for {section}\.{field} = 'file"
    ):
        resolve({section: {"options": {"x": 1}}}, source="test")


def test_a_kind_that_a_package_registers(register: Register) -> None:
    register("agentrl.engines", "mine", "mine:Own")
    assert resolve({"engine": {"kind": "mine"}}, source="test").engine.kind == "mine"
    with pytest.raises(ConfigError, match=r"learner\.kind = 'mine'"):
        resolve({"learner": {"kind": "mine"}}, source="test")


def test_settings_of_other_kinds_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    """As a run file has them that `--dry-run` of an earlier version printed."""
    text = "[engine]\nkind = 'embedded'\n[engine.vllm]\ngpu_memory = 0.0\nurls = []\n"
    text += (
        "[learner.verl]\nnodes = 1\n[runner.pool]\nprocesses = 0\n[runner.kubernetes]\nimage=''\n"
    )
    assert load(run_file(tmp_path, text)).engine == RunConfig().engine
    with pytest.raises(ConfigError, match=r"runner\.pool\.processes is for runner\.executor = 'po"):
        load(run_file(tmp_path, text), ["runner.pool.processes=2"])


def test_stored_settings_are_read_as_they_were() -> None:
    config = resolve({"seed": 4, "runner": {"executor": "threads"}}, source="test")
    stored = msgspec.to_builtins(config)
    assert from_store(stored) == config
    with pytest.raises(ConfigError, match="unknown key 'sead'"):
        from_store(stored | {"sead": 1})


def test_sinks_from_outside_are_named_by_file() -> None:
    sinks = ["mine.py:write"]
    assert resolve({"metrics": {"sinks": sinks}}, source="test").metrics.sinks == sinks
    with pytest.raises(ConfigError, match=r"metrics\.sinks: 'mlflo'; did you mean 'mlflow'\?"):
        resolve({"metrics": {"sinks": ["mlflo"]}}, source="test")


def test_pairs_of_numbers_and_any_text_survive_the_dry_run(tmp_path: Path) -> None:
    judge = {"upstream": "big", "max_usd": 2.0, "prices": [0.5, 1.5]}
    tables: dict[str, Any] = {"judges": {"good": judge}, "agent": {"env": {"A\x7f": "b\x7f\u2028"}}}
    tables["upstreams"] = {"big": {"base_url": "https://x/v1"}}
    config = resolve(tables | {"root": str(tmp_path)}, source="test")
    assert load(run_file(tmp_path, to_toml(config))) == config
