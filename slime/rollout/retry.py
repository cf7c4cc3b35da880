"""Requests to the engines: retries after transient errors, and continuation of answers that were cut off.

Invariant: the result of one request is an answer of the dialect, complete or marked as aborted with the tokens sampled
so far, or an `EngineError`. `complete` is the only loop that continues an aborted answer; the generate function, the
requests of plugins and the turns of agents call it with what differs: how the rest is asked for, and where tokens go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import TypeVar

from slime.engine.http.client import EngineError, GenerateResult
from slime.engine.http.pool import EnginePool
from slime.engine.http.protocol import sampling_seed
from slime.rollout.gate import Ticket
from slime.storage.json_types import JsonMapping, JsonObject

T = TypeVar("T")

TRANSIENT_RETRIES = 3
FIRST_BACKOFF_S = 0.5
FAULTY_RETRIES = 8
MAX_BACKOFF_S = 10.0
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
    """Send a request and return what an engine sampled.

    In a fault-tolerant run, or with `on_ids`, which is called with the new token ids as they arrive, the answer is
    streamed: if the stream breaks, the answer counts as aborted and can be continued elsewhere. If it has no tokens,
    the request is sent again.
    """
    attempts = FAULTY_RETRIES if fault_tolerant else TRANSIENT_RETRIES + 1
    for attempt in range(attempts):
        if attempt:
            await asyncio.sleep(min(FIRST_BACKOFF_S * 2 ** (attempt - (not fault_tolerant)), MAX_BACKOFF_S))
        try:
            if fault_tolerant or on_ids is not None:
                return await pool.generate_resumable(payload, affinity_key, on_ids=on_ids)
            return await pool.generate_result(payload, affinity_key)
        except EngineError as error:
            if not error.transient or attempt == attempts - 1:
                raise
    raise AssertionError("unreachable: the last attempt returns or raises")


async def complete(
    rest: Callable[[], JsonObject | None],
    send: Callable[[JsonObject], Awaitable[T]],
    take: Callable[[T, bool], Awaitable[int | None]],
    *,
    ticket: Ticket | None,
    given_up: Callable[[], bool],
) -> None:
    """Sample one answer with as many requests as it takes: one that was cut off is continued from its tokens.

    `rest()` returns the request for the missing tokens, None if the answer may have no more. `send` sends it. `take`
    keeps what was sampled, and returns the number of new tokens if the answer was cut off, None if it is complete; its
    second argument is True if the tokens before it are not trained on, because the gate held the request of a ticket
    with `masks`. An answer that was cut off stays partial if `given_up()`.

    Each request of a ticket waits at its gate. An abort counts as one of the `MAX_RESUMES` only if the gate is open:
    a gate that closes cuts requests off itself.
    """
    aborts = 0
    while aborts < MAX_RESUMES:
        request = rest()
        if request is None:
            return
        if ticket is None:
            sampled = await take(await send(request), False)
        else:
            async with ticket.engine_request() as was_held:
                part = await send(request)
            sampled = await take(part, was_held and ticket.masks)
        if sampled is None or given_up():
            return
        if ticket is None or ticket.gate.is_open:
            aborts = 0 if sampled else aborts + 1
    raise AbortedTooOften(f"the engine aborted this request {MAX_RESUMES} times in a row without a new token")
