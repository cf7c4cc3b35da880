"""Scores from other servers: a reward server (`--rm-type remote_rm`) and the teacher of on-policy distillation.

A reward server returns the reward for `POST {prompt, response, label}`. Invariant: if the server is unreachable, busy
or returns a server error, the request is retried a limited number of times with growing pauses; if it refuses the
request (4xx), it is not retried. The result is an answer or a `RewardError`.

A teacher returns the log-probs of the tokens that the student sampled, at temperature 1 (raw logits). Invariant:
`teacher_log_probs` has one entry per response token, each for exactly the id that was sampled. The teacher sees
`sample.tokens`, so it must share the student's vocabulary.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from slime.data.sample import Sample
from slime.engine.http.client import EngineError, EngineProtocolError
from slime.engine.http.pool import EnginePool
from slime.engine.http.protocol import quote
from slime.errors import UserError
from slime.rollout.outcomes import FailureLog, mark_failed
from slime.rollout.rewards.worker_pool import RewardError
from slime.storage.json_types import JsonMapping, JsonObject

_BUSY = {408, 425, 429}


@dataclass(frozen=True)
class RemoteReward:
    """Client of a reward server, with its timeout and retries."""

    url: str
    tries: int = 10
    timeout_s: float = 120.0
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0

    async def score(self, sample: Sample, response: str) -> object:
        """Request the score of one sample; return the server's answer as a JSON value."""
        payload = {"prompt": sample.prompt, "response": response, "label": sample.label}
        problem = ""
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for attempt in range(self.tries):
                if attempt:
                    await asyncio.sleep(self._pause(attempt))
                try:
                    return await self._ask(session, payload)
                except TimeoutError:
                    problem = f"no answer within {self.timeout_s:g} s"
                except aiohttp.ClientError as error:
                    problem = f"{type(error).__name__}: {error}"
        raise RewardError(f"reward server {self.url}: gave up after {self.tries} tries ({problem})")

    async def _ask(self, session: aiohttp.ClientSession, payload: JsonMapping) -> object:
        """Send one request; a busy server raises an `aiohttp.ClientError`, a refusal a `RewardError`."""
        async with session.post(self.url, json=payload) as answer:
            text = await answer.text()
            if answer.status >= 500 or answer.status in _BUSY:
                raise aiohttp.ClientResponseError(
                    answer.request_info, answer.history, status=answer.status, message=text[:200]
                )
            if answer.status >= 400:
                raise RewardError(f"reward server {self.url}: refused with {answer.status}: {text[:200]}")
        try:
            return json.loads(text)
        except ValueError as error:
            raise RewardError(f"reward server {self.url}: answered {text[:80]!r}, which is not JSON") from error

    def _pause(self, attempt: int) -> float:
        """Seconds before a retry: doubling, with random jitter, so that many callers do not retry at once."""
        longest = min(self.longest_pause_s, self.first_pause_s * 2 ** (attempt - 1))
        return longest * random.uniform(0.5, 1.0)


TRIES = 4
FIRST_BACKOFF_S = 0.5


class Teacher:
    """A served model that returns log-probs and is never updated."""

    def __init__(self, pool: EnginePool, *, concurrency: int) -> None:
        self.pool = pool
        self._semaphore = asyncio.Semaphore(concurrency)

    @classmethod
    def at(cls, url: str, *, timeout_s: float, concurrency: int, api_key: str | None = None) -> Teacher:
        """Create a client for the teacher that is served at `url`."""
        pool = EnginePool([url.rstrip("/").removesuffix("/generate")], timeout_s=timeout_s, api_key=api_key)
        return cls(pool, concurrency=concurrency)

    async def log_probs(self, tokens: Sequence[int], response_length: int) -> list[float]:
        """Request the log-probs of the last `response_length` tokens, each given the tokens before it."""
        payload = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": max(0, len(tokens) - response_length - 1),
        }
        async with self._semaphore:
            answer = await self._ask(payload)
        found = input_log_probs(answer, list(tokens)[-response_length:])
        if found is None:
            raise EngineProtocolError(
                " ".join(self.pool.urls),
                "/generate",
                f"returned no meta_info.input_token_logprobs for the {response_length} requested tokens: "
                f"{quote(answer)}",
            )
        return found

    async def teach(self, samples: Sequence[Sample], failures: FailureLog) -> None:
        """Set `teacher_log_probs` of finished samples."""

        async def teach_one(sample: Sample) -> None:
            try:
                sample.teacher_log_probs = await self.log_probs(sample.token_array().tolist(), sample.response_length)
            except UserError:
                raise
            except EngineError as error:
                mark_failed([sample], failures.record("engine", error))

        def is_untaught(sample: Sample) -> bool:
            known = sample.column_array("teacher_log_probs")
            return known is None or len(known) != sample.response_length

        usable = (one for one in samples if one.status not in (Sample.Status.FAILED, Sample.Status.ABORTED))
        await asyncio.gather(*(teach_one(one) for one in usable if one.response_length and is_untaught(one)))

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self.pool.aclose()

    async def _ask(self, payload: JsonObject) -> JsonObject:
        """Send a request, retrying transient errors."""
        for attempt in range(TRIES - 1):
            try:
                return await self.pool.generate(payload)
            except EngineError as error:
                if not error.transient:
                    raise
            await asyncio.sleep(FIRST_BACKOFF_S * 2**attempt)
        return await self.pool.generate(payload)


def input_log_probs(answer: JsonMapping, response: list[int]) -> list[float] | None:
    """Extract the log-probs of the last input tokens; None if the answer does not have them for exactly these ids."""
    meta_info = answer.get("meta_info")
    entries = meta_info.get("input_token_logprobs") if isinstance(meta_info, dict) else None
    if not isinstance(entries, list) or len(entries) < len(response):
        return None
    entries = entries[len(entries) - len(response) :]
    if not all(isinstance(entry, list) and len(entry) >= 2 for entry in entries):
        return None
    if [entry[1] for entry in entries] != response:
        return None
    values = [entry[0] for entry in entries]
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        return None
    return [float(value) for value in values]
