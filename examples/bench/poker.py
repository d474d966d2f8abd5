"""Kuhn and Leduc poker against itself: the score is minus the exploitability, which is exact.

Rules and best responses are OpenSpiel's. A player sees the ranks of its card and of the public one,
and the moves of both rounds; suits do not matter. Every probability is read from the model, as in
examples/kuhn: 0 is an equilibrium.
"""

from __future__ import annotations

import random
import re
from functools import cache, partial
from pathlib import Path
from typing import Any

from agentrl.runners.games import Game, GameAgent, GameTask, Match, View

CARDS = ["jack", "queen", "king"]
MOVES = {"kuhn_poker": ["Pass", "Bet"], "leduc_poker": ["Fold", "Call", "Raise"]}
RANDOM = {"kuhn_poker": -0.458333, "leduc_poker": -2.373611}  # of uniformly random legal moves
FIELD = re.compile(r"\[(Private|Public|Round1|Round2): ([^]]*)\]")


def describe(view: View) -> list[dict[str, str]]:
    """ "queen / Call Raise": the card, and the moves; in Leduc's second round the public card and
    its moves, too. How many there are tells the player's seat."""
    if view.game == "kuhn_poker":
        card, *moves = view.seen
        parts = [CARDS[int(card)], " ".join(MOVES["kuhn_poker"]["pb".index(m)] for m in moves)]
    else:
        seen = dict(FIELD.findall(view.seen))
        rounds = [" ".join(MOVES["leduc_poker"][int(m)] for m in seen[key].split())
                  for key in ("Round1", "Round2")]  # fmt: skip
        parts = [CARDS[int(seen["Private"]) // 2], rounds[0]]
        if "Public" in seen:
            parts += [CARDS[int(seen["Public"]) // 2], rounds[1]]
    return [{"role": "user", "content": " / ".join(parts).strip()}]


agent = GameAgent(describe)


def dealt(game: str, seed: int) -> tuple[str, ...]:
    """All cards of a game, the public one of Leduc included: those of a game without a bet."""
    match = Match(GameTask(game=game, seed=seed), describe, agent.ask)
    match.deal()
    while not match.state.is_terminal():
        match.state.apply_action(min(match.state.legal_actions()))
        match.deal()
    return tuple(card for who, card in match.moves if who == "chance")


@cache
def deals(game: str) -> list[dict[str, Any]]:
    """A task for each way to deal all cards: a group compares games of the same cards."""
    seeds: dict[tuple[str, ...], int] = {}
    for seed in range(2_000):  # enough to meet each of 120 ways
        seeds.setdefault(dealt(game, seed), seed)
    return [{"id": f"deal-{s}", "input": {"game": game, "seed": s}} for s in seeds.values()]


kuhn, leduc = partial(deals, "kuhn_poker"), partial(deals, "leduc_poker")


def score(game: str, checkpoint: Path) -> float:
    """Minus the return of best responses to the policy, averaged over both seats."""
    import torch
    from open_spiel.python.algorithms.exploitability import exploitability
    from open_spiel.python.policy import TabularPolicy

    from agentrl.algorithms.model.load import load_model

    model, tokenizer = load_model(checkpoint, device="cpu")
    rules = Game(game)
    policy = TabularPolicy(rules.rules)

    @cache
    def chances(asked: str, legal: tuple[str, ...]) -> list[float]:
        messages = [{"role": "user", "content": asked}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        words = [tokenizer(move, add_special_tokens=False)["input_ids"] for move in legal]
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0, -1].double()
        found: list[float] = logits[[word[0] for word in words]].softmax(-1).tolist()
        return found

    for row, state in enumerate(policy.states):
        view = rules.view(state, state.current_player())
        known = chances(describe(view)[0]["content"], tuple(view.legal))
        for action, chance in zip(view.legal.values(), known, strict=True):
            policy.action_probability_array[row, action] = chance
    return -float(exploitability(policy.game, policy))


def score_kuhn(checkpoint: Path) -> float:
    return score("kuhn_poker", checkpoint)


def score_leduc(checkpoint: Path) -> float:
    return score("leduc_poker", checkpoint)


def build(game: str, folder: Path, seed: int) -> None:
    """Write a model that makes any legal move."""
    from agentrl.tiny import imitator, word_tokenizer

    dice, rules, shown = random.Random(seed), Game(game), []
    while len(shown) < 6000:
        state = rules.start()
        while not state.is_terminal():
            if state.is_chance_node():
                state.apply_action(dice.choice(state.legal_actions()))
                continue
            view = rules.view(state, state.current_player())
            move = dice.choice(list(view.legal))
            shown.append([*describe(view), {"role": "assistant", "content": move}])
            state.apply_action(view.legal[move])
    words = word_tokenizer([*CARDS, *MOVES[game], "/"])
    imitator(folder, shown, tokenizer=words, seed=seed, steps=300, batch=64, lr=3e-3)


def build_kuhn(folder: Path, seed: int) -> None:
    build("kuhn_poker", folder, seed)


def build_leduc(folder: Path, seed: int) -> None:
    build("leduc_poker", folder, seed)
