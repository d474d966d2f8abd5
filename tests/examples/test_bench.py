"""The tasks of the learning benchmark: their known scores, and one small run of the bench file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentrl.core.config.derived import check_presets
from agentrl.core.loading import load_attribute, load_tasks
from agentrl.runners.games import Game, _solved
from tests import warm
from tests.benchmarks.bench import BenchPlan, read_bench
from tests.examples.parts import EXAMPLES, modules

FILE = EXAMPLES / "bench" / "bench.toml"
BENCH = read_bench(FILE)
PLAN = BenchPlan(BENCH, FILE, Path("work"), {})
OWN = [n for n, task in BENCH.tasks.items() if task.run == "run.toml" and not task.measure]
TASKS = (
    "chain",
    "crew",
    "edit",
    "frozenlake",
    "ledger",
    "lengths",
    "needle",
    "poker",
    "repairs",
    "retry",
    "seek",
    "shop",
    "sokoban",
    "teams",
    "ways",
)
ROLLOUTS = 400


@pytest.fixture(scope="module")
def parts() -> Iterator[dict[str, ModuleType]]:
    with modules("bench", "policies", *TASKS) as found:
        yield found


Play = Callable[[str, str], tuple[float, set[str]]]


@pytest.fixture(scope="module")
def played(parts: dict[str, ModuleType]) -> Play:
    """The mean outcome of a task's best player, or of one that does anything possible, and the
    models that its agent asked."""
    return cache(partial(play, parts))


def play(parts: dict[str, ModuleType], name: str, player: str) -> tuple[float, set[str]]:
    config = PLAN.piece((name, BENCH.presets_of(name)[0]), 1e-3, 0).config
    root = Path(config.root)
    agent, verify = (
        load_attribute(path, root, key="") for path in (config.agent.path, config.verifier.path)
    )
    best = load_attribute(f"{config.agent.path.partition(':')[0]}:best", root, key="")
    heldout = load_tasks(config.tasks.heldout, root, key="")
    tasks = [heldout[n % len(heldout)] for n in range(ROLLOUTS)]
    chosen = best if player == "best" else parts["policies"].anything
    asked = set[str]()
    scripted = parts["policies"].Scripted
    complete = scripted.complete

    async def noted(self: Any, model: str, *more: Any) -> Any:
        asked.add(model)
        return await complete(self, model, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scripted, "complete", noted)
        results, _ = parts["policies"].play(agent, chosen, [task["input"] for task in tasks])
    given: list[dict[str, Any]] = [
        {"task": t, "result": r} for t, r in zip(tasks, results, strict=True)
    ]
    needed = verify.__code__.co_varnames[: verify.__code__.co_argcount]
    return sum(verify(**{key: one[key] for key in needed}) for one in given) / ROLLOUTS, asked


@pytest.mark.parametrize("name", OWN)
def test_the_best_and_the_random_score_are_known(played: Play, name: str) -> None:
    task = BENCH.tasks[name]
    luck = 0.09 if name == "frozenlake" else 0.0  # elsewhere the best player always wins
    assert played(name, "best")[0] == pytest.approx(task.best, abs=luck)
    chance = 0.09 * max(1.0, task.best - task.random)
    assert played(name, "random")[0] == pytest.approx(task.random, abs=chance)
    assert task.random < task.best


@pytest.mark.parametrize("name", OWN)
def test_roles_that_agents_ask_for_are_known(played: Play, name: str) -> None:
    """A model name is a role where the run knows it, and else every call is of "agent"."""
    _, asked = played(name, "best")
    roles = PLAN.piece((name, BENCH.presets_of(name)[0]), 1e-3, 0).config.roles
    assert asked == (set(roles) or {"policy"})


def test_scores_that_are_computed_are_those_of_the_bench_file(parts: dict[str, ModuleType]) -> None:
    tasks = BENCH.tasks
    for boxes in (1, 2):
        known = parts["sokoban"].random_score(boxes)
        assert tasks[f"sokoban-{boxes}"].random == pytest.approx(known, abs=1e-4)
    for k in (2, 4, 8):
        assert tasks[f"chain-{k}"].random == pytest.approx(4.0**-k, rel=1e-2)
    assert tasks["frozenlake"].best == pytest.approx(parts["frozenlake"].BEST, abs=1e-4)
    assert tasks["frozenlake"].random == pytest.approx(parts["frozenlake"].RANDOM, abs=1e-4)
    assert tasks["shop"].random == pytest.approx(parts["shop"].RANDOM, abs=1e-4)
    for name in ("bank", "doors", "ledger", "tower"):
        assert tasks[name].random == pytest.approx(parts["ways"].random_score(name), abs=1e-4)
    assert tasks["retry"].random == pytest.approx(parts["retry"].random_score(), abs=1e-4)
    for name in ("crew", "lengths", "seek"):
        assert tasks[name].random == pytest.approx(parts[name].RANDOM, abs=1e-4)
    assert tasks["workers"].random == pytest.approx(parts["teams"].RANDOM_WORKERS, abs=1e-4)


@pytest.mark.parametrize(("name", "prompts"), [("kuhn", 12), ("leduc", 288)])
def test_poker_players_see_all_that_matters(
    parts: dict[str, ModuleType], name: str, prompts: int
) -> None:
    """As many prompts as there are information states but for suits, and the uniform policy's
    exploitability."""
    pytest.importorskip("pyspiel")
    from open_spiel.python.algorithms.exploitability import exploitability
    from open_spiel.python.policy import TabularPolicy

    poker = parts["poker"]
    rules = Game(f"{name}_poker")
    policy = TabularPolicy(rules.rules)
    views = [rules.view(state, state.current_player()) for state in policy.states]
    assert len({poker.describe(view)[0]["content"] for view in views}) == prompts
    uniform = -exploitability(rules.rules, policy)
    assert BENCH.tasks[name].random == pytest.approx(uniform, abs=1e-5)
    assert len(getattr(poker, name)()) == {"kuhn": 6, "leduc": 120}[name]


def test_random_moves_seldom_hold_against_the_perfect_player() -> None:
    pytest.importorskip("pyspiel")
    game, known = Game("tic_tac_toe"), dict[tuple[str, int], float]()
    best = _solved(str(game.rules))

    def held(state: Any, learner: int) -> float:
        """The chance not to lose."""
        if state.is_terminal():
            return float(state.returns()[learner] >= 0)
        if (key := (str(state), learner)) not in known:
            mine = state.current_player() == learner
            moves = state.legal_actions() if mine else best(state)
            known[key] = sum(held(state.child(move), learner) for move in moves) / len(moves)
        return known[key]

    chance = sum(held(game.start(), learner) for learner in (0, 1)) / 2
    assert BENCH.tasks["tictactoe"].random == pytest.approx(chance, abs=1e-4)


def test_every_preset_of_every_task_is_a_run() -> None:
    for task in BENCH.tasks:
        for preset in BENCH.presets_of(task):
            config = PLAN.piece((task, preset), BENCH.lrs[0], BENCH.seeds[0]).config
            check_presets(config)
            played = config.algorithm.groups * config.algorithm.group_size
            budget = BENCH.tasks[task].rollouts or BENCH.rollouts
            spent = config.steps * played * BENCH.presets[preset].cost
            assert 0.9 * budget < spent <= budget, (task, preset)


def test_process_rewards_are_right_noisy_or_misleading(parts: dict[str, ModuleType]) -> None:
    chain = parts["chain"]
    (task,) = chain.tasks(8, ["Ada"], 1)[:1]
    way = chain.right_way(task["input"])

    def paid(kind: str, rollout: str = "r") -> list[float]:
        calls = [
            type("Call", (), {"id": str(n), "answer": {"tool_calls": [
                {"function": {"arguments": json.dumps({"exit": exit})}}]}})
            for n, exit in enumerate(way)
        ]  # fmt: skip
        about = type("Trace", (), {"transitions": calls, "rollout": type("R", (), {"id": rollout})})
        return [row.value for row in getattr(chain, f"process_{kind}")(task, about)]

    assert paid("right") == [1.0] * 8
    assert paid("misleading") == [0.0] * 8
    noisy = [value for n in range(100) for value in paid("noisy", str(n))]
    assert sum(noisy) / len(noisy) == pytest.approx(1 - chain.NOISE, abs=0.06)


def bench_file(folder: Path, text: str) -> Path:
    """A copy of the bench file with other numbers, and its run files where they are."""
    file = folder / "bench.toml"
    file.write_text(text.replace('run = "', f'run = "{FILE.parent}/'))
    return file


def bench(file: Path, *options: str) -> str:
    command = ["-m", "tests.benchmarks.bench_runs", str(file)]
    command += ["--results", str(file.with_suffix(".jsonl"))]
    ran = warm.run(*command, *options, cwd=file.parent, timeout=850)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_a_bench_is_run_once_and_goes_on(tiny_model_dir: Path, tmp_path: Path) -> None:
    text = f"""
    baseline = "broadcast"
    rollouts = 8
    evaluations = 1
    heldout = 2
    seeds = [0]
    tuning_seeds = [100]
    lrs = [1e-3, 2e-3]
    tasks.chain.run = "run.toml"
    tasks.chain.settings = ["policy.build=", "policy.model={tiny_model_dir}",
        "tasks.train=chain.py:train2", "tasks.heldout=chain.py:heldout2",
        "algorithm.groups=1", "algorithm.group_size=4"]
    tasks.chain.presets = ["broadcast"]
    tasks.measured.run = "run.toml"
    tasks.measured.settings = ["policy.build=", "policy.model={tiny_model_dir}", "tasks.heldout=",
        "algorithm.groups=1", "algorithm.group_size=4"]
    tasks.measured.measure = "{tmp_path}/measure.py:version"
    tasks.measured.presets = ["fixed"]
    tasks.measured.lrs = [1e-3]
    presets.broadcast.settings = ["algorithm.preset=grpo"]
    presets.fixed.settings = ["algorithm.preset=grpo"]
    """
    (tmp_path / "measure.py").write_text(
        "def version(folder):\n    known = folder.parent.name == 'checkpoints'\n"
        "    return float(folder.name[:6]) if known else 0.0\n"
    )
    file = bench_file(tmp_path, text)
    assert "4 results" in bench(file)
    rows = [json.loads(line) for line in file.with_suffix(".jsonl").read_text().splitlines()]
    of_chain = [(1e-3, 100), (2e-3, 100), (1e-3, 0)]
    assert [(row["lr"], row["seed"]) for row in rows] == [*of_chain, (1e-3, 0)]
    assert rows[-1]["curve"] == [[0, 0.0], [8, 2.0]]  # the checkpoint after two steps
    for row in rows:
        assert [spent for spent, _ in row["curve"]] == [0, 8]
        assert row["failed"] == 0
    assert not list(tmp_path.glob("runs/bench/*"))  # nothing is left of them
    lines = file.with_suffix(".jsonl").read_bytes()
    file.with_suffix(".jsonl").write_bytes(lines[:-20])  # killed as it wrote the last line
    assert bench(file).count("seed") == 1
    assert bench(file).count("seed") == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_small_bench_learns(tmp_path: Path) -> None:
    """What continuous integration runs of the benchmark."""
    text = FILE.read_text().replace("rollouts = 768", "rollouts = 384")
    text = text.replace("lrs = [1e-3, 2e-3]", "lrs = [2e-3]")
    text = text.replace("evaluations = 8", "evaluations = 1")
    file = bench_file(tmp_path, text)
    bench(file, "--tasks", "chain-4", "--presets", "broadcast,batch-td", "--seeds", "0")
    rows = [json.loads(line) for line in file.with_suffix(".jsonl").read_text().splitlines()]
    assert [row["preset"] for row in rows] == ["broadcast", "batch-td"]
    for row in rows:
        assert row["curve"][-1][1] > row["curve"][0][1] + 0.15
