"""Whether the engines have exactly the trainers' weights (`--check-weight-update-equal`).

The invariant: a check that returns has compared every tensor of every engine; a difference ends the run.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

from slime.cluster.watchdog import named
from slime.engine.http.client import EngineClient, EngineRejected
from slime.errors import RunFailed
from slime.weights.publisher import RunAsync, WeightPublisher, WeightSource, all_of

_NAMED = 3


class WeightsDiffer(RunFailed):
    """An engine has other bytes than the trainers after an update."""


class ChecksumCheck:
    """Embedded engines name the checksum of each tensor; the trainers compute theirs."""

    def __init__(
        self, source: WeightSource, clients: Sequence[EngineClient], run_async: RunAsync, *, timeout_s: float
    ) -> None:
        self._source = source
        self._clients = clients
        self._run_async = run_async
        self._timeout_s = timeout_s

    def __call__(self, version: int) -> None:
        expected = self._source.weight_checksums()
        clients = list(self._clients)
        answers = self._run_async(named(self._ask(clients), f"weight check {version}"))
        for client, found in zip(clients, answers, strict=True):
            wrong = [name for name, checksum in expected.items() if found.get(name) != checksum]
            if wrong:
                raise WeightsDiffer(
                    f"engine {client.base_url} differs from the trainers in {len(wrong)} of {len(expected)} tensors "
                    f"after version {version}: {', '.join(wrong[:_NAMED])}"
                )

    async def _ask(self, clients: Sequence[EngineClient]) -> list[dict[str, str]]:
        answers = await all_of(clients, lambda c: c.check_weights("checksum", timeout_s=self._timeout_s))
        return [answer["checksums"] for answer in answers]


class ReloadCheck:
    """SGLang keeps its tensors under its own names and compares them only with a snapshot of itself: the engines take
    one, load a folder with all weights, and compare."""

    def __init__(
        self, reload: WeightPublisher, clients: Sequence[EngineClient], run_async: RunAsync, *, timeout_s: float
    ) -> None:
        self._reload = reload
        self._clients = clients
        self._run_async = run_async
        self._timeout_s = timeout_s

    def __call__(self, version: int) -> None:
        self._run_async(named(self._ask("snapshot"), f"snapshot of version {version}"))
        self._reload.publish(version)
        try:
            self._run_async(named(self._ask("compare"), f"comparison of version {version}"))
        except EngineRejected as cause:
            raise WeightsDiffer(
                f"version {version} differs from the same weights loaded as a folder: {cause}"
            ) from cause

    def _ask(self, action: str) -> Coroutine[Any, Any, list[dict[str, Any]]]:
        return all_of(list(self._clients), lambda client: client.check_weights(action, timeout_s=self._timeout_s))
