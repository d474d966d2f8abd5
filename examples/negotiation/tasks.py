"""Each seed selects a pool and both players' values, from a thousand in OpenSpiel."""

TURNS = 4  # two offers per player


def deals(seeds: range) -> list[dict[str, object]]:
    game = {"game": "bargaining", "parameters": {"max_turns": TURNS}}
    return [{"id": f"deal-{seed}", "input": game | {"seed": seed}} for seed in seeds]


train = deals(range(1000, 5000))
heldout = deals(range(200))
