"""`--rm-type remote_rm`: the reward is what a server answers to `POST {prompt, response, label}`.

Invariant: a server that is away, busy or broken is asked again, with growing pauses, a bounded number of times; a
server that refuses the request (4xx) is not. Either way the end is an answer or a `RewardError`.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from typing import Any

import aiohttp

from slime.data.sample import Sample
from slime.rollout.rewards.errors import RewardError

_BUSY = {408, 425, 429}


@dataclass(frozen=True)
class RemoteReward:
    """A reward server and how patiently it is asked."""

    url: str
    tries: int = 10
    timeout_s: float = 120.0
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0

    async def score(self, sample: Sample, response: str) -> Any:
        """The server's answer for one sample, as JSON values."""
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

    async def _ask(self, session: aiohttp.ClientSession, payload: dict[str, Any]) -> Any:
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
        """Doubling pauses, each shortened by chance, so that many waiters do not return at once."""
        longest = min(self.longest_pause_s, self.first_pause_s * 2 ** (attempt - 1))
        return longest * random.uniform(0.5, 1.0)
