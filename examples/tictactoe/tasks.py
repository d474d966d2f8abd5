"""Games against a perfect player, with alternating first players.

A task's seed chooses among the opponent's equally good moves.
"""


def games(opponent: str, seeds: range) -> list[dict[str, object]]:
    """One task per seed; with even seeds the policy moves first."""
    tasks = []
    for seed in seeds:
        learner, other = ("player_0", "player_1") if seed % 2 == 0 else ("player_1", "player_0")
        game = {"game": "tic_tac_toe", "seed": seed, "players": {other: opponent}}
        tasks.append({"id": f"{opponent}-{seed}", "input": game, "learner": learner})
    return tasks


train = games("perfect", range(1000, 5000))
heldout = games("perfect", range(200))
random = games("random", range(200))
