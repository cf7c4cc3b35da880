"""The gate between training samples and the engines: open while a rollout collects, closed between two rollouts.

With `--partial-rollout` groups with a custom generate function hold a ticket: they stay alive while the gate is closed.
Invariant: nothing with a ticket is at an engine while the gate is closed and idle. What a request had sampled when it
was cut off is kept and continued as soon as the gate opens, and whoever sent it gets one answer, as if nothing had
happened. Evaluation passes at all times.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.engine.http.protocol import (
    answered_ids,
    continued_payload,
    is_single_request,
    joined_answers,
    note_first_version,
    was_aborted,
)
from slime.waits import waiting

if TYPE_CHECKING:
    from slime.rollout.state import GenerateState

MOST_RESUMES = 16
"""How often in a row an engine may abort a request that nobody here has given up."""
HALF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"

evaluating: ContextVar[bool] = ContextVar("evaluating", default=False)
_ticket: ContextVar[Ticket | None] = ContextVar("ticket", default=None)
_deadline: ContextVar[asyncio.Timeout | None] = ContextVar("deadline", default=None)


class SampleTimeout(Exception):
    """A sample was not generated in time."""


class AbortedTooOften(Exception):
    """The engine kept aborting a request that nobody here had given up."""


@contextmanager
def as_evaluation() -> Iterator[None]:
    """What runs in the body, and the tasks it starts, samples for an evaluation: it is never held nor given up."""
    before = evaluating.set(True)
    try:
        yield
    finally:
        evaluating.reset(before)


@asynccontextmanager
async def sample_deadline(seconds: float, who: str) -> AsyncIterator[None]:
    """Raises `SampleTimeout` when the body takes longer, not counting the time it waits at the gate."""
    timeout = asyncio.timeout(seconds)
    try:
        async with timeout:
            before = _deadline.set(timeout)
            try:
                yield
            finally:
                _deadline.reset(before)
    except TimeoutError as error:
        if not timeout.expired():
            raise  # the body's own
        raise SampleTimeout(f"{who} did not end within {seconds:g} s (--rollout-sample-timeout)") from error


class Gate:
    """Open or closed, and how many requests with a ticket are at the engines.

    Whoever waits here gives its seat (of the limit on samples under way) to others and takes one before it goes on.
    """

    def __init__(self, seats: asyncio.Semaphore) -> None:
        self._seats = seats
        self._owed = 0
        self._in_flight = 0
        self._opened = asyncio.Event()
        self._opened.set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def open(self) -> None:
        """Let everybody through."""
        self._opened.set()

    def close(self) -> None:
        """Let nobody through; those at the engines are still there (`wait_until_idle`)."""
        self._opened.clear()

    async def wait_until_idle(self) -> None:
        """Until no request with a ticket is at an engine."""
        await self._idle.wait()

    async def pass_through(self) -> bool:
        """Wait until the gate is open; whether it was closed."""
        waited = False
        while not self.is_open:  # once more: it may have been closed again while there was no seat
            waited = True
            resume_deadline = _stop_deadline()
            self._give_seat()
            try:
                with waiting("the next rollout", "before it may ask an engine", timeout_s=None):
                    await self._opened.wait()
                    await self._seats.acquire()
            except BaseException:
                self._owed += 1  # whoever is cancelled gives its seat back a second time on its way out
                raise
            resume_deadline()
        return waited

    def arrived_at_engine(self) -> None:
        """Count a request."""
        self._in_flight += 1
        self._idle.clear()

    def left_engine(self) -> None:
        """Count it no more."""
        self._in_flight -= 1
        if not self._in_flight:
            self._idle.set()

    def _give_seat(self) -> None:
        if self._owed:
            self._owed -= 1
        else:
            self._seats.release()


def _stop_deadline() -> Callable[[], None]:
    """Stop the clock of the sample that the running code belongs to; what is returned sets it going again."""
    timeout, loop = _deadline.get(), asyncio.get_running_loop()
    when = None if timeout is None else timeout.when()
    if timeout is None or when is None:
        return lambda: None
    left = when - loop.time()
    timeout.reschedule(None)
    return lambda: timeout.reschedule(loop.time() + left)


@dataclass(eq=False)
class Ticket:
    """What a group holds that may wait at the gate. `masks`: tokens of earlier rollouts are not trained on."""

    state: GenerateState
    masks: bool = False
    in_flight: int = 0
    is_used: bool = False
    thrown_away_tokens: int = 0

    @property
    def gate(self) -> Gate:
        return self.state.gate

    def context(self) -> Context:
        """A context for the group's task, in which `ticket_here` finds this ticket."""
        context = copy_context()
        context.run(_ticket.set, self)
        return context

    @asynccontextmanager
    async def engine_request(self) -> AsyncIterator[bool]:
        """One request, counted while the body lasts; begins when the gate is open, and says whether it was closed."""
        self.is_used = True
        waited = await self.gate.pass_through()
        self.in_flight += 1
        self.gate.arrived_at_engine()
        try:
            yield waited
        finally:
            self.in_flight -= 1
            self.gate.left_engine()


