"""What the learning benchmark makes of the curves of its runs."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import msgspec
import numpy as np
import pytest

from agentrl.core.errors import ConfigError
from tests.benchmarks.bench import (
    Bench,
    BenchPlan,
    BenchPreset,
    BenchTask,
    Piece,
    Result,
    read_bench,
)
from tests.benchmarks.bench_runs import read_results
from tests.benchmarks.learning import (
    CREDIT,
    FILE,
    RESULTS,
    bootstrap,
    figure,
    finite,
    headline,
    interquartile_mean,
    markdown,
    missing,
    never_worse,
    on_grid,
    page,
    reached,
    rollouts_ratio,
    summarise,
    with_results,
)  # fmt: skip

BUDGET = 1000.0


def line(slope: float, seeds: int = 5) -> np.ndarray:
    """Curves [seeds, 11] that rise to at most 1, each a little above the one before."""
    rise = np.minimum(slope * np.linspace(0, 1, 11), 1.0)
    return np.stack([rise + 0.001 * seed for seed in range(seeds)])


def test_the_middle_half_is_the_mean() -> None:
    assert interquartile_mean(np.array([100.0, 1.0, 2.0, 3.0, -50.0])) == pytest.approx(2.0)
    assert interquartile_mean(np.array([0.0, 1.0, 5.0])) == pytest.approx(2.0)  # too few to cut


def test_a_level_is_reached_between_evaluations() -> None:
    curve = np.array([0.0, 0.0, 1.0, 0.5, 1.0])
    assert reached(curve, 0.5, BUDGET) == pytest.approx(375)
    assert reached(curve, 0.0, BUDGET) == 0
    assert reached(curve, 1.1, BUDGET) == inf


def test_twice_as_fast_is_half_of_the_rollouts() -> None:
    ratio, low, high = rollouts_ratio(line(2.0), line(1.0), 0.9, BUDGET)
    assert ratio == pytest.approx(0.5, abs=0.01)
    assert low <= ratio <= high < 0.6
    assert rollouts_ratio(line(0.1), line(1.0), 0.9, BUDGET) == [inf, inf, inf]
    assert rollouts_ratio(line(1.0), line(1.0), 1.0, BUDGET) == [1.0, 1.0, 1.0]


def test_one_seed_has_no_interval_and_noise_has_a_wide_one() -> None:
    assert bootstrap(lambda drawn: np.full(len(drawn), drawn.shape[1]), 1) == [1, 1, 1]
    values = np.array([0.0, 1.0, 0.0, 1.0, 1.0])
    mean, low, high = bootstrap(lambda drawn: values[drawn].mean(axis=1), 5)
    assert mean == pytest.approx(0.6)
    assert low == pytest.approx(0.2)
    assert high == 1.0


def test_curves_are_read_between_their_points() -> None:
    assert on_grid([(0, 0.0), (100, 1.0)], 100, 5).tolist() == [0, 0.25, 0.5, 0.75, 1]


@pytest.fixture
def plan(tmp_path: Path) -> BenchPlan:
    """Two presets, of which the second learns twice as fast."""
    bench = Bench(
        baseline="broadcast",
        rollouts=1536,
        seeds=(0, 1),
        tuning_seeds=(100,),
        lrs=(1e-3, 2e-3),
        tasks={"chain": BenchTask(run=str(FILE.parent / "run.toml"), best=2.0, random=1.0)},
        presets={
            "broadcast": BenchPreset(settings=("algorithm.preset=grpo",)),
            "gigpo": BenchPreset(settings=("algorithm.preset=gigpo",)),
        },
    )
    plan = BenchPlan(bench, FILE, tmp_path, {})
    pairs = [("chain", "broadcast"), ("chain", "gigpo")]
    for one in plan.tuning(["chain"]):
        finish(plan, one, one.name[2] * 100)
    for one in plan.reported(pairs, bench.seeds):
        finish(plan, one, 1.0 if one.name[1] == "gigpo" else 0.5)
    return plan


def finish(plan: BenchPlan, one: Piece, slope: float) -> None:
    curve = [(spent, 1 + min(1.0, slope * spent / 768)) for spent in range(0, 1537, 192)]
    plan.done[one.digest] = Result(one.digest, *one.name, curve, 1.0, 0.0, "0")


def test_all_presets_have_the_baselines_best_learning_rate(plan: BenchPlan) -> None:
    assert {row.lr for row in plan.done.values() if row.seed != 100} == {2e-3}
    tuned = list(plan.tuning(["chain"]))
    assert {one.name[1] for one in tuned} == {"broadcast"}
    del plan.done[tuned[0].digest]
    assert plan.learning_rate("chain") is None
    assert not list(plan.reported([("chain", "gigpo")], [0]))


def test_tasks_and_presets_may_have_seeds_of_their_own(plan: BenchPlan) -> None:
    few = msgspec.structs.replace(plan.bench.tasks["chain"], seeds=(1, 7), lrs=(1e-3,))
    once = msgspec.structs.replace(plan.bench.presets["gigpo"], seeds=(7,))
    bench = msgspec.structs.replace(
        plan.bench,
        tasks={**plan.bench.tasks, "few": few},
        presets={**plan.bench.presets, "once": once},
    )
    ours = replace(plan, bench=bench)
    assert not list(ours.tuning(["few"]))
    pairs = [("few", "gigpo"), ("chain", "gigpo"), ("chain", "once")]
    found = [(*one.name[:2], one.name[3]) for one in ours.reported(pairs, [0, 1, 7])]
    assert found == [
        ("chain", "gigpo", 0), ("few", "gigpo", 1), ("chain", "gigpo", 1),
        ("few", "gigpo", 7), ("chain", "once", 7),
    ]  # fmt: skip


def test_a_piece_is_known_by_all_that_decides_it(plan: BenchPlan) -> None:
    pair = ("chain", "gigpo")
    digests = {plan.piece(pair, lr, seed).digest for lr in (1e-3, 2e-3) for seed in (0, 1)}
    digests |= {plan.piece(("chain", "broadcast"), 1e-3, 0).digest}
    assert len(digests) == 5
    elsewhere = BenchPlan(plan.bench, plan.file, Path("/elsewhere"), {})
    assert elsewhere.piece(pair, 1e-3, 0).digest in digests


def test_the_table_has_normalised_scores_and_ratios(plan: BenchPlan, tmp_path: Path) -> None:
    found = summarise(plan)
    rows = found["chain"]
    assert rows["broadcast"]["final"][0] == pytest.approx(np.mean([0.75, 0.875, 1.0]))
    assert rows["gigpo"]["final"] == [1.0, 1.0, 1.0]
    assert rows["gigpo"]["ratio"][0] == pytest.approx(0.5, abs=0.01)
    assert headline(plan.bench, found)["chain"]["preset"] == "gigpo"
    assert "| gigpo | 0.002 | 2 | 1.00 (1.00 to 1.00) |" in markdown(found)
    assert plan.bench.baseline_of("chain") == "broadcast"
    assert finite({"a": [inf, 1.0]}) == {"a": [None, 1.0]}
    figure(plan.bench, found, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_only_a_preset_that_is_never_worse_is_recommended(plan: BenchPlan) -> None:
    found = summarise(plan)
    assert found["chain"]["gigpo"]["gain"][1] > 0.1
    assert never_worse(plan.bench, found) == {"gigpo": 1}
    plan.bench.tasks["other"] = plan.bench.tasks["chain"]
    found["other"] = {"gigpo": {"gain": [0.0, -0.3, 0.3], "seeds": 1}}  # of two
    assert never_worse(plan.bench, found) == {"gigpo": 1}
    found["other"] = {"gigpo": {"gain": [-0.2, -0.3, -0.1], "seeds": 1}}
    assert never_worse(plan.bench, found) == {}


def test_what_is_missing_is_said(plan: BenchPlan) -> None:
    assert missing(plan, summarise(plan)) == {"chain": {}}
    last = next(d for d, row in plan.done.items() if (row.preset, row.seed) == ("gigpo", 1))
    del plan.done[last]
    assert missing(plan, summarise(plan)) == {"chain": {"gigpo": 1}}


def test_the_page_has_the_stored_results() -> None:
    hint = "run `python -m tests.benchmarks.learning --write`"
    bench = read_bench(FILE)
    plan = BenchPlan(bench, FILE, Path("runs"), read_results(RESULTS))
    found = summarise(plan)
    text = CREDIT.read_text()
    assert with_results(text, page(bench, found, missing(plan, found))) == text, hint


def test_the_page_names_the_baseline_and_the_ratio(plan: BenchPlan) -> None:
    found = summarise(plan)
    text = page(plan.bench, found, {"chain": {"gigpo": 2}})
    head, _, chain = text.splitlines()[:3]
    assert head == "| task | baseline | `auto` | `batch-td` | `gigpo` | better | worse |"
    cells = [cell.strip() for cell in chain.split("|")[1:-1]]
    assert cells[0] == "chain"
    assert cells[1] == "0.88"
    assert cells[2:4] == ["", ""]
    assert cells[4].startswith("0.50 (")
    assert cells[5:] == ["`gigpo`", ""]
    slower = {name: {**row, "gain": [-0.2, -0.3, -0.1]} for name, row in found["chain"].items()}
    found["chain"]["gigpo"] = slower["gigpo"]
    assert page(plan.bench, found, {}).splitlines()[2].endswith("|  | `gigpo` |")
    found["chain"]["gigpo"]["seeds"] = 1
    assert page(plan.bench, found, {}).splitlines()[2].endswith(" | 0.50 |  |  |")
    assert text.endswith("Complete tasks: none; missing runs: 2.")


def test_a_bench_file_that_cannot_be_is_refused(tmp_path: Path) -> None:
    text = FILE.read_text()
    for old, new, said in (
        ("tuning_seeds = [100]", "tuning_seeds = [4]", "tuned on"),
        ('baseline = "broadcast"', 'baseline = "broadcst"', "broadcast"),
        ("heldout = 32", "held = 32", "held"),
    ):
        file = tmp_path / "bench.toml"
        file.write_text(text.replace(old, new))
        with pytest.raises(ConfigError, match=said):
            read_bench(file)
