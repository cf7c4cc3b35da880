"""One turn of a session: prepares the prompt, samples the answer, parses it while it grows, and records it.

Invariants: a turn that was begun is either recorded, before its caller gets the result, or abandoned. The message of a
turn is the sum of its parser events.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from slime.agent.messages import Message, ToolCall, TurnRequest
from slime.agent.session.sampler import Sampler
from slime.agent.session.session import Prompt, SampledTurn, Session
from slime.agent.session.tree import Turn
from slime.engine.http.protocol import GenerateResult
from slime.models.parsers.events import Event, OutputParser, ParsedOutput, gathered
from slime.rollout.outcomes import GivenUp
from slime.storage.json_types import JsonMapping, JsonObject

OnEvent = Callable[[Event], Awaitable[None]]
ParserFactory = Callable[[TurnRequest, np.ndarray], OutputParser]
"""Makes the parser for the answer to a request whose prompt has these ids."""

CLIENT_PARAMS = frozenset({"stop", "json_schema", "regex", "ebnf", "structural_tag"})
"""Sampling parameters that a client may set if the trainer does not: stop texts and the output format.

Parameters that change the token probabilities are not among them.
"""


@dataclass(frozen=True)
class RecordedTurn:
    """A recorded turn, with everything that the answer to the client is built from."""

    turn: Turn
    prompt: Prompt
    output: ParsedOutput
    answer: GenerateResult
    finish_reason: str


async def take_turn(
    session: Session,
    request: TurnRequest,
    sampler: Sampler,
    parser_factory: ParserFactory,
    params: JsonMapping,
    on_event: OnEvent | None = None,
) -> Turn:
    """Prepare, sample and record one more turn of `session`; raises what `Session.prepare` and the sampler raise."""
    prompt = session.prepare(request)
    taken = await take_prepared_turn(session, request, prompt, sampler, parser_factory, params, on_event)
    return taken.turn


async def take_prepared_turn(
    session: Session,
    request: TurnRequest,
    prompt: Prompt,
    sampler: Sampler,
    parser_factory: ParserFactory,
    params: JsonMapping,
    on_event: OnEvent | None = None,
) -> RecordedTurn:
    """Sample and record a turn that was prepared; it is recorded under the prompt's `turn_id`.

    The answer ends at the client's stop texts, unless the trainer sets its own, and does not contain them.
    """
    parser = parser_factory(request, prompt.ids)
    stop = None if params.get("stop") is not None else request.params.get("stop")
    reading = _AnswerReader(parser, (stop,) if isinstance(stop, str) else tuple(stop or ()), on_event)
    on_text = None if on_event is None else reading.on_tokens
    try:
        asked = turn_params(params, request, prompt, session)
        known = max(0, len(prompt.ids) - len(prompt.node.ids) - 1)  # the engine never computed the last token of a turn
        answer = await sampler.sample(prompt.ids, asked, affinity=session.key, on_text=on_text, known=known)
        if on_event is None:
            reading.take(answer.text)
        await reading.end()
        if answer.finish_type == "abort":
            raise GivenUp("the rollout was given up while this turn was sampled")
        turn = reading.turn(answer, prompt.turn_id)
        return RecordedTurn(session.record(prompt, turn), prompt, reading.output, answer, turn.finish_reason)
    except BaseException:
        session.abandon(prompt, reading.unfinished(prompt.turn_id))
        raise


def turn_params(params: JsonMapping, request: TurnRequest, prompt: Prompt, session: Session) -> JsonObject:
    """Merge the trainer's sampling parameters, the smallest of all limits, and the parameters that a client may set."""
    merged = {
        name: value
        for name, value in request.params.items()
        if name in CLIENT_PARAMS and params.get(name) is None and value is not None
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


class _AnswerReader:
    """Parses an answer while it is sampled: text in, events out."""

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
    def output(self) -> ParsedOutput:
        return gathered(self._events)

    async def on_tokens(self, text: str, ids: list[int]) -> None:
        """Handle a sampled piece of the answer and report the new events."""
        self._ids += ids
        self.take(text)
        await self._tell()

    def take(self, text: str) -> None:
        """Parse more text; the beginning of a possible stop text is held back."""
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
        """Parse the held-back text, end the parser, and report the remaining events."""
        self._feed(self._held)
        self._events += self._parser.end()
        await self._tell()

    def turn(self, answer: GenerateResult, reference: str) -> SampledTurn:
        """Return the whole answer in the form that is recorded."""
        output = self.output
        finish = "tool_calls" if output.calls and answer.finish_type == "stop" else answer.finish_type
        message = message_from_output(output, reference)
        text, ill_formed = "".join(self._texts), output.ill_formed
        return SampledTurn(
            answer.id_array, answer.log_prob_array, finish, answer.meta_info, message, text=text, ill_formed=ill_formed
        )

    def unfinished(self, reference: str) -> SampledTurn | None:
        """Return the part of an abandoned turn that was sampled, with zeros for log-probs, which never arrived."""
        if not self._ids:
            return None
        ids = np.array(self._ids, dtype=np.int32)
        message = message_from_output(self.output, reference)
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


def message_from_output(output: ParsedOutput, reference: str | None) -> Message:
    """Return a parsed answer as the message that the client will echo."""
    calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in output.calls)
    return Message("assistant", output.text, output.reasoning, calls, reference=reference)


def _overlap(text: str, stop: str) -> int:
    """Count the characters at the end of `text` that are a beginning of `stop`."""
    for count in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-count:]):
            return count
    return 0
