"""A streamed answer as it grows.

Engines have two dialects: each event carries the whole answer so far or, where the engine was started with
`--incremental-streaming-output` (as runs do), what is new. Every event counts the answer's tokens, `completion_tokens`:
an event that carries so many is the whole, one that carries so many less those known is what is new, and anything else
is refused.

Invariant: the cost of an event is the size of the event; `latest` puts the pieces together when somebody asks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from slime.engine.http.answers import parse_json
from slime.engine.http.protocol import quote

_GROWING = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs", "output_token_sampling_mask",
            "output_token_sampling_logprobs")  # fmt: skip
"""What of `meta_info` has an entry for each token."""


class StreamedError(ValueError):
    """The engine says within the stream that the request failed."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Growing:
    """All of a streamed answer that has come."""

    def __init__(self) -> None:
        self.tokens = 0
        self._last: dict[str, Any] | None = None
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._entries: dict[str, list[Any]] = {}

    @property
    def empty(self) -> bool:
        """Nothing has come."""
        return self._last is None

    @property
    def latest(self) -> dict[str, Any] | None:
        """The answer so far, in one piece and as the caller's own; None while nothing has come."""
        if self._last is None:
            return None
        answer = {**self._last, "meta_info": {**self._last["meta_info"], **self._entries}}
        if "text" in answer:
            answer["text"] = "".join(self._texts)
        if "output_ids" in answer:
            answer["output_ids"] = self._ids
        return answer

    def ids_from(self, start: int) -> list[int]:
        """The ids that have come, from this one on."""
        if self._ids:
            return self._ids[start:]
        return [entry[1] for entry in self._entries.get("output_token_logprobs", ())[start:]]

    def take(self, event: bytes) -> None:
        """Add what an event carries; a `ValueError` says what is wrong with it, and nothing is changed."""
        answer = _read(event)
        meta_info = answer["meta_info"]
        count, carried = meta_info["completion_tokens"], _carried(answer)
        if carried == count:
            self._texts, self._ids, self._entries = [], [], {}
        elif self.tokens + carried != count:
            known = f"neither all {count} nor those behind the {self.tokens} known"
            raise ValueError(f"{carried} tokens, {known}: {_quoted(event)}")
        text, ids = answer.get("text"), answer.get("output_ids")
        self._texts.append(text if isinstance(text, str) else "")
        self._ids += ids if isinstance(ids, list) else ()
        for name in _GROWING:
            if isinstance(entries := meta_info.get(name), list):
                self._entries.setdefault(name, []).extend(entries)
        self.tokens, self._last = count, answer


async def server_events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event but the closing `[DONE]`; a line may have any length."""
    async for line in _lines(content):
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data != b"[DONE]":
                yield data


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    begun: list[bytes] = []
    async for chunk in content.iter_any():
        *ended, rest = chunk.split(b"\n")
        for end in ended:
            yield b"".join((*begun, end))
            begun.clear()
        if rest:
            begun.append(rest)
    if begun:
        yield b"".join(begun)


def _read(event: bytes) -> dict[str, Any]:
    try:
        answer = parse_json(event)
    except ValueError:
        answer = None
    if isinstance(answer, dict) and "error" in answer:
        error = answer["error"] if isinstance(answer["error"], dict) else {}
        code = error.get("code")
        raise StreamedError(event.decode(errors="replace"), code if isinstance(code, int) else 500)
    meta_info = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta_info, dict) or type(meta_info.get("completion_tokens")) is not int:
        raise ValueError(f"what is no answer: {_quoted(event)}")
    assert isinstance(answer, dict)
    return answer


def _carried(answer: dict[str, Any]) -> int:
    """How many tokens an event has something about."""
    ids, entries = answer.get("output_ids"), answer["meta_info"].get("output_token_logprobs")
    lengths = {len(found) for found in (ids, entries) if isinstance(found, list)}
    if len(lengths) > 1:
        raise ValueError(f"ids and log-probs of different lengths: {sorted(lengths)}")
    return lengths.pop() if lengths else 0


def _quoted(event: bytes) -> str:
    return quote(event[:1000].decode(errors="replace"))
