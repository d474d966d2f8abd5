from pathlib import Path

from agentrl.live.documents import (
    Event,
    Lanes,
    Told,
    Version,
    Wish,
    decide,
    put_version,
    put_wish,
    told,
)
from agentrl.store import open_store


async def test_documents_come_back_as_they_were_told(tmp_path: Path) -> None:
    lanes = Lanes(serving=0, candidate=3, share=0.2, retired=[1, 2])
    events = [
        Event(time=float(i), kind="dropped", version=i, serving=0, why="worse") for i in range(12)
    ]
    version = Version(version=3, step=4, path="versions/policy-3", offered=7.0, source=0)
    async with open_store(f"sqlite:///{tmp_path}/store.db") as store:
        assert await told(store, "shop") == Told()
        await store.open_run("shop", {})
        for event in events:
            await decide(store, "shop", lanes, event)
        await put_version(store, "shop", version)
        await put_wish(store, "shop", Wish(kind="offer", asked=1.0, path="made"))
        found = await told(store, "shop")
        assert (found.lanes, found.events, found.versions) == (lanes, events, {3: version})
        assert found.wish is not None
        await put_wish(store, "shop", None)
        assert (await told(store, "shop")).wish is None
