"""One turn of a session: samples the answer at the engines, parses it while it grows, and records it.

Invariants: a turn that was begun is either recorded, before its caller gets the result, or abandoned. The message of a
turn is the sum of its parser events. `ids + answer.ids` is what the engines saw, token by token. An answer that was cut
off, by an engine, at the gate or by a weight update, is continued from the ids it has, and its version spans say which
weights sampled which tokens. The text pieces of a `Detokenizer` together are the text of all ids except the silent
ones, and a piece never ends inside a character. The cost of a piece depends only on its own ids and a few before it.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from slime.agent.messages import Message, ToolCall, TurnRequest
from slime.agent.session.session import Prompt, SampledTurn, Session
from slime.agent.session.template import ChatModel
from slime.agent.session.tree import Turn
from slime.engine.http.errors import EngineError
from slime.engine.http.pool import EnginePool
from slime.engine.http.protocol import (
    GenerateResult,
    continued_params,
    record_origin,
    routed_experts_fields,
)
from slime.models.parsers.events import Event, OutputParser, ParsedOutput, gathered
from slime.rollout.gate import Ticket, count_abort
from slime.rollout.outcomes import GivenUp
from slime.storage.json_types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OnEvents = Callable[[list[Event]], Awaitable[None]]
OnIds = Callable[[list[int]], Awaitable[None]]

CLIENT_PARAMS = frozenset({"stop", "json_schema", "regex", "ebnf", "structural_tag"})
"""Sampling parameters that a client may set if the trainer does not: stop texts and the output format.

