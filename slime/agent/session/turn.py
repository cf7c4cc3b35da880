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
    prompt: Prompt,
    sampler: Sampler,
    parser_factory: ParserFactory,
    params: JsonMapping,
    on_event: OnEvent | None = None,
) -> RecordedTurn:
    """Sample, parse and record the turn that was prepared as `prompt`; it is recorded under the prompt's `turn_id`.

    The answer ends at the client's stop texts, unless the trainer sets its own, and does not contain them.
    """
    stop = None if params.get("stop") is not None else request.params.get("stop")
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    reader = _AnswerReader(parser_factory(request, prompt.ids), stops)
    sampled = 0

    async def on_text(text: str, ids: list[int]) -> None:
        nonlocal sampled
        sampled += len(ids)
        assert on_event is not None
        for event in reader.feed(text):
            await on_event(event)

    try:
        known = max(0, len(prompt.ids) - len(prompt.node.ids) - 1)  # the engine never computed the last token of a turn
        answer = await sampler.sample(
            prompt.ids,
            turn_params(params, request, prompt, session),
            affinity=session.key,
            on_text=None if on_event is None else on_text,
            known=known,
        )
        if on_event is None:
            reader.feed(answer.text)
        for event in reader.end():
            if on_event is not None:
                await on_event(event)
        if answer.finish_type == "abort":
            raise GivenUp("the rollout was given up while this turn was sampled")
        output = gathered(reader.events)
        finish = "tool_calls" if output.calls and answer.finish_type == "stop" else answer.finish_type
        calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in output.calls)
        turn = SampledTurn(
            answer.id_array,
            answer.log_prob_array,
            finish,
            answer.meta_info,
            Message("assistant", output.text, output.reasoning, calls, reference=prompt.turn_id),
            text=answer.text,
            ill_formed=output.ill_formed,
        )
        return RecordedTurn(session.record(prompt, turn), prompt, output, answer, finish)
    except BaseException:
        session.abandon(prompt, sampled)
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
    """Parses an answer piece by piece, up to the first of the stop texts."""

    def __init__(self, parser: OutputParser, stops: Sequence[str]) -> None:
        self._parser = parser
        self._stops = stops
        self._held = ""
        self._is_stopped = False
        self.events: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        """Parse more text and return its events; the beginning of a possible stop text is held back."""
        was_stopped = self._is_stopped
        if self._stops:
            text = self._held + text
            found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
            kept = 0 if found else max(_overlap(text, stop) for stop in self._stops)
            end = min(found) if found else len(text) - kept
            text, self._held = text[:end], text[len(text) - kept :]
            self._is_stopped |= bool(found)
        if was_stopped or not text:
            return []
        events = self._parser.feed(text)
        self.events += events
        return events

    def end(self) -> list[Event]:
        """Parse the held-back text, end the parser, and return the remaining events."""
        events = [] if self._is_stopped or not self._held else self._parser.feed(self._held)
        events += self._parser.end()
        self.events += events
        return events


def _overlap(text: str, stop: str) -> int:
    """Count the characters at the end of `text` that are a beginning of `stop`."""
    for count in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-count:]):
            return count
    return 0
