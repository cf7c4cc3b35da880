"""One turn of a session: prepared, sampled, read while it is sampled, recorded.

Invariant: a turn that was begun is either recorded, before whoever asked hears of its end, or abandoned; and the
message it was read as is what its events told.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime.agent.messages import Message, ToolCall, TurnRequest
from slime.agent.session.sampler import SampledAnswer, Sampler
from slime.agent.session.session import Prompt, SampledTurn, Session
from slime.agent.session.tree import Turn
from slime.models.parsers.events import Event, Output, OutputParser, gathered
from slime.rollout.outcomes import GivenUp

OnEvent = Callable[[Event], Awaitable[None]]
ParserFactory = Callable[[TurnRequest, np.ndarray], OutputParser]
"""A parser for the answer to a request whose prompt has these ids."""

CLIENTS_CHOICE = frozenset({"stop", "json_schema", "regex", "ebnf", "structural_tag"})
"""What a client may ask for where the trainer leaves it open: where an answer ends and its form, not its odds."""


@dataclass(frozen=True)
class TakenTurn:
    """A turn that is recorded, and all that an answer to the client needs to tell of it."""

    turn: Turn
    prompt: Prompt
    output: Output
    answer: SampledAnswer
    finish_reason: str


async def take_turn(
    session: Session,
    request: TurnRequest,
    sampler: Sampler,
    parser_factory: ParserFactory,
    params: Mapping[str, Any],
    on_event: OnEvent | None = None,
) -> Turn:
    """One more turn of `session`; raises what `Session.prepare` and the sampler raise."""
    prompt = session.prepare(request)
    taken = await take_prepared(session, request, prompt, sampler, parser_factory, params, on_event)
    return taken.turn


async def take_prepared(
    session: Session,
    request: TurnRequest,
    prompt: Prompt,
    sampler: Sampler,
    parser_factory: ParserFactory,
    params: Mapping[str, Any],
    on_event: OnEvent | None = None,
) -> TakenTurn:
    """The same for a turn that was prepared; it is recorded under the prompt's `turn_id`."""
    reading = _Reading(parser_factory(request, prompt.ids), _own_stops(params, request), on_event)
    on_text = None if on_event is None else reading.came
    try:
        asked = turn_params(params, request, prompt, session)
        known = max(0, len(prompt.ids) - len(prompt.node.ids) - 1)  # the last token of a turn was never computed
        answer = await sampler.sample(prompt.ids, asked, affinity=session.key, on_text=on_text, known=known)
        if on_event is None:
            reading.take(answer.text)
        await reading.end()
        if answer.finish_reason == "abort":
            raise GivenUp("the rollout was given up while this turn was sampled")
        turn = reading.turn(answer, prompt.turn_id)
        return TakenTurn(session.record(prompt, turn), prompt, reading.output, answer, turn.finish_reason)
    except BaseException:
        session.abandon(prompt, reading.unfinished(prompt.turn_id))
        raise


def turn_params(params: Mapping[str, Any], request: TurnRequest, prompt: Prompt, session: Session) -> dict[str, Any]:
    """The trainer's sampling parameters, the least of all limits, and what the client may choose."""
    merged = {
        name: value
        for name, value in request.params.items()
        if name in CLIENTS_CHOICE and params.get(name) is None and value is not None
    }
    merged = {**params, **merged}
    bounds = [bound for bound in (params.get("max_new_tokens"), prompt.max_new_tokens) if bound is not None]
    if bounds:
        merged["max_new_tokens"] = min(bounds)
    if merged.get("min_new_tokens") and bounds:
        merged["min_new_tokens"] = min(merged["min_new_tokens"], merged["max_new_tokens"])
    stops = session.template.stop_ids if session.template is not None else frozenset()
    merged["stop_token_ids"] = sorted({*(params.get("stop_token_ids") or ()), *stops})
    return merged


def _own_stops(params: Mapping[str, Any], request: TurnRequest) -> tuple[str, ...]:
    """The texts at which the client wants its answer to end, and which it does not want to see."""
    stop = None if params.get("stop") is not None else request.params.get("stop")
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


class _Reading:
    """An answer as it is read: text in, events out."""

    def __init__(self, parser: OutputParser, stops: Sequence[str], on_event: OnEvent | None) -> None:
        self._parser = parser
        self._on_event = on_event
        self._stops = stops
        self._held = ""
        self._is_stopped = False
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._events: list[Event] = []
        self._told = 0

    @property
    def output(self) -> Output:
        return gathered(self._events)

    async def came(self, text: str, ids: list[int]) -> None:
        """More of it was sampled."""
        self._ids += ids
        self.take(text)
        await self._tell()

    def take(self, text: str) -> None:
        """Read on; what may be the beginning of a stop text waits."""
        self._texts.append(text)
        text = self._held + text
        self._held = ""
        if not self._stops:
            self._feed(text)
            return
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._feed(text[: min(found)])
            self._is_stopped = True
            return
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        self._feed(text[: len(text) - kept])

    async def end(self) -> None:
        """Nothing follows."""
        self._feed(self._held)
        self._events += self._parser.end()
        await self._tell()

    def turn(self, answer: SampledAnswer, reference: str) -> SampledTurn:
        """All of it, as it is recorded."""
        output = self.output
        finish = "tool_calls" if output.calls and answer.finish_reason == "stop" else answer.finish_reason
        message = message_of(output, reference)
        text, ill_formed = "".join(self._texts), output.ill_formed
        return SampledTurn(
            answer.ids, answer.log_probs, finish, answer.meta_info, message, text=text, ill_formed=ill_formed
        )

    def unfinished(self, reference: str) -> SampledTurn | None:
        """What is known of a turn that nobody waits for any more; its log-probs never came."""
        if not self._ids:
            return None
        ids = np.array(self._ids, dtype=np.int32)
        message = message_of(self.output, reference)
        return SampledTurn(ids, np.zeros(len(ids), dtype=np.float32), "abort", {}, message)

    def _feed(self, text: str) -> None:
        if text and not self._is_stopped:
            self._events += self._parser.feed(text)

    async def _tell(self) -> None:
        while self._told < len(self._events):
            event = self._events[self._told]
            self._told += 1
            if self._on_event is not None:
                await self._on_event(event)


def message_of(output: Output, reference: str | None) -> Message:
    """What was sampled, as the message that a client is going to echo."""
    calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in output.calls)
    return Message("assistant", output.text, output.reasoning, calls, reference=reference)


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`."""
    for count in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-count:]):
            return count
    return 0
