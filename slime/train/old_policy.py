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

from slime.train.backends.fsdp.backend import FSDPBackend
from slime.train.backends.fsdp.frozen import FrozenModel
from slime.train.backends.fsdp.packed_model import PolicyModel

Spans = Sequence[Sequence[Any]]
"""Runs `[version or None, number of tokens]` of one response."""


class OldPolicy:
    """One frozen model, and the published versions that go into it; only the newest where nothing is ever behind."""

    def __init__(self, model: FrozenModel, *, version: int, behind: int) -> None:
        self._model = model
        self._behind = behind
        self._loaded = self._newest = version
        self._kept: dict[int, list[Tensor]] = {version: model.local_copy()} if behind else {}

    def remember(self, policy: FSDPBackend, version: int) -> None:
        """The policy's present weights go to the engines as this version."""
        self._model.copy_from(policy)
        self._loaded = self._newest = version
        if self._behind:
            self._kept[version] = self._model.local_copy()
            oldest = version - self._behind
            self._kept = {number: weights for number, weights in self._kept.items() if number >= oldest}

    def nearest(self, version: int | None) -> int:
        """The version that stands for this one."""
        if version is None or not self._kept:
            return self._newest
        return max((number for number in self._kept if number <= version), default=min(self._kept))

    def at(self, version: int) -> PolicyModel:
        """The model with the weights of a version that `nearest` named."""
        if version != self._loaded:
            self._model.load_local(self._kept[version])
            self._loaded = version
        return self._model.module


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
