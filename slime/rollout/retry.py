"""Sends one request to the engines of a pool, with retries after transient errors.

Invariant: the result is an answer of the dialect, complete or marked as aborted with the tokens sampled so far, or an
`EngineError`. The callers decide which requests may be sent, and how an aborted answer is continued.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable

from slime.engine.http.client import EngineError, GenerateResult
from slime.engine.http.pool import EnginePool
from slime.engine.http.protocol import sampling_seed
from slime.storage.json_types import JsonMapping, JsonObject

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

    @classmethod
    def by_engine(cls) -> AbortedTooOften:
        """Return the error for a request that engines aborted without a new token."""
        return cls(f"the engine aborted this request {MAX_RESUMES} times in a row without a new token")


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
    pool: EnginePool, payload: JsonObject, affinity_key: Hashable | None, *, fault_tolerant: bool
) -> GenerateResult:
    """Send a request and return what an engine sampled; in a fault-tolerant run a broken answer counts as aborted."""
    if fault_tolerant:
        return await stream_completion(pool, payload, affinity_key, fault_tolerant=True)
    for attempt in range(TRANSIENT_RETRIES):
        try:
            return await pool.generate_result(payload, affinity_key)
        except EngineError as error:
            if not error.transient:
                raise
        await asyncio.sleep(FIRST_BACKOFF_S * 2**attempt)
    return await pool.generate_result(payload, affinity_key)


async def stream_completion(
    pool: EnginePool,
    payload: JsonObject,
    affinity_key: Hashable | None,
    *,
    fault_tolerant: bool,
    on_ids: Callable[[list[int]], Awaitable[None]] | None = None,
) -> GenerateResult:
    """Send a request and stream its answer; `on_ids` is called with the new token ids as they arrive.

    An answer whose stream breaks counts as aborted and can be continued elsewhere. If it has no tokens, the request is
    sent again.
    """
    error: EngineError | None = None
    for attempt in range(FAULTY_RETRIES if fault_tolerant else TRANSIENT_RETRIES + 1):
        if attempt:
            await asyncio.sleep(min(FIRST_BACKOFF_S * 2 ** (attempt - (not fault_tolerant)), MAX_BACKOFF_S))
        try:
            result, error = await pool.generate_resumable(payload, affinity_key, on_ids=on_ids)
        except EngineError as raised:
            if not raised.transient:
                raise
            result, error = None, raised
        if result is not None and (error is None or len(result.id_array)):
            return result
    assert error is not None
    raise error
