"""The sampler over a pool of engines, for the driver and for the process of the endpoints.

Invariant: `ids + answer.ids` is what the engines saw, token by token: an answer that was cut off, by an engine, at the
gate or by a weight update, goes on from the ids it has, and its version spans say which weights sampled what.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from slime.engine.http.errors import EngineError
from slime.engine.http.pool import EnginePool
from slime.engine.http.protocol import (
    GenerateResult,
    continued_params,
    joined_answers,
    note_first_routed,
    note_first_version,
    routing_wanted,
)
from slime.rollout.gate import Ticket
from slime.rollout.retry import MOST_RESUMES, AbortedTooOften, asked, asked_in_pieces

# The text of token ids as they come.
#
# Invariant: the pieces, put together, are the text of all ids but the silent ones; a piece never ends within a
# character. The cost of a piece is that of its own ids and of a few before it.

_HALF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_MOST_PENDING = 16
"""Tokens that may wait for a character to be finished; bytes that are no text come out as they are behind that."""


class Detokenizer:
    """Ids in, text out; `silent` ids (those that end a turn) have none."""

    def __init__(self, tokenizer: Any, silent: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._silent = silent
        self._told: list[int] = []
        """Those told last, which give the decoder its context."""
        self._pending: list[int] = []

    def feed(self, ids: Sequence[int]) -> str:
        """The text that is certain now that these ids came too."""
        self._pending += [token for token in ids if token not in self._silent]
        if not self._pending:
            return ""
        new = self._new_text()
        if new.endswith(_HALF_A_CHARACTER) and len(self._pending) <= _MOST_PENDING:
            return ""
        return self._tell(new)

    def end(self) -> str:
        """What was held back."""
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
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def token_bytes(tokenizer: Any, ids: Sequence[int]) -> list[bytes]:
    """The bytes of each token, which need not be whole characters; together they are the text of all of them."""
    pieces = tokenizer.convert_ids_to_tokens(list(ids))
    added = tokenizer.get_added_vocab()
    is_byte_level = "".join(tokenizer.tokenize("é")).endswith("Ã©")
    alphabet = _byte_alphabet() if is_byte_level else {}
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


def _byte_alphabet() -> dict[str, int]:
    """The letters that byte-level tokenizers write bytes as: printable ones stand for themselves, others follow 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


# What a session asks of whoever samples for it.

OnText = Callable[[str, list[int]], Awaitable[None]]
"""Hears of an answer as it grows: text that is final, and the ids that came with it."""


@dataclass(frozen=True)
class SampledAnswer:
    """What the engines sampled after a prompt: ids and log-probs of one length, and their text.

    `text` lacks the token that ended the turn. `finish_reason` is "stop", "length" or, where the rollout was given up,
    "abort". `meta_info` is the engine's, in the form that `Sample.append_response_tokens` takes, over all requests that
    the answer took.
    """

    ids: np.ndarray
    log_probs: np.ndarray
    text: str
    finish_reason: str
    meta_info: Mapping[str, Any]


class Sampler(Protocol):
    """Samples after token ids. A request that is cut off is continued inside: whoever asks gets one answer."""

    async def sample(
        self,
        ids: np.ndarray,
        params: Mapping[str, Any],
        *,
        affinity: str,
        on_text: OnText | None = None,
        known: int = 0,
    ) -> SampledAnswer:
        """What comes after `ids`, under SGLang's sampling parameters; same affinity, same engine.

        Of the first `known` ids it is known which experts they went to, where that is recorded.
        """
        ...


EACH_TOKEN = 1
ABORT_AGAIN_S = 0.05
ABORT_TIMEOUT_S = 30.0
_PER_TOKEN = ("output_token_logprobs", "input_token_logprobs")
"""What `SampledAnswer` has as arrays."""


