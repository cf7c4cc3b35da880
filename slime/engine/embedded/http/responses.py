"""The contents of an answer, the whole of it or its new piece in a stream, and its JSON and event streams.

Invariant: every error has OpenAI's shape: `{"error": {message, type, param, code}}`.
Invariant: a piece is made in the engine's thread, between two steps, so its ids, log-probs and counts are consistent;
the pieces of a sequence, joined, are its whole answer. Making a piece takes time for its new tokens only.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from collections.abc import Sequence as SequenceOf
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from itertools import repeat

import numpy as np
import orjson
from aiohttp import web

from slime.engine.embedded.errors import RequestFailed
from slime.engine.embedded.http.requests import GenerateRequest
from slime.engine.embedded.scheduler import Sequence
from slime.engine.embedded.tokenizer import FinalText
from slime.models.openai_api import error_json
from slime.storage.json_types import JsonObject

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


@dataclass(slots=True)
class OutputPiece:
    """A range of a sequence's tokens; `count` and the fields after it describe the whole sequence up to its end."""

    ids: list[int]
    logprobs: list[float]
    top: list[list[tuple[float, int]]]
    text: str
    count: int
    versions: list[tuple[str, int]]
    cached_tokens: int
    finish: JsonObject | None

    def join(self, later: OutputPiece) -> None:
        """Append the piece that follows this one."""
        self.ids += later.ids
        self.logprobs += later.logprobs
        self.top += later.top
        self.text += later.text
        self.count, self.versions = later.count, later.versions
        self.cached_tokens, self.finish = later.cached_tokens, later.finish


class OutputSplitter:
    """Splits a streamed sequence into pieces of at least `interval` tokens; runs in the engine's thread."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._cut = 0

    def next(self, seq: Sequence) -> OutputPiece | None:
        """Return the new piece, or None while it has too few tokens for an event."""
        if seq.finish is None and len(seq.output_ids) - self._cut < self._interval:
            return None
        piece = _make_piece(seq, self._cut, seq.text.take() if seq.text is not None and seq.finish is None else "")
        self._cut = piece.count
        return piece


def _make_piece(seq: Sequence, start: int, text: str) -> OutputPiece:
    return OutputPiece(
        seq.output_ids[start:],
        seq.logprobs[start:],
        seq.output_top[start:],
        text,
        len(seq.output_ids),
        list(seq.versions),
        seq.cached_tokens,
        seq.finish,
    )


def whole(seq: Sequence, text: str) -> OutputPiece:
    """Return all of a finished sequence, whose text is `text`, as one piece."""
    return _make_piece(seq, 0, text)


def final_text(seq: Sequence) -> FinalText:
    """Describe the text of a finished sequence, to be decoded later."""
    assert seq.finish is not None
    return FinalText(
        seq.output_ids,
        seq.finish.get("matched"),
        skip_special_tokens=seq.params.skip_special_tokens,
        keep_stop=seq.params.no_stop_trim,
        cut=seq.text.cut if seq.text is not None else None,
    )


class TokenJson:
    """The JSON of a sequence's first `count` tokens: their ids, and `[logprob, id, null]` of each.

    New tokens are appended in one call for many: Python's garbage collector does not traverse a list of tuples without
    containers, while traversing lists of lists takes ten times as long as writing the JSON.
    """

    def __init__(self) -> None:
        self.count = 0
        self._ids: list[bytes] = []
        self._entries: list[bytes] = []

    def catch_up(self, seq: Sequence) -> None:
        """Append the sequence's tokens up to now; another thread may be adding to them."""
        end = len(seq.logprobs)  # grows after the ids do
        self.take(seq.output_ids[self.count : end], seq.logprobs[self.count : end])

    def take(self, ids: list[int], logprobs: list[float]) -> None:
        """Append the tokens that follow."""
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