def ticket_here() -> Ticket | None:
    """The ticket of the group that the running code belongs to; evaluation needs none."""
    return None if evaluating.get() else _ticket.get()


class WholeAnswer:
    """The answer to one `/generate` request, however often it is cut off."""

    def __init__(self, state: GenerateState, payload: Mapping[str, Any]) -> None:
        self._state = state
        self._payload = payload
        self._ticket = ticket_here()
        self._so_far: dict[str, Any] | None = None

    async def get(self, send: Callable[[Any], Awaitable[Any]]) -> Any:
        """Send the request, and what is left of it whenever it was aborted.

        When the rollout itself is given up, what there is by then is the answer, as an aborted one. So it is when the
        request has a `rid` of its own, by which its sender may have aborted it.
        """
        aborts = 0
        while True:
            answer = await self._next_part(send)
            if not _is_cut(answer) or self._state.aborted:
                return answer
            if self._ticket is None or self._ticket.gate.is_open:
                if self._payload.get("rid") is not None:
                    return answer
                aborts += 1
                if aborts == MOST_RESUMES:
                    raise AbortedTooOften(f"the engine aborted this request {MOST_RESUMES} times")

    async def _next_part(self, send: Callable[[Any], Awaitable[Any]]) -> Any:
        """The answer as far as it is there after one more request."""
        sampled = self._sampled()
        request: Any = self._payload
        if self._so_far is not None:
            request = continued_payload(self._payload, self._prompt_ids(), sampled)
            if not request["sampling_params"]["max_new_tokens"]:
                self._so_far["meta_info"]["finish_reason"] = {"type": "length", "length": len(sampled)}
                return self._so_far
        if self._ticket is None:
            return self._with(await self._sent(send, request))
        async with self._ticket.engine_request() as was_held:
            part = await self._sent(send, request)
        answer = self._with(part)
        if was_held and sampled and self._ticket.masks:
            answer["meta_info"]["masked_until"] = len(sampled)
        return answer

    async def _sent(self, send: Callable[[Any], Awaitable[Any]], request: Any) -> Any:
        version = self._state.weight_version
        answer = await send(request)
        for one in _each(answer):
            if isinstance(one, dict) and isinstance(one.get("meta_info"), dict):
                note_first_version(one["meta_info"], version)
        return answer

    def _with(self, part: Any) -> Any:
        """The parts so far and this one; a cut one that cannot be continued is forgotten and asked for again."""
        if self._so_far is not None:
            part = _mended(self._state.tokenizer, joined_answers(self._so_far, part), self._so_far, self._payload)
        can_go_on = isinstance(part, dict) and is_single_request(self._payload) and "meta_info" in part
        if can_go_on and answered_ids(part) is not None:
            self._so_far = part
        elif _is_cut(part) and self._ticket is not None:
            self._ticket.thrown_away_tokens += sum(_completion_tokens(one) for one in _each(part))
        return part

    def _sampled(self) -> list[int]:
        return [] if self._so_far is None else answered_ids(self._so_far) or []

    def _prompt_ids(self) -> list[int]:
        ids = self._payload.get("input_ids")
        return list(ids) if ids is not None else self._state.tokenizer.encode(self._payload["text"])


def _each(answer: Any) -> list[Any]:
    """The answers to all prompts of a request."""
    return answer if isinstance(answer, list) else [answer]


def _is_cut(answer: Any) -> bool:
    return any(was_aborted(one) for one in _each(answer))


def _completion_tokens(answer: Any) -> int:
    return int(answer["meta_info"].get("completion_tokens") or 0)


def _mended(
    tokenizer: Any, joined: dict[str, Any], first: Mapping[str, Any], payload: Mapping[str, Any]
) -> dict[str, Any]:
    """The joined text where the cut went through the bytes of one character; one that lost its stop word is left."""
    params = payload.get("sampling_params") or {}
    reason = joined["meta_info"].get("finish_reason") or {}
    is_trimmed = "matched" in reason and not params.get("no_stop_trim")
    if not str(first.get("text", "")).endswith(HALF_A_CHARACTER) or is_trimmed:
        return joined
    ids = answered_ids(joined) or []
    return {**joined, "text": tokenizer.decode(ids, skip_special_tokens=params.get("skip_special_tokens", True))}