Parameters that change the token probabilities are not among them.
"""


_HALF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_MOST_PENDING = 16
"""Tokens that may wait for the rest of a character; invalid bytes are emitted after that many tokens."""


class Detokenizer:
    """Converts ids to text incrementally; `silent` ids (those that end a turn) have no text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, silent: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._inner = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        self._silent = silent
        self._told: list[int] = []
        """The ids whose text was returned last, as context for the decoder."""
        self._pending: list[int] = []

    def feed(self, ids: Sequence[int]) -> str:
        """Add ids and return the text that is final."""
        self._pending += [token for token in ids if token not in self._silent]
        if not self._pending:
            return ""
        new = self._new_text()
        if new.endswith(_HALF_A_CHARACTER) and len(self._pending) <= _MOST_PENDING:
            return ""
        return self._tell(new)

    def end(self) -> str:
        """Return the text that was held back."""
        return self._tell(self._new_text()) if self._pending else ""

    def _new_text(self) -> str:
        before = len(self._decode(self._told))
        return self._decode(self._told + self._pending)[before:]

    def _tell(self, new: str) -> str:
        if new:
            self._told, self._pending = self._pending[-_MOST_PENDING:], []
        return new

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        if self._inner is not None:  # without Python's wrapper, which takes ten times as long for a few tokens
            return str(self._inner.decode(ids, skip_special_tokens=False))
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def token_bytes(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[bytes]:
    """Return the bytes of each token, which may be parts of characters; together they are the text of all tokens."""
    pieces = tokenizer.convert_ids_to_tokens(list(ids))
    added = tokenizer.get_added_vocab()
    is_byte_level = "".join(tokenizer.tokenize("é")).endswith("Ã©")
    alphabet: dict[str, int] = {}
    if is_byte_level:  # the letters for bytes: printable bytes are their own letter, the others follow chr(255)
        printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
        others = [byte for byte in range(256) if byte not in set(printable)]
        alphabet = {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
    found = []
    for token, piece in zip(ids, pieces, strict=True):
        if piece in added:
            found.append(str(piece).encode())
        elif is_byte_level and all(letter in alphabet for letter in piece):
            found.append(bytes(alphabet[letter] for letter in piece))
        elif re.fullmatch("<0x[0-9A-F]{2}>", piece):
            found.append(bytes([int(piece[3:5], 16)]))
        elif "\u2581" in piece:  # SentencePiece's blank, which decoding one token alone may drop
            found.append(piece.replace("\u2581", " ").encode())
        else:
            found.append(tokenizer.decode([token], skip_special_tokens=False).encode())
    return found


EACH_TOKEN = 1
ABORT_AGAIN_S = 0.05
ABORT_TIMEOUT_S = 30.0


class EngineSampler:
    """Sends the requests of one sample to the engines of `pool`.

    With a `ticket` requests wait at the ticket's gate, and `leave_engines` moves requests in flight back to it. If
    `given_up` returns True, an aborted answer is final. `version` names the weights that all engines have. `draws`
    gives each request its own seed. With `routing` the answers contain the experts that the routers chose, for all
    tokens that were not known.
    """

    def __init__(
        self,
        pool: EnginePool,
        *,
        fault_tolerant: bool = False,
        ticket: Ticket | None = None,
        given_up: Callable[[], bool] = lambda: False,
        version: Callable[[], str | None] = lambda: None,
        draws: Callable[[JsonMapping], JsonObject] = dict,
        routing: bool = False,
    ) -> None:
        self._pool = pool
        self._fault_tolerant = fault_tolerant
        self._ticket = ticket
        self._at_engines: set[str] = set()
        self._given_up = given_up
        self._version = version
        self._draws = draws
        self._routing = routing

    async def sample(
        self, ids: np.ndarray, params: JsonMapping, *, affinity: str, on_ids: OnIds | None = None, known: int = 0
    ) -> GenerateResult:
        """Sample an answer to `ids`: requests that were cut off are resumed. Equal `affinity` selects the same engine.

        `on_ids` is called with the sampled ids as they arrive. The expert routing of the first `known` ids is known
        already, if routing is recorded. The answer's `finish_type` is "stop", "length" or, if the rollout was given up,
        "abort". Its `meta_info` is the engine's metadata over all requests of the answer, in the form that
        `Sample.append_response_tokens` takes.
        """
        params = {**self._draws(params), "skip_special_tokens": False, "no_stop_trim": True}
        if on_ids is not None:
            params["stream_interval"] = EACH_TOKEN
        routing = routed_experts_fields(known) if self._routing else {}
        parts: list[GenerateResult] = []
        sampled = masked_until = 0

        aborts = 0
        while not sampled or sampled < params["max_new_tokens"]:
            input_ids = np.concatenate([ids, *(part.id_array for part in parts)]) if parts else ids
            left = continued_params(params, sampled)
            request = {"input_ids": input_ids, "sampling_params": left, "return_logprob": True, **routing}
            async with nullcontext(False) if self._ticket is None else self._ticket.engine_request() as is_masked:
                version, rid = self._version(), uuid.uuid4().hex
                request["rid"] = rid
                self._at_engines.add(rid)
                try:
                    part = await self._pool.sample(
                        request, affinity, fault_tolerant=self._fault_tolerant, on_ids=on_ids
                    )
                finally:
                    self._at_engines.discard(rid)
                record_origin(part.meta_info, request, version)
            if is_masked:
                masked_until = sampled
            parts.append(part)
            sampled += len(part.id_array)
            if part.finish_type != "abort" or self._given_up():
                break
            aborts = count_abort(aborts, len(part.id_array), self._ticket)
        answer = GenerateResult.joined(parts, "".join(part.text for part in parts))
        if answer.finish_type == "abort" and sampled and sampled >= params["max_new_tokens"]:
            answer = replace(answer, finish_type="length")
            answer.meta_info["finish_reason"] = {"type": "length", "length": sampled}
        if masked_until:
            answer.meta_info["masked_until"] = masked_until
        return answer

    async def leave_engines(self) -> None:
        """Abort the requests that are at an engine; they keep their tokens and then wait at the ticket's gate.

        Returns when no request is at an engine. The gate must be closed, or requests that pass it are aborted too.
        """
        while self._at_engines:
            aborts = (self._pool.broadcast("abort", rid=rid, timeout_s=ABORT_TIMEOUT_S) for rid in self._at_engines)
            for error in await asyncio.gather(*aborts, return_exceptions=True):
                if isinstance(error, BaseException) and not isinstance(error, EngineError):
                    raise error
            if self._at_engines:
                await asyncio.sleep(ABORT_AGAIN_S)  # a request may not have reached its engine yet


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
    sampler: EngineSampler,
    model: ChatModel,
    params: JsonMapping,
    on_events: OnEvents | None = None,
    before_end: Sequence[Callable[[Turn], Awaitable[None]]] = (),
) -> RecordedTurn:
    """Sample, parse and record the turn that was prepared as `prompt`; it is recorded under the prompt's `turn_id`.

    The answer ends at the client's stop texts, unless the trainer sets its own, and does not contain them. `on_events`
    is called with the parser's events as the answer grows, and `before_end` with the recorded turn.
    """
    # The trainer's sampling parameters, the smallest of all limits, and the parameters that a client may set.
    asked = {
        name: value
        for name, value in request.params.items()
        if name in CLIENT_PARAMS and params.get(name) is None and value is not None
    }
    merged = {**params, **asked}
    bounds = [bound for bound in (params.get("max_new_tokens"), prompt.max_new_tokens) if bound is not None]
    if bounds:
        merged["max_new_tokens"] = min(bounds)
        if merged.get("min_new_tokens"):
            merged["min_new_tokens"] = min(merged["min_new_tokens"], merged["max_new_tokens"])
    stop_ids = session.template.stop_ids if session.template is not None else frozenset()
    merged["stop_token_ids"] = sorted({*(params.get("stop_token_ids") or ()), *stop_ids})
    stop = asked.get("stop") or ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)

    # Sample the answer; a stream is parsed while it grows.
    reader = AnswerReader(Detokenizer(model.tokenizer, stop_ids), model.parser(request, prompt.ids), stops, on_events)
    try:
        known = max(0, len(prompt.ids) - len(prompt.node.ids) - 1)  # the engine never computed the last token of a turn
        on_ids = None if on_events is None else reader.feed
        answer = await sampler.sample(prompt.ids, merged, affinity=session.key, on_ids=on_ids, known=known)
        if answer.finish_type == "abort":
            raise GivenUp("the rollout was given up while this turn was sampled")
        await reader.feed(answer.token_ids if on_ids is None else [], is_end=True)

        # Record it.
        output = gathered(reader.events)
        finish = "tool_calls" if output.calls and answer.finish_type == "stop" else answer.finish_type
        calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in output.calls)
        turn = SampledTurn(
            answer.id_array,
            answer.log_prob_array,
            finish,
            answer.meta_info,
            Message("assistant", output.text, output.reasoning, calls, reference=prompt.turn_id),
            text=reader.text,
            ill_formed=output.ill_formed,
        )
        recorded = session.record(prompt, turn)
    except BaseException:
        session.abandon(prompt, reader.sampled)
        raise
    for call in before_end:
        await call(recorded)
    return RecordedTurn(recorded, prompt, output, answer, finish)