def columns(piece: OutputPiece) -> dict[str, str]:
    """Encode the tokens of a piece as two columns, instead of `[logprob, id, null]` for each.

    The columns are base64 of int32 ids, and of float32 log-probs where these are exact, else of float64. Neither side
    then makes an object for each token.
    """
    wide = np.array(piece.logprobs, dtype="<f8")
    slim = wide.astype("<f4")
    exact = slim if np.array_equal(slim, wide) else wide
    ids = np.array(piece.ids, dtype="<i4")
    return {"ids": base64.b64encode(ids.tobytes()).decode(), "logprobs": base64.b64encode(exact.tobytes()).decode()}


def column_answer(seq: Sequence, piece: OutputPiece, request: GenerateRequest, version: str) -> JsonObject:
    """Make the `answer` for a client that reads columns; with log-probs the ids are in the columns only."""
    meta = _meta_info(seq, piece, request, version, TokenJson())
    if request.return_logprob:
        meta["output_token_logprobs"] = columns(piece)
        return {"text": piece.text, "meta_info": meta}
    return {"text": piece.text, "output_ids": piece.ids, "meta_info": meta}


def _entries(logprobs: SequenceOf[float | None], ids: SequenceOf[int]) -> bytes:
    return orjson.dumps(list(zip(logprobs, ids, repeat(None))))


def answer(
    seq: Sequence, piece: OutputPiece, request: GenerateRequest, version: str, written: TokenJson | None = None
) -> JsonObject:
    """Make SGLang's JSON of a piece, for orjson.

    `version` is the engine's weight version, for a sequence without sampled tokens; `written` has the JSON of all of
    the piece's tokens.
    """
    if written is None:
        written = TokenJson()
        written.take(piece.ids, piece.logprobs)
    meta = _meta_info(seq, piece, request, version, written)
    return {"text": piece.text, "output_ids": written.ids, "meta_info": meta}


def _meta_info(
    seq: Sequence, piece: OutputPiece, request: GenerateRequest, version: str, written: TokenJson
) -> JsonObject:
    meta: JsonObject = {
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
    if piece.finish is None:
        return meta
    if seq.finished is not None:
        meta["e2e_latency"] = seq.finished - seq.arrived
    if seq.logprob_start is not None:  # an aborted sequence may have scores for part of its prompt only
        scores = [None, *seq.input_logprobs]
        prompt = seq.prompt_ids[seq.logprob_start :]
        meta["input_token_logprobs"] = orjson.Fragment(_entries(scores, prompt))
    if seq.routed_from is not None:
        # SGLang's form: base64 of int32 [positions, layers, topk], for all tokens except the last, which is not
        # computed. A sequence that was aborted before its prompt was computed has none.
        rows = np.concatenate(seq.routed) if seq.routed else np.empty(0, np.int32)
        if len(rows) >= seq.length - 1:
            experts = rows[seq.routed_from : seq.length - 1].astype(np.int32).tobytes()
            meta["routed_experts"] = base64.b64encode(experts).decode()
            meta["routed_experts_start_len"] = seq.routed_from
    return meta


def json_answer(payload: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(payload), status=status, content_type="application/json")


def error_body(status: int, message: str, param: str | None = None) -> JsonObject:
    kind = _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return error_json(message, kind, param, status)


def error_answer(status: int, message: str, param: str | None = None) -> web.Response:
    return json_answer(error_body(status, message or HTTPStatus(status).phrase, param), status)


@asynccontextmanager
async def event_stream(request: web.Request) -> AsyncIterator[web.StreamResponse]:
    """Open a stream of events; a request that fails in the middle sends an error event."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    try:
        yield response
    except RequestFailed as failed:
        await send_event(response, error_body(failed.status, str(failed)))
    await response.write(b"data: [DONE]\n\n")


async def send_event(response: web.StreamResponse, payload: JsonObject) -> None:
    await response.write(b"data: " + orjson.dumps(payload) + b"\n\n")