class EngineSampler:
    """Asks the engines of `pool` on behalf of one sample.

    With a `ticket` it waits at the ticket's gate; `leave_engines` sends it there from the engines. `given_up` says
    whether an aborted answer is all that is wanted; `version` names the weights that all engines have. `stop_ids` end a
    turn: they are among the ids and not in the text. `draws` gives requests seeds of their own. With `routing` answers
    say which experts the routers chose, for all tokens that were not known.
    """

    def __init__(
        self,
        pool: EnginePool,
        tokenizer: Any,
        *,
        stop_ids: Collection[int] = (),
        fault_tolerant: bool = False,
        ticket: Ticket | None = None,
        given_up: Callable[[], bool] = lambda: False,
        version: Callable[[], str | None] = lambda: None,
        draws: Callable[[Mapping[str, Any]], dict[str, Any]] = dict,
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
        params: Mapping[str, Any],
        *,
        affinity: str,
        on_text: OnText | None = None,
        known: int = 0,
    ) -> SampledAnswer:
        params = {**self._draws(params), "skip_special_tokens": False, "no_stop_trim": True}
        if on_text is not None:
            params["stream_interval"] = EACH_TOKEN
        more = routing_wanted(known) if self._routing else {}
        answer = _Growing(ids, params, Detokenizer(self._tokenizer, self._stop_ids), on_text, more)
        aborts = 0
        while not answer.is_full:
            part, masks = await self._part(answer, affinity)
            answer.add(part, masks)
            if not answer.is_cut or self._given_up():
                break
            if self._ticket is None or self._ticket.gate.is_open:
                aborts = 0 if len(part.id_array) else aborts + 1
                if aborts == MOST_RESUMES:
                    raise AbortedTooOften.by_engine()
        return await answer.whole()

    async def leave_engines(self) -> None:
        """Have requests that are at an engine now end with what they have; a ticket's gate then holds them.

        Returns when none is there. The gate must be closed: whoever passes it meanwhile would be sent away again.
        """
        while self._at_engines:
            aborts = (self._pool.broadcast("abort", rid=rid, timeout_s=ABORT_TIMEOUT_S) for rid in self._at_engines)
            for error in await asyncio.gather(*aborts, return_exceptions=True):
                if isinstance(error, BaseException) and not isinstance(error, EngineError):
                    raise error
            if self._at_engines:
                await asyncio.sleep(ABORT_AGAIN_S)  # it may have been on its way there

    async def _part(self, answer: _Growing, affinity: str) -> tuple[GenerateResult, bool]:
        """What an engine samples now or when the gate opens, and whether earlier ids are not to be trained on."""
        if self._ticket is None:
            return await self._asked(answer, affinity), False
        async with self._ticket.engine_request() as was_held:
            return await self._asked(answer, affinity), was_held and self._ticket.masks

    async def _asked(self, answer: _Growing, affinity: str) -> GenerateResult:
        version, rid = self._version(), uuid.uuid4().hex
        payload = {**answer.rest(), "rid": rid}
        self._at_engines.add(rid)
        try:
            if answer.on_text is None:
                result = await asked(self._pool, payload, affinity, fault_tolerant=self._fault_tolerant)
            else:
                result = await asked_in_pieces(
                    self._pool, payload, affinity, fault_tolerant=self._fault_tolerant, on_ids=answer.came
                )
        finally:
            self._at_engines.discard(rid)
        note_first_version(result.meta_info, version)
        note_first_routed(result.meta_info, payload)
        return result


class _Growing:
    """One answer, over all requests that it takes."""

    def __init__(
        self,
        prompt: np.ndarray,
        params: Mapping[str, Any],
        text: Detokenizer,
        on_text: OnText | None,
        more: Mapping[str, Any],
    ) -> None:
        self.on_text = on_text
        self._more = more
        self._prompt, self._params, self._text = prompt, params, text
        self._pieces: list[str] = []
        self._parts: list[GenerateResult] = []
        self._sampled = 0
        self._masked_until = 0

    @property
    def is_cut(self) -> bool:
        return not self._parts or self._parts[-1].finish_type == "abort"

    @property
    def is_full(self) -> bool:
        """It was cut off, and there is no room for more."""
        return self.is_cut and bool(self._sampled) and self._sampled >= self._params["max_new_tokens"]

    def rest(self) -> dict[str, Any]:
        """The request for what is left of it."""
        ids = np.concatenate([self._prompt, *(part.id_array for part in self._parts)]) if self._parts else self._prompt
        params = continued_params(self._params, self._sampled)
        return {"input_ids": ids, "sampling_params": params, "return_logprob": True, **self._more}

    async def came(self, ids: list[int]) -> None:
        """More ids were sampled."""
        assert self.on_text is not None
        piece = self._text.feed(ids)
        self._pieces.append(piece)
        await self.on_text(piece, ids)

    def add(self, part: GenerateResult, masks: bool) -> None:
        """What one request brought; `masks` what there was before it."""
        if masks:
            self._masked_until = self._sampled
        self._parts.append(part)
        self._sampled += len(part.id_array)
        if self.on_text is None:
            self._pieces.append(self._text.feed(part.token_ids))

    async def whole(self) -> SampledAnswer:
        """All of it; the last of the text is told."""
        if rest := self._text.end():
            self._pieces.append(rest)
            if self.on_text is not None:
                await self.on_text(rest, [])
        finish = "length" if self.is_full else self._parts[-1].finish_type
        meta_info = self._meta_info(finish)
        ids, log_probs = [part.id_array for part in self._parts], [part.log_prob_array for part in self._parts]
        return SampledAnswer(np.concatenate(ids), np.concatenate(log_probs), "".join(self._pieces), finish, meta_info)

    def _meta_info(self, finish: str) -> dict[str, Any]:
        answer: dict[str, Any] = {"meta_info": self._parts[0].meta_info}
        for part in self._parts[1:]:
            answer = joined_answers(answer, {"meta_info": part.meta_info})
        meta_info = {name: value for name, value in answer["meta_info"].items() if name not in _PER_TOKEN}
        if meta_info["finish_reason"]["type"] != finish:
            meta_info["finish_reason"] = {"type": finish, "length": self._sampled}
        if self._masked_until:
            meta_info["masked_until"] = self._masked_until
        return meta_info
