"""The sessions of one name."""

from __future__ import annotations

import pytest

from agentrl.core.errors import NotFound
from agentrl.live.records import count_of, group_base, group_of
from tests.agentrl.live.sessions import RUN


class Counting:
    """A store that has so many sessions of a name, and counts what is read."""

    def __init__(self, sessions: int) -> None:
        self.known = {group_of(RUN, "ada", number) for number in range(1, sessions + 1)}
        self.reads = 0

    async def settled(self, group: str, *, timeout: float) -> bool:
        self.reads += 1
        if group not in self.known:
            raise NotFound(group)
        return True


@pytest.mark.parametrize("sessions", [0, 1, 2, 3, 4, 7, 8, 1000, 4095])
async def test_sessions_of_a_name_are_counted_with_few_reads(sessions: int) -> None:
    store = Counting(sessions)
    assert await count_of(store, RUN, "ada") == sessions
    assert store.reads <= 2 + 2 * sessions.bit_length()


def test_all_groups_of_a_name_have_the_same_base() -> None:
    groups = [group_of("my-run", "ada", number) for number in (1, 2, 30)]
    assert len(set(groups)) == 3
    assert {group_base("my-run", group) for group in groups} == {groups[0]}
