"""Continuation of answers that were cut off: how often, and with which seeds.

The generate function, the requests of plugins and the turns of agents each ask for the rest of an answer in a loop: a
request waits at the gate of its ticket, its tokens are kept, and `count_abort` limits the aborts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from contextlib import nullcontext
from typing import TypeVar

from slime.engine.http.client import GenerateResult
from slime.engine.http.pool import EnginePool
from slime.engine.http.protocol import sampling_seed
from slime.rollout.gate import Ticket
from slime.storage.json_types import JsonMapping, JsonObject

T = TypeVar("T")

MAX_RESUMES = 16
"""How often in a row engines may abort a request that the run still needs, without a new token.

With elastic engines a long answer is cut off often, but makes progress in between.
"""


class AbortedTooOften(Exception):
    """Engines repeatedly aborted a request that the run still needs."""


class RequestSeeds:
    """Gives each request of a sample its own seed, derived from the seed in the sample's sampling parameters."""

    def __init__(self, seed: int | None, begun: int = 0) -> None:
        self._seed = seed
        self._requests = begun

    def apart(self, params: JsonMapping) -> JsonObject:
        """Return the parameters of the next request; if they have the sample's seed, it is replaced by a new one."""
        if self._seed is None or params.get("sampling_seed") != self._seed:
            return dict(params)
        self._requests += 1
        own = self._seed if self._requests == 1 else sampling_seed(self._seed, "request", self._requests)
        return {**params, "sampling_seed": own}


async def request_completion(
    pool: EnginePool,
    payload: JsonObject,
    affinity_key: Hashable | None,
    *,
    fault_tolerant: bool,
    on_ids: Callable[[list[int]], Awaitable[None]] | None = None,
) -> GenerateResult:
    return await pool.sample(payload, affinity_key, fault_tolerant=fault_tolerant, on_ids=on_ids)


async def complete(
    rest: Callable[[], JsonObject | None],
    send: Callable[[JsonObject], Awaitable[T]],
    take: Callable[[T, bool], Awaitable[int | None]],
    *,
    ticket: Ticket | None,
    given_up: Callable[[], bool],
) -> None:
    aborts = 0
    while (request := rest()) is not None:
        async with nullcontext(False) if ticket is None else ticket.engine_request() as is_masked:
            part = await send(request)
        sampled = await take(part, is_masked)
        if sampled is None or given_up():
            return
        aborts = count_abort(aborts, sampled, ticket)


def count_abort(aborts: int, sampled: int, ticket: Ticket | None) -> int:
    """Return the number of aborts in a row without a new token, after one more that brought `sampled` tokens.

    Raises `AbortedTooOften` instead of counting the `MAX_RESUMES`th. An abort counts only if the ticket's gate is open:
    a gate that closes cuts requests off itself.
    """
    if ticket is not None and not ticket.gate.is_open:
        return aborts
    aborts = 0 if sampled else aborts + 1
    if aborts == MAX_RESUMES:
        raise AbortedTooOften(f"the engine aborted this request {MAX_RESUMES} times in a row without a new token")
    return aborts
