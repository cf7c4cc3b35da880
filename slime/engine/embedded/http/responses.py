"""What an answer says: a whole one, or in a stream the piece that is new.

Invariant: a piece is cut in the engine's thread, between two steps, so its ids, log-probs and counts belong together;
the pieces of a sequence, put together, are its whole answer. Making one costs what is new and not what was before.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import orjson

from slime.engine.embedded.http.requests import GenerateRequest
from slime.engine.embedded.scheduler import Sequence
from slime.engine.embedded.tokenizer import FinalText


@dataclass(slots=True)
class Piece:
    """Tokens of a sequence from one place on; `count` and what follows it speak of the sequence up to the last."""

    ids: list[int]
    logprobs: list[float]
    top: list[list[tuple[float, int]]]
    text: str
    count: int
    versions: list[tuple[str, int]]
    cached_tokens: int
    finish: dict[str, Any] | None

    def join(self, later: Piece) -> None:
        """Take in the piece that follows this one."""
        self.ids += later.ids
        self.logprobs += later.logprobs
        self.top += later.top
        self.text += later.text
        self.count, self.versions = later.count, later.versions
        self.cached_tokens, self.finish = later.cached_tokens, later.finish


class Cutter:
    """Cuts a streamed sequence into pieces of at least `interval` tokens; runs in the engine's thread."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._cut = 0

    def next(self, seq: Sequence) -> Piece | None:
        """What is new, or None when that is not worth an event yet."""
        if seq.finish is None and len(seq.output_ids) - self._cut < self._interval:
            return None
        piece = _from(seq, self._cut, seq.text.take() if seq.text is not None and seq.finish is None else "")
        self._cut = piece.count
        return piece


def _from(seq: Sequence, start: int, text: str) -> Piece:
    return Piece(
        seq.output_ids[start:],
        seq.logprobs[start:],
        seq.output_top[start:],
        text,
        len(seq.output_ids),
        list(seq.versions),
        seq.cached_tokens,
        seq.finish,
    )


def whole(seq: Sequence, text: str) -> Piece:
    """All of a finished sequence, whose text is `text`."""
    return _from(seq, 0, text)


def final_text(seq: Sequence) -> FinalText:
    """What makes the text of a finished sequence."""
    assert seq.finish is not None
    return FinalText(
        seq.output_ids,
        seq.finish.get("matched"),
        skip_special_tokens=seq.params.skip_special_tokens,
        keep_stop=seq.params.no_stop_trim,
        cut=seq.text.cut if seq.text is not None else None,
    )


class TokenJson:
    """JSON of a sequence's first `count` tokens: their ids, and `[logprob, id, null]` of each.

    It grows by what is new, in one call for many tokens: a list of tuples that hold no containers is nothing that
    Python's garbage collector has to walk, which for lists of lists takes ten times as long as the JSON.
    """

    def __init__(self) -> None:
        self.count = 0
        self._ids: list[bytes] = []
        self._entries: list[bytes] = []

    def catch_up(self, seq: Sequence) -> None:
        """Take in what the sequence has by now, which another thread may be adding to."""
        end = len(seq.logprobs)  # grows after the ids do
        self.take(seq.output_ids[self.count : end], seq.logprobs[self.count : end])

    def take(self, ids: list[int], logprobs: list[float]) -> None:
        """Take in the tokens that follow."""
        if ids:
            self._ids.append(orjson.dumps(ids)[1:-1])
            self._entries.append(_entries(logprobs, ids)[1:-1])
            self.count += len(ids)

    @property
    def ids(self) -> orjson.Fragment:
        return orjson.Fragment(b"[" + b",".join(self._ids) + b"]")

    @property
    def entries(self) -> orjson.Fragment:
        return orjson.Fragment(b"[" + b",".join(self._entries) + b"]")


def columns(piece: Piece) -> dict[str, str]:
    """The tokens of a piece in the place of their `[logprob, id, null]`: base64 of int32, and of float32 where that is
    exact, else of float64. Nothing is made for each token on either side."""
    wide = np.array(piece.logprobs, dtype="<f8")
    slim = wide.astype("<f4")
    exact = slim if np.array_equal(slim, wide) else wide
    ids = np.array(piece.ids, dtype="<i4")
    return {"ids": base64.b64encode(ids.tobytes()).decode(), "logprobs": base64.b64encode(exact.tobytes()).decode()}


def column_answer(seq: Sequence, piece: Piece, request: GenerateRequest, version: str) -> dict[str, Any]:
    """`answer` for a client that reads columns: its ids are there alone."""
    meta = _meta_info(seq, piece, request, version, TokenJson())
    if request.return_logprob:
        meta["output_token_logprobs"] = columns(piece)
        return {"text": piece.text, "meta_info": meta}
    return {"text": piece.text, "output_ids": piece.ids, "meta_info": meta}


def _entries(logprobs: SequenceOf[float | None], ids: SequenceOf[int]) -> bytes:
    return orjson.dumps(list(zip(logprobs, ids, repeat(None))))


def answer(
    seq: Sequence, piece: Piece, request: GenerateRequest, version: str, written: TokenJson | None = None
) -> dict[str, Any]:
    """SGLang's JSON of a piece, for orjson; `version` is that of an engine that has sampled nothing for it yet.

    `written` has the piece's tokens as JSON, all of them.
    """
    if written is None:
        written = TokenJson()
        written.take(piece.ids, piece.logprobs)
    meta = _meta_info(seq, piece, request, version, written)
    return {"text": piece.text, "output_ids": written.ids, "meta_info": meta}


def _meta_info(
    seq: Sequence, piece: Piece, request: GenerateRequest, version: str, written: TokenJson
) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": seq.rid,
        "finish_reason": piece.finish,
        "prompt_tokens": len(seq.prompt_ids),
        "completion_tokens": piece.count,
        "cached_tokens": piece.cached_tokens,
        "weight_version": piece.versions[-1][0] if piece.versions else version,
    }
    if piece.versions:
        ends = [start for _, start in piece.versions[1:]] + [piece.count]
        meta["weight_versions"] = [
            {"version": v, "start": start, "end": end} for (v, start), end in zip(piece.versions, ends, strict=True)
        ]
    if request.return_logprob:
        meta["output_token_logprobs"] = written.entries
        if seq.top_logprobs:
            meta["output_top_logprobs"] = [[(lp, t, None) for lp, t in best] for best in piece.top]
    if piece.finish is not None:
        meta |= _at_the_end(seq)
    return meta


def _at_the_end(seq: Sequence) -> dict[str, Any]:
    """What only a finished sequence has; one that was aborted early has scores for the beginning of its prompt."""
    meta: dict[str, Any] = {}
    if seq.finished is not None:
        meta["e2e_latency"] = seq.finished - seq.arrived
    if seq.logprob_start is not None:
        scores = [None, *seq.input_logprobs]
        asked = seq.prompt_ids[seq.logprob_start :]
        meta["input_token_logprobs"] = orjson.Fragment(_entries(scores, asked))
    if seq.routed_from is not None:
        meta |= _routed(seq, seq.routed_from)
    return meta


def _routed(seq: Sequence, start: int) -> dict[str, Any]:
    """SGLang's form: int32 `[positions, layers, topk]` in base64, of all tokens but the last, which nobody computed.

    A sequence that was aborted before its prompt was computed has none.
    """
    rows = np.concatenate(seq.routed) if seq.routed else np.empty(0, np.int32)
    if len(rows) < seq.length - 1:
        return {}
    asked = rows[start : seq.length - 1].astype(np.int32).tobytes()
    return {"routed_experts": base64.b64encode(asked).decode(), "routed_experts_start_len": start}
