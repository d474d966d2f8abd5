"""Games of OpenSpiel as agents: the rules are the library's, all else is tested here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from agentrl.core.errors import ConfigError, PolicyError
from agentrl.core.types import RolloutState, Scope
from agentrl.runners.executors.command import environment
from agentrl.runners.games import Game, GameAgent, Match, View, ask_for_move, read_task, verify
from tests.runners.test_no_model_call import failed

pytest.importorskip("pyspiel")

Message = dict[str, str]
Answer = Callable[[list[Message]], Awaitable[str]]
KUHN = {"game": "kuhn_poker", "seed": 1}


def legal(messages: list[Message]) -> list[str]:
    return messages[1]["content"].partition("Legal moves:\n")[2].splitlines()


def says(*answers: str) -> Answer:
    """Answers the calls of all players in order; then with the first legal move."""
    left = list(answers)

    async def answer(messages: list[Message]) -> str:
        return left.pop(0) if left else legal(messages)[0]

    return answer


async def play(task: dict[str, Any], answer: Answer | None = None) -> dict[str, Any]:
    match = Match(read_task(task), ask_for_move, answer or says())
    return dict(await match.play())


async def test_a_game_follows_the_rules_and_is_recorded() -> None:
    result = await play(KUHN, says("Pass", "Bet", "Pass"))
    assert [who for who, _ in result["moves"]] == ["chance"] * 2 + ["player_0", "player_1"] * 1 + [
        "player_0"
    ]
    assert result["moves"][2:] == [("player_0", "Pass"), ("player_1", "Bet"), ("player_0", "Pass")]
    assert result["returns"] == [-1.0, 1.0]  # who passes a bet has lost the ante
    assert (result["ended"], result["invalid"], result["forfeited"]) == ("rules", {}, {})
    assert result["game"] == "kuhn_poker()"


async def test_players_see_their_own_cards_and_their_own_moves() -> None:
    seen: list[str] = []

    async def answer(messages: list[Message]) -> str:
        seen.append(messages[0]["content"] + messages[1]["content"])
        return "Bet"

    result = await play(KUHN, answer)
    cards = [move.removeprefix("Deal:") for who, move in result["moves"] if who == "chance"]
    assert cards[0] != cards[1]
    assert "player_0" in seen[0]
    assert seen[0].endswith(f"{cards[0]}\n\nLegal moves:\nPass\nBet")
    assert "player_1" in seen[1]
    assert seen[1].endswith(f"{cards[1]}b\n\nLegal moves:\nPass\nBet")


def test_a_view_is_the_board_or_what_a_player_has_been_told() -> None:
    board = Game("tic_tac_toe")
    state = board.start()
    state.apply_action(4)
    assert board.view(state, 1).seen == "...\n.x.\n..."
    offer = Game("negotiation", seed=3)  # tells observations only
    state = offer.start()
    state.apply_action(0)
    view = offer.view(state, 0)
    assert "Turn Type: Proposal" in view.seen
    assert len(view.legal) == len(state.legal_actions())


@pytest.mark.parametrize(
    ("answer", "move"),
    [
        ("Bet", "Bet"),
        (" bet.\n", "Bet"),
        ("A strong card.\nMove: pass\nMove: Bet", "Bet"),
        ("I bet", None),
        ("", None),
        ("Move:", None),
    ],
)
def test_a_move_is_read_alone_or_after_the_last_mark(answer: str, move: str | None) -> None:
    view = View("kuhn_poker", 0, "1", {"Pass": 0, "Bet": 1})
    assert view.read(answer) == (None if move is None else view.legal[move])


async def test_the_seed_decides_chance_and_nothing_else_does() -> None:
    leduc = {"game": "leduc_poker", "players": {"player_1": "random"}}
    deals = [await play(leduc | {"seed": seed}) for seed in (7, 7, 8, 9, 10)]
    assert deals[0] == deals[1]
    assert len({str(deal["moves"]) for deal in deals}) > 2
    called, raised = [
        [move for who, move in (await play(leduc | {"seed": 7}, says(first)))["moves"]]
        for first in ("Call", "Raise")
    ]
    assert called[:2] == raised[:2]
    assert called != raised


async def test_a_game_that_rolls_its_own_dice_is_seeded_too() -> None:
    games = [await play({"game": "negotiation", "seed": seed, "max_moves": 4}) for seed in (1, 1)]
    assert games[0] == games[1]
    pools = set()
    for seed in range(4):
        game = Game("negotiation", seed=seed)
        state = game.start()
        state.apply_action(0)
        pools.add(game.view(state, 0).seen)
    assert len(pools) > 1


async def test_without_a_seed_every_game_is_another_and_can_be_repeated() -> None:
    games = [await play({"game": "kuhn_poker"}) for _ in range(2)]
    assert games[0]["seed"] != games[1]["seed"]
    assert await play({"game": "kuhn_poker", "seed": games[0]["seed"]}) == games[0]


INVALID = [
    # game, returns of player 0's forfeit before any move
    ("kuhn_poker", {}, [-2.0, 2.0]),
    ("kuhn_poker", {"players": 3}, [-2.0, 1.0, 1.0]),
    ("bargaining", {}, [0.0, 0.0]),  # general-sum: nobody is paid for it
    ("tiny_hanabi", {}, [0.0, 0.0]),  # both have the same return
]


@pytest.mark.parametrize(("game", "parameters", "returns"), INVALID)
async def test_an_invalid_move_forfeits_the_game(
    game: str, parameters: dict[str, Any], returns: list[float]
) -> None:
    task = {"game": game, "parameters": parameters, "seed": 1}
    result = await play(task, says("a castle"))
    assert (result["returns"], result["ended"]) == (returns, "forfeit")
    assert result["invalid"] == {"player_0": 1}
    assert result["forfeited"] == {"player_0": "invalid"}
    assert all(who == "chance" for who, _ in result["moves"])


async def test_who_forfeits_a_general_sum_game_gets_its_worst_and_nobody_more() -> None:
    result = await play({"game": "negotiation", "seed": 1}, says("nothing"))
    assert result["returns"] == [Game("negotiation").rules.min_utility(), 0.0]


def test_forfeits_keep_the_sum_of_a_zero_sum_game() -> None:
    game = Game("kuhn_poker", {"players": 3})
    state = game.start()
    for losers in ({0}, {1, 2}, {0, 1, 2}):
        returns = game.forfeited(state, losers)
        assert sum(returns) == pytest.approx(0.0)
        assert len({returns[player] for player in losers}) == 1
    assert game.forfeited(state, {0, 1, 2}) == [0.0, 0.0, 0.0]
    assert game.forfeited(state, {1, 2}) == [4.0, -2.0, -2.0]


@pytest.mark.parametrize("game", ["tic_tac_toe", "bargaining"])
async def test_a_penalty_plays_on_with_another_move(game: str) -> None:
    task = {"game": game, "seed": 5, "invalid": "penalty", "max_moves": 30}
    bad, good = await play(task, says("no", "no")), await play(task)
    assert bad["invalid"] == {"player_0": 1, "player_1": 1}
    assert (bad["ended"], good["ended"]) == ("rules", "rules")
    assert (await play(task, says("no", "no"))) == bad  # the other move is the seed's, too
    drawn = {
        str((await play(task | {"seed": seed}, says("no")))["moves"][-20:]) for seed in range(6)
    }
    assert len(drawn) > 1


async def test_retries_come_with_a_complaint_and_end() -> None:
    asked: list[list[Message]] = []

    async def answer(messages: list[Message]) -> str:
        asked.append(messages)
        return "Bet" if len(messages) > 4 else "all in"

    task = KUHN | {"invalid": "retry"}
    result = await play(task, answer)
    assert (result["ended"], result["invalid"]) == ("rules", {"player_0": 2, "player_1": 2})
    assert asked[1][2] == {"role": "assistant", "content": "all in"}
    assert asked[1][3]["content"] == "That is not a legal move. Legal moves:\nPass\nBet"
    result = await play(task | {"retries": 1}, answer)
    assert (result["ended"], result["invalid"]) == ("forfeit", {"player_0": 2})


@pytest.mark.parametrize(
    ("game", "returns"),
    [("chess", [0.0, 0.0]), ("oshi_zumo", [0.0, 0.0]), ("coop_box_pushing", None)],
)
async def test_a_game_without_end_is_broken_off(game: str, returns: list[float] | None) -> None:
    task = {"game": game, "seed": 1, "max_moves": 5, "parameters": {}}
    result = await play(task, says())
    moves = [move for who, move in result["moves"] if who != "chance"]
    assert result["ended"] == "max_moves"
    assert len(moves) in (4, 5)  # where two move at a time, four
    if returns is None:  # rewards come with the moves: they are kept
        assert result["returns"][0] == result["returns"][1] < 0
    else:
        assert result["returns"] == returns


async def test_simultaneous_players_are_asked_together_and_score_together() -> None:
    waiting = asyncio.Barrier(2)

    async def answer(messages: list[Message]) -> str:
        await waiting.wait()  # for ever, if one were asked after the other
        return "Paper" if "player_0" in messages[0]["content"] else "Rock"

    result = await play({"game": "matrix_rps"}, answer)
    assert result["returns"] == [1.0, -1.0]
    assert result["moves"] == [("player_0", "Paper"), ("player_1", "Rock")]
    result = await play({"game": "matrix_rps"}, says("Lizard", "Spock"))
    assert (result["returns"], len(result["forfeited"])) == ([0.0, 0.0], 2)


async def test_a_failed_call_of_one_waits_for_that_of_the_other() -> None:
    heard: list[str] = []

    async def answer(messages: list[Message]) -> str:
        if "player_0" in messages[0]["content"]:
            raise PolicyError("gone")
        await asyncio.sleep(0)
        heard.append("player_1")
        return "Rock"

    with pytest.raises(PolicyError, match="gone"):
        await play({"game": "matrix_rps"}, answer)
    assert heard == ["player_1"]


async def test_a_player_who_never_answers_has_lost() -> None:
    async def answer(messages: list[Message]) -> str:
        if "player_1" in messages[0]["content"]:
            await asyncio.Event().wait()
        return "Bet"

    result = await play(KUHN | {"move_timeout": 0.01, "invalid": "retry"}, answer)
    assert (result["ended"], result["forfeited"]) == ("forfeit", {"player_1": "timeout"})
    assert (result["returns"], result["invalid"]) == ([2.0, -2.0], {})


async def test_a_time_out_of_the_client_is_not_the_players() -> None:
    async def answer(messages: list[Message]) -> str:
        raise TimeoutError("of a socket")

    with pytest.raises(TimeoutError, match="of a socket"):
        await play(KUHN, answer)


async def test_a_perfect_player_never_loses_and_takes_what_it_is_offered() -> None:
    for seed in range(20):
        players = {"player_0": "random", "player_1": "perfect"}
        if seed % 2:
            players = {"player_0": "perfect", "player_1": "random"}
        game = {"game": "tic_tac_toe", "seed": seed, "players": players}
        result = await play(game)
        assert result["returns"][1 - seed % 2] >= 0, result
    both = {"player_0": "perfect", "player_1": "perfect"}
    drawn = [await play({"game": "tic_tac_toe", "seed": s, "players": both}) for s in range(5)]
    assert all(result["returns"] == [0.0, 0.0] for result in drawn)
    assert len({str(result["moves"]) for result in drawn}) > 1  # among equals it plays any


async def test_tree_search_beats_chance() -> None:
    players = {"player_0": "mcts:50", "player_1": "random"}
    won = 0.0
    for seed in range(6):
        won += (await play({"game": "connect_four", "seed": seed, "players": players}))["returns"][
            0
        ]
    assert won >= 4
    again = [await play({"game": "connect_four", "seed": 1, "players": players}) for _ in range(2)]
    assert again[0] == again[1]


async def test_more_than_two_players() -> None:
    result = await play({"game": "kuhn_poker", "parameters": {"players": 4}, "seed": 2})
    assert len(result["returns"]) == 4
    assert {who for who, _ in result["moves"]} == {"chance", *(f"player_{i}" for i in range(4))}
    assert sum(result["returns"]) == 0


async def test_a_move_without_alternative_is_not_asked_for() -> None:
    calls = 0

    async def answer(messages: list[Message]) -> str:
        nonlocal calls
        calls += 1
        return legal(messages)[0]

    result = await play({"game": "tic_tac_toe", "players": {"player_1": "perfect"}}, answer)
    made = [move for who, move in result["moves"] if who == "player_0"]
    assert calls == len(made) - (len(result["moves"]) == 9)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"game": "kun_poker"}, r"no such game; did you mean 'kuhn_poker'\?"),
        ({"game": "misere"}, "Missing parameter game"),
        ({"game": "nfg_game"}, "cannot be loaded"),
        ({"game": "kuhn_poker", "parameters": {"playerz": 2}}, "Available parameters are: players"),
        ({"game": "kuhn_poker", "parameters": {"players": 50}}, "max_num_players"),
        ({"game": "mfg_garnet"}, "has no moves as text"),
        ({"game": "crossword"}, "has no moves as text"),
        ({"game": 1}, "Expected `str`, got `int` - at `input.game`"),
        ({"seed": 1}, "a mapping with 'game'"),
        ("kuhn_poker", "a mapping with 'game'"),
        (KUHN | {"max_move": 3}, r"input.max_move: did you mean 'max_moves'\?"),
        (KUHN | {"max_moves": 0}, "input.max_moves"),
        (KUHN | {"invalid": "ignore"}, "ignore"),
        (KUHN | {"retries": 2}, "input.retries is for invalid = 'retry'"),
        (KUHN | {"players": {"player_2": "random"}}, "did you mean 'player_"),
        (KUHN | {"players": {"player_1": "perfekt"}}, r"did you mean 'perfect'\?"),
        (KUHN | {"players": {"player_1": "random:3"}}, "not a scripted player"),
        ({"game": "chess", "players": {"player_1": "mcts:0"}}, "'mcts:0' is not a scripted player"),
        ({"game": "chess", "players": {"player_1": "mcts:"}}, "'mcts:' is not a scripted player"),
        (KUHN | {"players": {"player_1": "perfect"}}, "with perfect information"),
        (KUHN | {"players": {"player_1": "mcts"}}, "with perfect information"),
        ({"game": "chess", "players": {"player_1": "perfect"}}, "choose 'mcts'"),
    ],
)
async def test_what_cannot_be_played_is_refused_in_a_sentence(task: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        await play(task)


def test_a_game_may_be_a_whole_game_string() -> None:
    assert Game("misere(game=tic_tac_toe())").players == 2
    assert Game("kuhn_poker(players=3)").players == 3


# In the real runner: one attempt, its calls by role, its rewards.


@pytest.fixture
async def agent(bench: Any) -> Any:
    agent = GameAgent()
    yield agent
    await agent.aclose()


async def test_calls_belong_to_players_and_players_have_their_returns(
    bench: Any, model: Any, agent: Any
) -> None:
    model.answer = lambda body: {"role": "assistant", "content": "Bet"}
    (rollout,) = await bench.run(agent, {"input": KUHN}, verifier=verify)
    assert rollout.state is RolloutState.SUCCEEDED, rollout.failure
    trace = await bench.store.trace(rollout.id)
    assert [call.role for call in trace.transitions] == ["player_0", "player_1"]
    returns = rollout.result["returns"]
    rows = {(row.target, row.name): row.value for row in rollout.rewards if row.target}
    assert rows == {
        ("player_0", "outcome"): returns[0],
        ("player_1", "outcome"): returns[1],
        ("player_0", "invalid"): 0.0,
        ("player_1", "invalid"): 0.0,
    }
    assert rollout.reward() == 0.0  # of both, as both are the policy's


async def test_scripted_and_silent_players_have_no_rewards_of_their_own(
    bench: Any, model: Any, agent: Any
) -> None:
    async def never(request: Any, body: Any) -> None:
        await asyncio.Event().wait()

    model.answer = lambda body: {"role": "assistant", "content": "all in"}
    scripted = {"input": KUHN | {"players": {"player_1": "random"}}}
    seats = {"player_0": "policy", "player_1": "policy"}  # the task has the last word
    (rollout,) = await bench.run(agent, scripted, verifier=verify, seats=seats)
    rows = [(row.scope, row.target, row.name, row.value) for row in rollout.rewards]
    assert rows == [
        (Scope.ROLE, "player_0", "outcome", -2.0),
        (Scope.ROLE, "player_0", "invalid", -1.0),
        (Scope.ROLLOUT, None, "outcome", -2.0),
    ]
    model.then(never)
    silent = {"input": scripted["input"] | {"move_timeout": 0.05}, "learner": "player_0"}
    (rollout,) = await bench.run(agent, silent, verifier=verify)
    assert rollout.state is RolloutState.SUCCEEDED, rollout.failure
    assert rollout.result["forfeited"] == {"player_0": "timeout"}
    assert [(row.target, row.value) for row in rollout.rewards] == [(None, -2.0)]


async def test_a_player_who_lost_before_it_was_asked_has_what_the_game_gives_it(
    bench: Any, model: Any, agent: Any
) -> None:
    model.answer = lambda body: {"role": "assistant", "content": "all in"}
    seats = {"player_0": "policy", "player_1": "policy"}
    (rollout,) = await bench.run(agent, {"input": KUHN}, verifier=verify, seats=seats)
    assert rollout.state is RolloutState.SUCCEEDED, rollout.failure
    outcomes = {row.target: row.value for row in rollout.rewards if row.name == "outcome"}
    assert outcomes == {"player_0": -2.0, "player_1": 2.0, None: 0.0}


async def test_a_refused_call_fails_the_rollout_in_the_servers_words(
    bench: Any, model: Any, agent: Any
) -> None:
    from aiohttp import web

    async def refuse(request: Any, body: Any) -> web.Response:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    model.then(refuse, refuse)
    (rollout,) = await bench.run(agent, {"input": KUHN}, verifier=verify)
    assert rollout.state is RolloutState.FAILED
    assert "too long" in rollout.failure.message


async def test_a_game_that_no_model_had_a_part_in_is_no_failure(bench: Any, agent: Any) -> None:
    players = {"player_0": "random", "player_1": "random"}
    game = {"input": {"game": "kuhn_poker", "seed": 3, "players": players}}
    late = {"input": {"game": "kuhn_poker", "seed": 3, "move_timeout": 0.05}}

    async def never(request: web.Request, body: Any) -> None:
        await asyncio.Event().wait()

    (rollout,) = await bench.run(agent, game, verifier=verify, calls_optional=False)
    assert rollout.state is RolloutState.SUCCEEDED, rollout.failure
    bench.model.then(never)
    (rollout,) = await bench.run(agent, late, verifier=verify, calls_optional=False)
    assert rollout.state is RolloutState.SUCCEEDED, rollout.failure
    assert rollout.result["ended"] == "forfeit"


async def test_a_game_against_another_model_has_failed(bench: Any) -> None:
    with environment(bench.model.base_url):
        elsewhere = GameAgent()
    game = {"input": {"game": "kuhn_poker", "seed": 3, "invalid": "penalty"}}
    (rollout,) = await bench.run(elsewhere, game, verifier=verify, calls_optional=False)
    failed(rollout)
    await elsewhere.aclose()