class AnswerReader:
    """Decodes the sampled ids of an answer, and parses its text up to the first of the stop texts.

    `on_events`, if given, is called with the events of each piece.
    """

    def __init__(
        self, detokenizer: Detokenizer, parser: OutputParser, stops: Sequence[str], on_events: OnEvents | None
    ) -> None:
        self.sampled = 0
        self.events: list[Event] = []
        self._detokenizer, self._parser, self._on_events = detokenizer, parser, on_events
        self._stops = stops
        self._held = ""
        """The beginning of a possible stop text."""
        self._is_stopped = False
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """The whole text of the answer, also after a stop text."""
        return "".join(self._texts)

    async def feed(self, ids: list[int], *, is_end: bool = False) -> None:
        """Read the next sampled ids; with `is_end` they are the last ones, and nothing is held back."""
        self.sampled += len(ids)
        text = self._detokenizer.feed(ids)
        if is_end:
            text += self._detokenizer.end()
        self._texts.append(text)
        if self._is_stopped:
            text = ""
        elif self._stops:
            text = self._held + text
            found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
            kept = 0 if found or is_end else max(_overlap(text, stop) for stop in self._stops)
            end = min(found) if found else len(text) - kept
            text, self._held = text[:end], text[len(text) - kept :]
            self._is_stopped = bool(found)
        events = self._parser.feed(text) if text else []
        if is_end:
            events += self._parser.end()
        if events:
            self.events += events
            if self._on_events is not None:
                await self._on_events(events)


def _overlap(text: str, stop: str) -> int:
    """Count the characters at the end of `text` that are a beginning of `stop`."""
    for count in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-count:]):
            return count
    return 0
