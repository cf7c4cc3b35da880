"""`--keep-old-actor`: the weights that the engines sampled with, for the old policy's log-probs.

Invariant: a token's old log-prob comes from the version that sampled it, as far back as samples of this run can be
behind. A token whose version nobody knows is taken to be of the newest published weights, one of an older version than
all that are kept (a rollout of before a restart) to be of the oldest of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from slime.train.backends.protocol import TrainBackend

NAME = "old_actor"
Spans = Sequence[Sequence[Any]]
"""Runs `[version or None, number of tokens]` of one response."""


class OldPolicy:
    """The published versions as frozen sets of the backend; only the newest where nothing is ever behind."""

    def __init__(self, backend: TrainBackend, *, version: int, behind: int) -> None:
        self._backend = backend
        self._behind = behind
        self._newest = version
        self._kept: set[int] = set()
        self.remember(version)

    def remember(self, version: int) -> None:
        """The policy's present weights go to the engines as this version."""
        self._newest = version
        if not self._behind:
            self._backend.snapshot(NAME)
            return
        self._backend.snapshot(f"{NAME}@{version}", on_host=True)
        self._kept.add(version)
        for number in [number for number in self._kept if number < version - self._behind]:
            self._kept.remove(number)
            self._backend.forget(f"{NAME}@{number}")

    def nearest(self, version: int | None) -> int:
        """The version that stands for this one."""
        if version is None or not self._kept:
            return self._newest
        return max((number for number in self._kept if number <= version), default=min(self._kept))

    def at(self, version: int) -> str:
        """The name of the set for a version that `nearest` named."""
        return f"{NAME}@{version}" if self._behind else NAME


def token_versions(spans: Spans | None, length: int, nearest: dict[int | None, int]) -> Tensor:
    """[length]: the version that stands for each token's."""
    versions = torch.full((length,), nearest[None], dtype=torch.int64)
    begin = 0
    for version, count in spans or ():
        versions[begin : begin + count] = nearest[as_version(version)]
        begin += count
    return versions


def versions_in(columns: Iterable[Spans | None]) -> set[int | None]:
    """Every version that a response names, and None for what none is known of."""
    return {None} | {as_version(version) for spans in columns for version, _ in spans or ()}


def as_version(version: Any) -> int | None:
    """A version as a number; engines may call theirs anything."""
    text = str(version)
    return int(text) if text.lstrip("-").isdigit() else None
