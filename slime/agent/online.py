"""The driver's side of a live service: every dispatched sample is a slot that waits for an exchange of a client.

An exchange becomes the slot's sample: its tokens as they were sampled, the judge's reward, and, if the judge returned a
hint, the log-probs of the model for its own answer with the hint in the prompt.

`traffic_baseline` computes rewards of answers to different questions. Live traffic has one answer per prompt, so there
is no group to compare with; the other exchanges of the batch are the group: `r_i = R_i - mean_{j != i} R_j`. The
baseline of an answer does not depend on that answer, so the gradient stays unbiased. It has no state, so a resumed run
computes the same one.

Invariants: slots are filled in the order of their numbers. The store deletes an exchange once its slot's sample is in
the journal, and at once if it will not be trained on.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import heapq
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from slime.agent.conversation import chat_model
from slime.agent.interaction import Exchange, Verdict
from slime.agent.remote_session import agent_server
from slime.agent.server.control import AgentServerFailed
from slime.agent.session.records import BadRecord
from slime.agent.session.session import Session
from slime.cluster.watchdog import waiting
from slime.data.buffer.reader import Choice, reading
from slime.data.sample import Sample
from slime.rollout.gate import paused_sample_clock
from slime.rollout.generate import generate as generate_answer
from slime.rollout.outcomes import is_stale
from slime.rollout.rewards.remote import Teacher
from slime.rollout.runtime import RolloutRuntime, runtime_for
from slime.storage.json_types import JsonObject

JUDGE_FLAG = "--live-judge-path"
MAX_SERVER_STARTS = 3
"""How often in a row the agent server may die while a slot waits for its exchange."""

logger = logging.getLogger(__name__)


async def generate(
    args: Any, sample: Sample, sampling_params: JsonObject, evaluation: bool = False
) -> Sample | list[Sample]:
    """The generate function of a live run: fills `sample` with an exchange; evaluation prompts are sampled as usual."""
    runtime = runtime_for(args)
    if evaluation:
        return await generate_answer(runtime, sample, sampling_params)
    service = runtime.owned("live service", lambda: LiveService(runtime), LiveService.aclose)
    return await service.fill(sample)


class LiveService:
    """Fills slots with exchanges of clients and turns them into samples."""

    def __init__(self, runtime: RolloutRuntime) -> None:
        self._runtime = runtime
        self._endpoints = agent_server(runtime)
        self._turn = _SlotLock()
        self._is_clean = False
        self._judge = runtime.function(runtime.args.live_judge_path or "", flag=JUDGE_FLAG, params=("args", "exchange"))
        self.counts: Counter[str] = Counter()
        """Counts of taken exchanges by result: trained, stale, unlabelled, failed."""
        self._teacher = Teacher(runtime.pool, concurrency=runtime.args.sglang_server_concurrency)
        runtime.when_recorded.append(self._recorded)

    async def fill(self, slot: Sample) -> Sample:
        """Wait for an exchange and return the sample made from it for this slot."""
        assert slot.index is not None, "the data source numbers its samples"
        while True:
            exchange = await self._taken(slot.index)
            made = await self._judged(slot, exchange)
            if made is not None:
                self.counts["trained"] += 1
                return made
            await self._call("forget", id=exchange.id)

    async def aclose(self) -> None:
        """Log the results of the exchanges."""
        self._runtime.when_recorded.remove(self._recorded)
        logger.info("exchanges of the live service: %s", dict(self.counts))

    async def _judged(self, slot: Sample, exchange: Exchange) -> Sample | None:
        """The sample of an exchange; None if it is too old, cannot be read, or gives no evidence about the answer."""
        try:
            base = copy.copy(slot)
            base.prompt = [{"role": message.role, "content": message.content} for message in exchange.asked]
            session = Session.from_record(exchange.session)
            after = [{"role": message.role, "content": message.content} for message in exchange.followed_by]
            metadata = {"live": {"id": exchange.id, "followed_by": after}}
            [made] = session.samples(base, metadata=metadata, args=self._runtime.plugin_args)
        except BadRecord as error:
            logger.warning("an exchange is skipped: %s", error)
            self.counts["failed"] += 1
            return None
        if is_stale(self._runtime.args, [made], self._runtime.state.rollout_id or 0):
            self.counts["stale"] += 1
            return None
        path = str(self._runtime.args.live_judge_path)
        try:
            given = await self._runtime.call_function(self._judge, path, self._runtime.plugin_args, exchange)
            verdict = Verdict.of(given, f"{JUDGE_FLAG} {path}")
        except Exception as error:  # noqa: BLE001 - an exchange whose judge raises has no verdict
            self._runtime.failures.record("judge", error)
            self.counts["failed"] += 1
            return None
        if verdict is None:
            self.counts["unlabelled"] += 1
            return None
        made.reward = verdict.reward
        made.metadata["live"] |= {"hint": verdict.hint}
        if self._runtime.args.use_opd:
            made.teacher_log_probs = await self._hinted_log_probs(exchange, made, verdict.hint)
        return made

    async def _hinted_log_probs(self, exchange: Exchange, made: Sample, hint: str | None) -> list[float]:
        """The log-probs of the answer's tokens with the hint in the prompt; without a hint, the sampled log-probs."""
        if not hint:
            known = made.column_array("rollout_log_probs")
            return [] if known is None else known.tolist()
        asked = list(exchange.asked)
        last = max(place for place, message in enumerate(asked) if message.role == "user")
        asked[last] = replace(asked[last], content=f"{asked[last].content}{hint}")
        template = chat_model(self._runtime).template(self._runtime.args.apply_chat_template_kwargs or {})
        prompt = await asyncio.to_thread(template.prompt, asked, exchange.tools)
        response = made.token_array().tolist()[-made.response_length :]
        return await self._teacher.log_probs([*prompt.tolist(), *response], made.response_length)

    async def _taken(self, slot: int) -> Exchange:
        """Wait until it is this slot's turn, and then for an exchange from the store."""
        with paused_sample_clock(), waiting("clients of the live service", "for a finished exchange", timeout_s=None):
            async with self._turn.of(slot):
                await self._forget_recorded()
                while True:
                    record = await self._call("take", slot=slot)
                    if record is None:
                        continue
                    try:
                        return Exchange.from_record(record)
                    except BadRecord as error:
                        logger.warning("an exchange is skipped: %s", error)
                        await self._call("recorded", slot=slot)

    async def _call(self, name: str, **arguments: object) -> Any:
        for attempt in range(MAX_SERVER_STARTS):
            running = await self._endpoints.running()
            try:
                return await running.remote.call(f"live_{name}", **arguments)
            except AgentServerFailed:
                if not running.died.is_set() or attempt == MAX_SERVER_STARTS - 1:
                    raise
        raise AssertionError("the loop returns or raises")

    async def _recorded(self, dispatched: Sample) -> None:
        """Delete the exchange of a slot whose sample is in the journal."""
        if dispatched.index is not None:
            await self._call("recorded", slot=dispatched.index)

    async def _forget_recorded(self) -> None:
        """Delete exchanges that were journaled before a crash but not yet deleted from the store."""
        if self._is_clean:
            return
        self._is_clean = True
        folder = self._runtime.config.output_dir
        taken = await self._call("taken")
        if self._runtime.journal is None or folder is None or not taken:
            return

        def is_recorded(slot: int, name: str) -> bool:
            with reading(folder) as journal:
                found = [one.sample.metadata.get("live") for one in journal.samples(Choice(sample=slot))]
            return any(isinstance(live, Mapping) and live.get("id") == name for live in found)

        for slot, name in taken:
            if await asyncio.to_thread(is_recorded, slot, name):
                await self._call("forget", id=name)


