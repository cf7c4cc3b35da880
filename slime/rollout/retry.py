"""One request at the engines of a pool, sent again while that may help.

Invariant: what comes back is an answer of the dialect, complete or marked as aborted with what was sampled until then;
or an `EngineError`. Who may ask, and what becomes of an aborted answer, is not decided here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Any

from slime.engine.http.client import EngineError, GenerateResult
from slime.engine.http.pool import EnginePool
from slime.engine.http.protocol import sampling_seed

TRANSIENT_RETRIES = 3
FIRST_BACKOFF_S = 0.5
FAULTY_RETRIES = 8
MOST_BACKOFF_S = 10.0
MOST_RESUMES = 16
"""How often in a row engines may abort a request that nobody here has given up, without one more token of it. Where
engines come and go a long answer is cut off often, and gets on all the same."""


class AbortedTooOften(Exception):
    """The engine kept aborting a request that nobody here had given up."""

    @classmethod
    def by_engine(cls) -> AbortedTooOften:
        return cls(f"the engine aborted this request {MOST_RESUMES} times in a row without a new token")


class Draws:
    """The seed that a sample's sampling parameters carry, and how many requests have been made with it."""

    def __init__(self, seed: int | None, begun: int = 0) -> None:
        self._seed = seed
        self._requests = begun

    def apart(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of one more request, with a seed of its own if they carry this one."""
        if self._seed is None or params.get("sampling_seed") != self._seed:
            return dict(params)
        self._requests += 1
        own = self._seed if self._requests == 1 else sampling_seed(self._seed, "request", self._requests)
        return {**params, "sampling_seed": own}


async def asked(
    pool: EnginePool, payload: dict[str, Any], affinity_key: Hashable | None, *, fault_tolerant: bool
) -> GenerateResult:
    """What an engine sampled; in a fault-tolerant run an answer that broke off counts as aborted."""
    if fault_tolerant:
        return await asked_in_pieces(pool, payload, affinity_key, fault_tolerant=True)
    for attempt in range(TRANSIENT_RETRIES):
        try:
            return await pool.generate_result(payload, affinity_key)
        except EngineError as error:
            if not error.transient:
                raise
        await asyncio.sleep(FIRST_BACKOFF_S * 2**attempt)
    return await pool.generate_result(payload, affinity_key)


async def asked_in_pieces(
    pool: EnginePool,
    payload: dict[str, Any],
    affinity_key: Hashable | None,
    *,
    fault_tolerant: bool,
    on_ids: Callable[[list[int]], Awaitable[None]] | None = None,
) -> GenerateResult:
    """The same, streamed: `on_ids` hears of the ids as they come.

    An answer that broke off counts as aborted and can be continued elsewhere; one that brought nothing is asked again.
    """
    error: EngineError | None = None
    for attempt in range(FAULTY_RETRIES if fault_tolerant else TRANSIENT_RETRIES + 1):
        if attempt:
            await asyncio.sleep(min(FIRST_BACKOFF_S * 2 ** (attempt - (not fault_tolerant)), MOST_BACKOFF_S))
        try:
            result, error = await pool.generate_kept(payload, affinity_key, on_ids=on_ids)
        except EngineError as raised:
            if not raised.transient:
                raise
            result, error = None, raised
        if result is not None and (error is None or len(result.id_array)):
            return result
    assert error is not None
    raise error
