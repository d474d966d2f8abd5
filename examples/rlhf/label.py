"""The people who compare answers: pairs of sampled rollouts of one prompt, as a data set.

python label.py STORE RUN DATASET [PAIRS_PER_PROMPT]
"""

import asyncio
import sys
from itertools import groupby, permutations

from agentrl.datasets.records import Item, Side, digest_of
from agentrl.store import open_store
from agentrl.types import Purpose, Rollout


async def label(store_url: str, run: str, name: str, per_group: int = 3) -> int:
    """Of each group the pairs that differ most; every fifth prompt is held out. Returns how many
    different pairs there are."""
    items: dict[str, Item] = {}
    sides: dict[str, Side] = {}
    async with open_store(store_url) as store:
        rows = await store.rollouts(run, purpose=Purpose.TRAIN)
        calls = await store.calls([row.id for row in rows])
        digests = {id: digest_of(made) for id, made in calls.items()}
        sides |= {digests[id]: Side(digest=digests[id], rollout=id) for id in digests}
        for number, (_, group) in enumerate(groupby(rows, key=lambda row: row.group)):
            split = "test" if number % 5 == 0 else "train"
            for better, worse in differing(list(group))[:per_group]:
                item = Item(
                    position=len(items), kind="pair", chosen=digests[better.id],
                    rejected=digests[worse.id], split=split, source="people",
                    margin=better.reward() - worse.reward(),
                )  # fmt: skip
                items.setdefault(item.id, item)
        found = list(items.values())
        used = {side for item in found for side in (item.chosen, item.rejected)}
        version = await store.draft_dataset(name, {"run": run, "how": "people"})
        await store.add_items(name, version, found, [sides[digest] for digest in sorted(used)])
        await store.commit_dataset(name, version)
    return len(found)


def differing(rows: list[Rollout]) -> list[tuple[Rollout, Rollout]]:
    pairs = [(a, b) for a, b in permutations(rows, 2) if a.reward() - b.reward() >= 0.25]
    return sorted(pairs, key=lambda pair: pair[1].reward() - pair[0].reward())


if __name__ == "__main__":
    store_url, run, name, *rest = sys.argv[1:]
    print(asyncio.run(label(store_url, run, name, *map(int, rest))), "pairs")
