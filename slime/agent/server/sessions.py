"""The open sessions of the agent server, by their keys.

Invariant: when a session ends, for any reason, its requests in flight fail at once and later ones fail as closed. The
session is handed over only when no request is left.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np

from slime.agent.messages import TurnRequest
from slime.agent.server.dialects import Kind, Problem
from slime.agent.server.request_limits import INLINE_CHARACTERS, WORKERS, Intake, IntakeLimits
from slime.agent.server.settings import Opening
from slime.agent.session.limits import Limits
from slime.agent.session.session import Prompt, Session
from slime.agent.session.special_tokens import iter_texts
from slime.agent.session.template import ChatModel
from slime.agent.session.tree import Decision, Turn, decide
from slime.agent.session.turn import EngineSampler, OnEvents, RecordedTurn, take_turn
from slime.agent.session.turn_journal import Attempt, TurnJournal
from slime.engine.http.pool import EnginePool
from slime.rollout.gate import Gate, RequestSeeds, Ticket
from slime.storage.json_types import JsonMapping

MOST_TURNS = 4096
"""Limit for sessions without their own: a request is compared with every turn that it may continue."""
MAX_CLOSED_SESSIONS = 16384
"""Number of closed sessions whose clients get the reason; older ones count as unknown."""


class OpenSession:
    """A session with its sampler and its requests in flight."""

    def __init__(
        self,
        session: Session,
        params: JsonMapping,
        sampler: EngineSampler,
        model: ChatModel,
        intake: Intake,
    ) -> None:
        self.session = session
        self.intake = intake
        self.ticket: Ticket | None = None
        self.names: frozenset[str] = frozenset()
        self.journaled: Callable[[Turn], Awaitable[None]] | None = None
        """Stores a turn before the client receives the end of its answer."""
        self.continued: Callable[[Prompt], Awaitable[None]] | None = None
        """Called with each prompt before it is answered; the answer ends after the returned awaitable."""
        self.noted: set[str] = set()
        """Notes that were logged about its requests: a client sends the same ignored fields in every turn."""
        self.failure: str | None = None
        """The error of the last turn that could not be sampled."""
        self._params, self._sampler, self._model = params, sampler, model
        self.ended: asyncio.Future[Problem] = asyncio.get_running_loop().create_future()
        self._answering: set[asyncio.Task[RecordedTurn]] = set()

    async def begin(
        self, request: TurnRequest, on_events: OnEvents | None
    ) -> tuple[Prompt, asyncio.Task[RecordedTurn]]:
        """Start to sample one more turn; cancelling the task abandons it. Raises `SessionRefusal`."""
        prompt = self.session.prepare(request, *await self._place_of(request))
        before_end = [] if self.journaled is None else [self.journaled]
        if self.continued is not None:
            continuing = self.continued(prompt)
            before_end.insert(0, lambda _: continuing)

        def done(task: asyncio.Task[RecordedTurn]) -> None:
            self._answering.discard(task)
            self.session.abandon(prompt)  # a task that is cancelled before its first step has not done it

        task = asyncio.create_task(
            take_turn(self.session, request, prompt, self._sampler, self._model, self._params, on_events, before_end)
        )
        self._answering.add(task)
        task.add_done_callback(done)
        return prompt, task

    async def count_tokens(self, request: TurnRequest) -> int:
        """The number of tokens that the prompt of this request would have."""
        return self.session.count_tokens(request, *await self._place_of(request))

    async def _place_of(self, request: TurnRequest) -> tuple[Decision, np.ndarray | None]:
        """The current place of a request in the tree; if its new text is long, also the ids, made in a thread."""
        while True:
            if self.ended.done():
                raise self.ended.result().again()
            place = decide(self.session.tree, request)
            if place.context is not None:
                return place, None
            characters = sum(map(len, iter_texts(request.tools))) if place.turn is None else 0
            for message in place.new:
                characters += len(message.content) + len(message.reasoning or "")
                characters += sum(len(call.arguments) for call in message.tool_calls)
            if characters <= INLINE_CHARACTERS:
                return place, None
            ids = await self.intake.run(partial(self.session.render, place, request))
            now = decide(self.session.tree, request)
            if now.turn is place.turn and len(now.new) == len(place.new):  # else a turn was recorded meanwhile
                return now, ids

    @property
    def is_answering(self) -> bool:
        """True while a turn is being sampled."""
        return bool(self._answering)

    async def hold(self) -> None:
        """Close the gate and move the requests in flight from the engines to it; returns when all of them are there."""
        if self.ticket is not None:
            self.ticket.gate.close()
            await self._sampler.leave_engines()
            await self.ticket.gate.wait_until_idle()

    def release(self) -> None:
        """Open the gate again; masks the tokens sampled before, if the ticket says so."""
        if self.ticket is None or self.ticket.gate.is_open:
            return
        if self.ticket.masks:
            for turn in self.session.tree.turns.values():
                turn.meta_info["masked_until"] = len(turn.ids)
        self.ticket.gate.open()

    async def end(self, problem: Problem) -> None:
        """Close the session with `problem` for its clients, and wait until no turn is being sampled."""
        self.session.close()
        if not self.ended.done():
            self.ended.set_result(problem)
        for task in self._answering:
            task.cancel()
        if self._answering:
            await asyncio.wait(set(self._answering))


class Sessions:
    """Sessions by key."""

    def __init__(
        self,
        model: ChatModel,
        pool: EnginePool,
        *,
        fault_tolerant: bool = False,
        version: str | None = None,
        journal: TurnJournal | None = None,
    ) -> None:
        self.model, self._pool, self._fault_tolerant, self._journal = model, pool, fault_tolerant, journal
        self.version = version
        """The last known version of the weights that all engines have."""
        self._open: dict[str, OpenSession] = {}
        self._closed: OrderedDict[str, Problem] = OrderedDict()
        self.opened = 0
        self.workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="agents")
        """Threads for work on large requests."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def warning(self) -> str | None:
        """A warning for the user of the run about the model's tool calls."""
        return self.model.warning

    def open(self, opening: Opening) -> OpenSession:
        """Open a new or resumed session; raises `ValueError` if the key is in use."""
        if opening.key in self._open or (opening.key in self._closed and opening.record is None):
            raise ValueError("a session with this key exists already")
        self._closed.pop(opening.key, None)
        template = self.model.template(opening.template_kwargs)
        limits = Limits(**opening.limits)
        limits = replace(limits, max_turns=MOST_TURNS) if limits.max_turns is None else limits
        if opening.record is None:
            session = Session(opening.key, template, limits=limits, strict=opening.strict)
        else:
            record = {**opening.record, "key": opening.key, "closed": False}
            session = Session.from_record(record, template, limits=limits, strict=opening.strict)
        ticket = Ticket(Gate(asyncio.Semaphore(1)), masks=opening.masks) if opening.held else None
        draws = RequestSeeds(opening.params.get("sampling_seed"), begun=len(session.tree.turns))
        sampler = EngineSampler(
            self._pool,
            fault_tolerant=self._fault_tolerant,
            ticket=ticket,
            version=lambda: self.version,
            draws=draws.apart,
            routing=opening.routing,
        )
        intake = self.intake(limits.max_context)
        made = OpenSession(session, opening.params, sampler, self.model, intake)
        made.ticket, made.names = ticket, frozenset(opening.names)
        if self._journal is not None and opening.attempt is not None:
            append, attempt = self._journal.append, Attempt(**opening.attempt)
            made.journaled = lambda turn: append(session.key, attempt, session.turn_record(turn))
        self._open[opening.key] = made
        self.opened += 1
        return made

    def intake(self, context: int | None) -> Intake:
        """The request limits of one session whose prompts have at most `context` tokens."""
        return Intake(context or self.model.context, self.workers)

    def common_intake(self, context: int | None, requests: int, whose: str) -> Intake:
        """The common limits of all requests whose session is unknown until their bodies are read."""
        context = context or self.model.context
        limits = IntakeLimits() if context is None else IntakeLimits.of_context(context)
        return Intake(context, self.workers, limits=replace(limits, requests=requests), whose=whose)

    def find(self, key: str | None) -> OpenSession:
        """The open session of a key; raises `Problem`."""
        if key is not None and (found := self._open.get(key)) is not None:
            return found
        if key is not None and (problem := self._closed.get(key)) is not None:
            raise problem.again()
        raise Problem(Kind.NO_SESSION, "no session has this key: the run opens sessions, clients cannot")

    async def close(self, key: str, problem: Problem) -> OpenSession:
        """End a session and keep only the reason; raises `KeyError` if no session has this key."""
        ending = self._open.pop(key)
        self._closed[key] = problem
        if len(self._closed) > MAX_CLOSED_SESSIONS:
            self._closed.popitem(last=False)
        await ending.end(problem)
        return ending

    async def close_all(self, problem: Problem) -> None:
        """End all sessions."""
        await asyncio.gather(*(self.close(key, problem) for key in list(self._open)))
        self.workers.shutdown(wait=False, cancel_futures=True)
