from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.megatron.ranks import RankGroup


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankGroup]]:
    """Groups of processes by their size, started when a test first asks for one and kept for the next."""
    groups: dict[int, RankGroup] = {}

    def of(size: int) -> RankGroup:
        if size not in groups or groups[size].broken:
            groups[size] = RankGroup(size)
        return groups[size]

    yield of
    for group in groups.values():
        if not group.broken:
            group.close()
