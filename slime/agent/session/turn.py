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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from slime.agent.messages import Message, ToolCall, TurnRequest
from slime.agent.session.session import Prompt, SampledTurn, Session
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
from slime.rollout.gate import Ticket
from slime.rollout.outcomes import GivenUp
from slime.rollout.retry import complete, request_completion
from slime.storage.json_types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OnEvent = Callable[[Event], Awaitable[None]]
ParserFactory = Callable[[TurnRequest, np.ndarray], OutputParser]
"""Makes the parser for the answer to a request whose prompt has these ids."""

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


OnText = Callable[[str, list[int]], Awaitable[None]]
"""Called for each piece of a growing answer, with its final text and its ids."""


EACH_TOKEN = 1
ABORT_AGAIN_S = 0.05
ABORT_TIMEOUT_S = 30.0


class EngineSampler:
    """Sends the requests of one sample to the engines of `pool`.

    With a `ticket` requests wait at the ticket's gate, and `leave_engines` moves requests in flight back to it. If
    `given_up` returns True, an aborted answer is final. `version` names the weights that all engines have. `stop_ids`
    end a turn: they are among the ids and not in the text. `draws` gives each request its own seed. With `routing` the
    answers contain the experts that the routers chose, for all tokens that were not known.
    """

    def __init__(
        self,
        pool: EnginePool,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_ids: Collection[int] = (),
        fault_tolerant: bool = False,
        ticket: Ticket | None = None,
        given_up: Callable[[], bool] = lambda: False,
        version: Callable[[], str | None] = lambda: None,
        draws: Callable[[JsonMapping], JsonObject] = dict,
        routing: bool = False,
    ) -> None:
        self._pool = pool
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        self._fault_tolerant = fault_tolerant
        self._ticket = ticket
        self._at_engines: set[str] = set()
        self._given_up = given_up
        self._version = version
        self._draws = draws
        self._routing = routing

    async def sample(
        self,
        ids: np.ndarray,
        params: JsonMapping,
        *,
        affinity: str,
        on_text: OnText | None = None,
        known: int = 0,
    ) -> GenerateResult:
        """Sample an answer to `ids`: requests that were cut off are resumed. Equal `affinity` selects the same engine.

        The expert routing of the first `known` ids is known already, if routing is recorded. The text of the answer
        lacks the token that ended the turn. Its `finish_type` is "stop", "length" or, if the rollout was given up,
        "abort". Its `meta_info` is the engine's metadata over all requests of the answer, in the form that
        `Sample.append_response_tokens` takes.
        """
        params = {**self._draws(params), "skip_special_tokens": False, "no_stop_trim": True}
        if on_text is not None:
            params["stream_interval"] = EACH_TOKEN
        routing = routed_experts_fields(known) if self._routing else {}
        parts: list[GenerateResult] = []
        sampled = masked_until = 0
        detokenizer, pieces = Detokenizer(self._tokenizer, self._stop_ids), []

        def is_full() -> bool:
            is_cut = not parts or parts[-1].finish_type == "abort"
            return is_cut and bool(sampled) and sampled >= params["max_new_tokens"]

        def rest() -> JsonObject | None:
            if is_full():
                return None
            input_ids = np.concatenate([ids, *(part.id_array for part in parts)]) if parts else ids
            left = continued_params(params, sampled)
            return {"input_ids": input_ids, "sampling_params": left, "return_logprob": True, **routing}

        async def on_ids(new: list[int]) -> None:
            assert on_text is not None
            pieces.append(detokenizer.feed(new))
            await on_text(pieces[-1], new)

        async def send(request: JsonObject) -> GenerateResult:
            version, rid = self._version(), uuid.uuid4().hex
            request["rid"] = rid
            self._at_engines.add(rid)
            try:
                part = await request_completion(
                    self._pool,
                    request,
                    affinity,
                    fault_tolerant=self._fault_tolerant,
                    on_ids=None if on_text is None else on_ids,
                )
            finally:
                self._at_engines.discard(rid)
            record_origin(part.meta_info, request, version)
            return part

        async def take(part: GenerateResult, is_masked: bool) -> int | None:
            nonlocal sampled, masked_until
            if is_masked:
                masked_until = sampled
            parts.append(part)
            sampled += len(part.id_array)
            if on_text is None:
                pieces.append(detokenizer.feed(part.token_ids))
            return len(part.id_array) if part.finish_type == "abort" else None

        await complete(rest, send, take, ticket=self._ticket, given_up=self._given_up)
        if held_back := detokenizer.end():
            pieces.append(held_back)
            if on_text is not None:
                await on_text(held_back, [])
        answer = GenerateResult.joined(parts, "".join(pieces))
        if is_full():
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