class _SlotLock:
    """A lock that is granted to the waiter with the smallest number."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._count = itertools.count()

    @asynccontextmanager
    async def of(self, number: int) -> AsyncIterator[None]:
        """Hold the lock during a `with` block."""
        if self._is_taken:
            granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (number, next(self._count), granted))
            try:
                await granted
            except asyncio.CancelledError:
                if granted.done() and not granted.cancelled():
                    self._release()
                raise
        self._is_taken = True
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        """Grant the lock to the next waiter that was not cancelled."""
        while self._waiting:
            _, _, granted = heapq.heappop(self._waiting)
            if not granted.done():
                granted.set_result(None)
                return
        self._is_taken = False


def traffic_baseline(args: argparse.Namespace, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """`--custom-reward-post-process-path`: (raw rewards, rewards); failed samples get 0 and are not in the baseline."""
    raw = [0.0 if _failed(sample) else float(sample.get_reward_value(args)) for sample in samples]
    counted = [value for value, sample in zip(raw, samples, strict=True) if not _failed(sample)]
    total, others = sum(counted), len(counted) - 1
    if others < 1:
        return raw, [0.0] * len(raw)
    return raw, [
        0.0 if _failed(sample) else value - (total - value) / others for value, sample in zip(raw, samples, strict=True)
    ]


def _failed(sample: Sample) -> bool:
    return sample.status is Sample.Status.FAILED or sample.reward is None or sample.remove_sample
