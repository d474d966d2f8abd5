"""Games against a perfect player, who takes turns in beginning; of equally good moves it plays any.

A task's seed decides what the opponent plays where several moves are as good.
"""


def games(opponent: str, seeds: range) -> list[dict[str, object]]:
    """One task a seed; with even seeds the learner begins."""
    tasks = []
    for seed in seeds:
        learner, other = ("player_0", "player_1") if seed % 2 == 0 else ("player_1", "player_0")
        game = {"game": "tic_tac_toe", "seed": seed, "players": {other: opponent}}
        tasks.append({"id": f"{opponent}-{seed}", "input": game, "learner": learner})
    return tasks


train = games("perfect", range(1000, 5000))
heldout = games("perfect", range(200))
random = games("random", range(200))
