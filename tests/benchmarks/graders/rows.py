"""The table of `docs/reference/graders.md`: what graders and environments pay, in words, and what a
check of it must find."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

READ = object()  # of a row that was only read in the package's source


@dataclass(frozen=True)
class Row:
    """`plugin`: whose interpreter has the package. `check`: of `checks`, whose result must be
    `found`; "" of what was only read in the source of `version`."""

    plugin: str
    package: str
    happens: str
    pays: str
    agentrl: str
    check: str = ""
    found: Any = READ
    version: str = ""


CLEAN = [False, {"right": 1.0}]
FAILS, AS_PAID = "fails", "the same"
INSPECT, EVALS = ("inspect", "inspect-ai"), ("openai-evals", "evals")
V03, V04 = ("verifiers", "verifiers"), ("verifiers-v1", "verifiers")
BFCL = ("bfcl", "bfcl-eval")
MATH, DATA = ("verifiers", "math-verify"), ("verifiers", "datasets")
RG, TA, PZ, GYM = (
    (name, name) for name in ("reasoning-gym", "textarena", "pettingzoo", "gymnasium")
)

PAY = [
    Row(*INSPECT, "a solver raises TimeoutError", "the scorer's value, without an error", FAILS,
        "solver_times_out", CLEAN),
    Row(*INSPECT, "a solver raises anything else", "nothing: an error of the sample", FAILS,
        "solver_raises", [True, {}]),
    Row(*INSPECT, "a scorer raises RuntimeError", "nothing: an error of the sample", FAILS,
        "scorer_raises", [True, {}]),
    Row(*INSPECT, "a scorer raises TimeoutError", "nothing: an error of the sample", FAILS,
        "scorer_times_out", [True, {}]),
    Row(*INSPECT, "a scorer gives a dictionary", "each key a score",
        "fails, and lists the keys for `score`", "dictionary",
        [False, {"right": {"format": 1, "correct": 0}}]),
    Row(*INSPECT, "two scorers of one name", "the second is called NAME1", "`score` must name one",
        "two_of_one_name", ["right", "right1"]),
    Row(*INSPECT, "a task without a scorer", "nothing", "refused before the run", "no_scorer",
        [False, {}]),
    Row(*INSPECT, "a scorer gives None", "nothing", FAILS, "scorer_gives_none", [False, {}]),
    Row(*INSPECT, 'a scorer gives "True"', "1", "1", "scorer_gives_true_text", [1.0]),
    Row(*INSPECT, 'a scorer gives "0.5"', "0.5", "0.5", "scorer_gives_half_text", [0.5]),
    Row(*INSPECT, 'a scorer gives "well done"', "0, and a line of the log", FAILS,
        "scorer_gives_other_text", [0.0]),
    Row(*INSPECT, "a scorer gives NaN", "NaN", FAILS, "scorer_gives_nan", ["nan"]),
    Row(*V04, "the setup of a task raises", "0, with an error in the trace", FAILS,
        "v1_setup_raises", [0, 1, 0.0]),
    Row(*V04, "scoring raises TimeoutError", "0, with an error in the trace", FAILS,
        "v1_scoring_times_out", [0, 1, 0.0]),
    Row(*V04, "a task's finalize raises", "0, with an error in the trace", FAILS,
        "v1_finalize_raises", [0, 1, 0.0]),
    Row(*V04, "scoring is longer than its time",
        "the sum of the rewards so far, without an error", FAILS, version="0.4.0"),
    Row(*V04, "the setup is longer than its time", "0, without an error", FAILS, version="0.4.0"),
    Row(*V04, "the environment's finalize raises",
        "the reward without its part; the error is the episode's", FAILS, version="0.4.0"),
    Row(*V03, "a reward function raises TimeoutError", "0, and a line of the log", FAILS,
        "reward_raises", 0.0),
    Row(*V03, "a reward function gives NaN", "NaN", FAILS, "reward_is_nan", "nan"),
    Row(*V03, 'a reward function gives "0.5"', "0.5", "0.5", "reward_is_text", 0.5),
]  # fmt: skip
PAY += [
    Row(*MATH, '"It is not 16." where 16 is right', "the full reward", AS_PAID, "math_of_a_denial",
        True),
    Row(*MATH, "a list of numbers whose last one is right", "the full reward", AS_PAID,
        "math_of_a_list", [True, True]),
    Row(*MATH, "two boxes close together, of which either is right",
        "nothing: they are read as one set", AS_PAID, "math_of_two_boxes", [False, False]),
    Row(*MATH, "(1,2) where {1,2} is right, and the other way",
        "the full reward: an open interval is read as a set; [1,2] for (1,2) gets nothing", AS_PAID,
        "math_of_an_interval", [True, True, False, True]),
    Row(*MATH, "x=5 where 5 is right, and the other way", "the full reward", AS_PAID,
        "math_of_order", [True, True]),
    Row(*MATH, "50% where 50 is right, or where 0.5 is", "the full reward; 0.33 for 1/3 gets none",
        AS_PAID, "math_of_percent", [True, True, False]),
    Row(*MATH, "it is called in a thread", "an exception (ValueError)", FAILS, "math_in_a_thread",
        "ValueError"),
    Row(*RG, "a scorer cannot parse the policy's answer", "an exception, of some data sets",
        "0, if the right answer can be scored", version="0.1.25"),
    Row(*RG, "no answer, and one of no use", "0; of countdown 0.01", AS_PAID, "silence_is_paid",
        {"chain_sum": [0.0] * 3, "leg_counting": [0.0] * 3, "word_sorting": [0.0] * 3,
         "countdown": [0.01] * 3}),
    Row(*RG, "a scorer raises TimeoutError or OSError", "an exception", FAILS, version="0.1.25"),
    Row(*TA, "FrozenLake ends by two illegal moves", "the share completed, 0 at the start",
        "`illegal`, by default -1", "illegal_frozen_lake", 0.0),
    Row(*TA, "Slitherlink ends by two illegal moves", "the text of the reason",
        "`illegal`, by default -1", "illegal_slitherlink", "str"),
    Row(*TA, "a game ends without rewards", "None", FAILS, "ends_without_rewards", None),
    Row(*PZ, "rps_v2: the first mover's move", "0, its result comes with the second mover's",
        "its call is paid when the result is there", "simultaneous_first_mover",
        [[0.0, 0.0], [1.0, -1.0]]),
    Row(*PZ, "tictactoe_v3: a move that wins", "1, and -1 for the other",
        "both calls are paid, each role's latest", "winning_move", [1.0, -1.0]),
    Row(*PZ, "tictactoe_v3: an illegal move", "-1, and 0 for the other", AS_PAID, "illegal_move",
        [0.0, -1.0]),
    Row(*GYM, "`step` gives NaN or an infinite number", "that number", FAILS, "step_gives_nan",
        "nan"),
    Row(*GYM, "`reset` returns None", "TypeError", FAILS, "reset_gives_none", "TypeError"),
    Row(*GYM, "FrozenLake: a step after the goal", "0, and that it has ended",
        "no step is made after the end", "step_after_the_end", [[1.0, True], [0.0, True]]),
    Row(*GYM, "`close` raises", "an exception after the end", FAILS, version="1.4.0"),
    Row(*EVALS, "`Match`: an answer that begins with the right one, such as 160 for 16",
        "the full reward; none if it stands later", AS_PAID, "match_by_prefix",
        [True, True, False, True]),
    Row(*EVALS, "`FuzzyMatch`: a part of the right answer, or a sentence with it",
        "the full reward", AS_PAID, "fuzzy", [1.0, 1.0, 1.0]),
    Row(*EVALS, "an eval records no match and no score", "nothing", FAILS, version="3.0.1.post1"),
    Row(*EVALS, "a match that is NaN", "NaN", FAILS, version="3.0.1.post1"),
    Row(*BFCL, "a call with the formula x*3, x-3 or x/3 where x**3 is right",
        "the full reward: , . / - _ * ^ are not compared", AS_PAID, "formulas",
        [True, True, True, True, False]),
    Row(*DATA, 'mixed JSON: the text "007"', "the number 7",
        "local files are read as written; such parquet is refused", "mixed_json",
        ["hi", 7, None, [1]]),
    Row(*DATA, "JSON lines: 1e-12 beside a mixed column", "0.0", "1e-12 from the file",
        "tiny_number", [0.0, [1]]),
    Row(*DATA, 'JSON lines: the text "2026-01-02"', "a datetime", "the text", "date_text",
        "2026-01-02 00:00:00"),
]  # fmt: skip

SEEDS = [
    Row(*GYM, "FrozenLake-v1, `reset(seed=3)`, five steps, twice",
        "the steps; another seed gives others", "", "seeded_steps", [True, False]),
    Row(*GYM, "then `reset()` without a seed", "the later episodes too", "",
        "seeded_second_episode", True),
    Row(*GYM, "`action_space.sample()` after `reset(seed=3)`",
        "nothing: the space has a seed of its own", "", "unseeded_actions", False),
    Row(*RG, "chain_sum, seed 1, sizes 3 and 5", "each item, whatever the size", "",
        "seeded_sizes", [True] * 3),
    Row(*RG, "chain_sum without a seed, twice", "nothing: other questions", "", "unseeded", False),
    Row(*TA, "FrozenLake-v0, `reset(seed=3)`, twice", "the board; another seed gives another", "",
        "seeded_board", [True, False]),
    Row(*TA, "`random.random()` after it", "that too: it seeds the generator of the process", "",
        "seeds_the_process", True),
]  # fmt: skip
