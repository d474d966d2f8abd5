"""A seed is a pool and two players' values: one of OpenSpiel's thousand."""

TURNS = 4  # two offers of each player


def deals(seeds: range) -> list[dict[str, object]]:
    game = {"game": "bargaining", "parameters": {"max_turns": TURNS}}
    return [{"id": f"deal-{seed}", "input": game | {"seed": seed}} for seed in seeds]


train = deals(range(1000, 5000))
heldout = deals(range(200))
