"""Asynchronous HTTP client of one engine.

`EngineClient` has a method for each call; `Growing` accumulates a streamed response.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

import aiohttp

from slime.engine.http.codec import COLUMNS_HEADER, parse_json, request_body
from slime.engine.http.errors import (
    EngineError,
    EngineFailed,
    EngineProtocolError,
    EngineRejected,
    EngineTimeout,
    EngineUnreachable,
)
from slime.engine.http.protocol import GenerateResult, PauseMode, quote
from slime.engine.http.transport import LONG_RESPONSE_BYTES, EngineTransport
from slime.storage.json_types import JsonObject

T = TypeVar("T")

_PER_TOKEN_FIELDS = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs",
                     "output_token_sampling_mask",
            "output_token_sampling_logprobs")  # fmt: skip
"""Fields of `meta_info` that have an entry for each token."""


class StreamedError(ValueError):
    """The engine reports within the stream that the request failed."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Growing:
    """Accumulates the received part of a streamed response.

    Engines have two dialects: each event carries the whole response so far or, if the engine was started with
    `--incremental-streaming-output` (as runs do), only the new tokens. Every event has the response's token count,
    `completion_tokens`: an event with that number of tokens is the whole response; one with that number less the known
    tokens is an increment; anything else is refused.

    Invariant: the cost of an event is the size of the event; `latest` joins the parts on request.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._last: JsonObject | None = None
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._entries: JsonObject = {}  # lists, by the fields of _GROWING

    @property
    def empty(self) -> bool:
        """Return true if no event was received."""
        return self._last is None

    @property
    def latest(self) -> JsonObject | None:
        """The response so far, as a new object; None before the first event."""
        if self._last is None:
            return None
        answer = {**self._last, "meta_info": {**self._last["meta_info"], **self._entries}}
        if "text" in answer:
            answer["text"] = "".join(self._texts)
        if "output_ids" in answer:
            answer["output_ids"] = self._ids
        return answer

    def ids_from(self, start: int) -> list[int]:
        """The received ids, from index `start` on."""
        if self._ids:
            return self._ids[start:]
        return [entry[1] for entry in self._entries.get("output_token_logprobs", ())[start:]]

    def take(self, event: bytes) -> None:
        """Add the tokens of an event; a `ValueError` for an invalid event leaves the response unchanged."""
        try:
            answer = parse_json(event)
        except ValueError:
            answer = None
        if isinstance(answer, dict) and "error" in answer:
            code = answer["error"].get("code") if isinstance(answer["error"], dict) else None
            raise StreamedError(event.decode(errors="replace"), code if isinstance(code, int) else 500)
        meta_info = answer.get("meta_info") if isinstance(answer, dict) else None
        count = meta_info.get("completion_tokens") if isinstance(meta_info, dict) else None
        if not isinstance(meta_info, dict) or type(count) is not int:
            raise ValueError(f"an event that is not a response: {quote(event[:1000].decode(errors='replace'))}")
        text, ids = answer.get("text"), answer.get("output_ids")
        lengths = {len(column) for column in (ids, meta_info.get("output_token_logprobs")) if isinstance(column, list)}
        if len(lengths) > 1:
            raise ValueError(f"ids and log-probs of different lengths: {sorted(lengths)}")
        carried = lengths.pop() if lengths else 0
        if carried == count:
            self._texts, self._ids, self._entries = [], [], {}
        elif self.tokens + carried != count:
            expected = f"neither all {count} nor those after the {self.tokens} known ones"
            quoted = quote(event[:1000].decode(errors="replace"))
            raise ValueError(f"{carried} tokens, which are {expected}: {quoted}")
        self._texts.append(text if isinstance(text, str) else "")
        self._ids += ids if isinstance(ids, list) else ()
        for name in _PER_TOKEN_FIELDS:
            if isinstance(entries := meta_info.get(name), list):
                self._entries.setdefault(name, []).extend(entries)
        self.tokens, self._last = count, answer


async def server_events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event except the final `[DONE]`; a line may have any length."""
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


__all__ = [
    "EngineClient",
    "EngineError",
    "EngineFailed",
    "EngineProtocolError",
    "EngineRejected",
    "EngineTimeout",
    "EngineUnreachable",
    "GenerateResult",
    "Growing",
    "PauseMode",
]

REQUEST_FLAG = "--engine-request-timeout"


class EngineClient(EngineTransport):
    """Calls one engine; safe to use from several event loops, each of which gets its own HTTP session.

    ``timeout_s`` is the deadline of a generation, ``control_timeout_s`` that of every other call; each method takes
    ``timeout_s`` to override its own. Close with `aclose` in each event loop that used the client.
    """

    # -- generation ---------------------------------------------------------------------------------------------

    async def generate(
        self, payload: JsonObject, *, headers: dict[str, str] | None = None, timeout_s: float | None = None
    ) -> JsonObject:
        """``POST /generate`` as is; returns the parsed response. Refused connections are retried with backoff."""
        call = "/generate"
        deadline_s = self.timeout_s if timeout_s is None else timeout_s
        flag = REQUEST_FLAG if timeout_s is None else None
        retries = self.connect_retries
        body = await self._body(
            "POST", call, payload, deadline_s=deadline_s, flag=flag, headers=headers, connect_retries=retries
        )
        self.sampled_at = time.monotonic()
        answer = await self._off_loop(partial(self._parsed, call), body)
        if not isinstance(answer, dict):
            raise EngineProtocolError(self.base_url, call, f"gave an answer that is not an object: {quote(answer)}")
        return answer

    async def generate_result(self, payload: JsonObject, *, headers: dict[str, str] | None = None) -> GenerateResult:
        """Like `generate`, with the response validated; requests its tokens as columns, which parse faster."""

        def read(body: bytes) -> GenerateResult:
            return GenerateResult.from_json(self._parsed("/generate", body), url=self.base_url)

        body = await self._body(
            "POST",
            "/generate",
            payload,
            deadline_s=self.timeout_s,
            flag=REQUEST_FLAG,
            headers={**COLUMNS_HEADER, **(headers or {})},
            connect_retries=self.connect_retries,
        )
        self.sampled_at = time.monotonic()
        return await self._off_loop(read, body)

    async def chat(self, payload: JsonObject, *, timeout_s: float | None = None) -> str:
        """``POST /v1/chat/completions``: the text of the first choice, which must have ended by a stop or by its
        length limit, not by an abort."""
        call = "/v1/chat/completions"
        deadline_s = self.timeout_s if timeout_s is None else timeout_s
        answer = self._parsed(call, await self._body("POST", call, payload, deadline_s=deadline_s))
        try:
            choice = answer["choices"][0]
            text, reason = choice["message"]["content"], choice["finish_reason"]
        except (LookupError, TypeError):
            raise EngineProtocolError(
                self.base_url, call, f"gave an answer without a choice: {quote(answer)}"
            ) from None
        if not isinstance(text, str) or reason not in ("stop", "length"):
            raise EngineProtocolError(self.base_url, call, f"gave no text (it ended with {reason!r}): {quote(answer)}")
        return text

    async def abort(self, rid: str | None = None, *, abort_all: bool = False, timeout_s: float | None = None) -> None:
        """Abort one request by its id, or all of them; their ``/generate`` calls return the tokens sampled so far."""
        if (rid is None) != abort_all:
            raise ValueError("abort needs either a rid or abort_all=True")
        body: JsonObject = {"abort_all": True} if abort_all else {"rid": rid}
        await self._control("POST", "/abort_request", body, timeout_s)

    async def pause(self, mode: PauseMode = "abort", *, timeout_s: float | None = None) -> None:
        """Stop generating: running requests are aborted, frozen in place, or put back into the queue."""
        await self._control("POST", "/pause_generation", {"mode": mode}, timeout_s)

    async def continue_(self, *, timeout_s: float | None = None) -> None:
        """Undo `pause`."""
        await self._control("POST", "/continue_generation", {}, timeout_s)

    async def flush_cache(self, *, timeout_s: float | None = None) -> None:
        """Drop all cached prefixes."""
        await self._control("POST", "/flush_cache", {}, timeout_s)

    async def stream_generate(
        self,
        answers: Growing,
        payload: JsonObject,
        *,
        headers: dict[str, str] | None = None,
        on_ids: Callable[[list[int]], Awaitable[None]] | None = None,
    ) -> None:
        """``POST /generate`` as a stream; `answers` always holds the received part of the response.

        Returns when the response is complete. A broken connection raises, and `answers` keeps the received part.
        `on_ids` is called with the ids of each event before the next event is read.
        """
        body = request_body({**payload, "stream": True})
        own = {"Content-Type": "application/json", **(headers or {})}
        async with (
            self._deadline("/generate", self.timeout_s, REQUEST_FLAG),
            self.open("POST", "/generate", data=body, headers=own) as response,
        ):
            if response.status != 200:
                raise self._refusal("/generate", response.status, await response.text(errors="replace"))
            async for event in server_events(response.content):
                known = answers.tokens
                try:
                    if len(event) < LONG_RESPONSE_BYTES:
                        answers.take(event)
                    else:
                        await self._in_reader(partial(answers.take, event))
                except StreamedError as error:
                    raise self._refusal("/generate", error.status, str(error)) from error
                except ValueError as error:
                    raise EngineProtocolError(self.base_url, "/generate", f"streamed {error}") from error
                self.sampled_at = time.monotonic()
                if on_ids is not None and answers.tokens > known:
                    await on_ids(answers.ids_from(known))

    async def streamed_result(self, answers: Growing, broken_by: EngineError | None) -> GenerateResult:
        """Validate and parse a streamed response; one that `broken_by` ended early gets the finish reason abort."""

        def read() -> GenerateResult:
            answer = answers.latest
            if answer is not None and broken_by is not None:
                answer["meta_info"]["finish_reason"] = {"type": "abort", "message": broken_by.reason}
            return GenerateResult.from_json(answer, url=self.base_url)

        return await self._in_reader(read)  # queued behind an event that the thread may still be reading

    # -- health -------------------------------------------------------------------------------------------------

    async def health(self, *, timeout_s: float | None = None) -> bool:
        """True if the server answers 200, False for 503 (still loading); an unreachable engine raises."""
        return await self._healthy("/health", timeout_s)

    async def health_generate(self, *, timeout_s: float | None = None) -> bool:
        """True if the engine generated a token for this call."""
        return await self._healthy("/health_generate", timeout_s)

    # -- weights and memory -------------------------------------------------------------------------------------

    async def update_weights_from_disk(
        self, path: str | Path, version: int | str, *, flush_cache: bool = True, timeout_s: float | None = None
    ) -> JsonObject:
        """Load the weights of an HF folder."""
        body = _update(version, flush_cache) | {"model_path": str(path)}
        return await self._control_json("POST", "/update_weights_from_disk", body, timeout_s)

    async def update_weights_from_tensor_files(
        self,
        paths: Sequence[str | Path],
        version: int | str,
        *,
        flush_cache: bool = True,
        timeout_s: float | None = None,
    ) -> JsonObject:
        """Load HF-named tensors from safetensors files on the engine's machine (shared memory, usually)."""
        files = {"load_format": "safetensors_file", "paths": [str(path) for path in paths]}
        body = _update(version, flush_cache) | files
        return await self._control_json("POST", "/update_weights_from_tensor", body, timeout_s)

    async def load_lora_adapter(
        self,
        name: str,
        path: str | Path,
        version: int | str,
        *,
        flush_cache: bool = True,
        timeout_s: float | None = None,
    ) -> JsonObject:
        """Load a PEFT folder; the embedded engine then samples every request with it, under that version."""
        body = _update(version, flush_cache) | {"lora_name": name, "lora_path": str(path)}
        return await self._control_json("POST", "/load_lora_adapter", body, timeout_s)

    async def init_weights_update_group(self, *, timeout_s: float | None = None, **group: int | str) -> None:
        """Join a process group with the trainer; returns when all ranks have joined.

        `group` is its master_address, master_port, rank_offset, world_size, group_name and backend.
        """
        await self._control_json("POST", "/init_weights_update_group", dict(group), timeout_s)

    async def update_weights_from_distributed(
        self,
        tensors: Sequence[JsonObject],
        version: int | str,
        *,
        group_name: str,
        flush_cache: bool = False,
        bucket: tuple[int, int] | None = None,
        adapter: JsonObject | None = None,
        timeout_s: float | None = None,
    ) -> JsonObject:
        """Receive tensors (name, dtype, shape) from rank 0 of a group. Only the embedded engine supports `bucket`
        (number, count) and `adapter` (the LoRA adapter that the tensors belong to): it sets the version with the last
        bucket."""
        body = _update(version, flush_cache, tensors, bucket) | {"group_name": group_name}
        if adapter is not None:
            body["adapter"] = adapter
        return await self._control_json("POST", "/update_weights_from_distributed", body, timeout_s)

    async def update_weights_from_handle(
        self,
        memory: JsonObject,
        tensors: Sequence[JsonObject],
        version: int | str,
        *,
        bucket: tuple[int, int],
        pause_mode: PauseMode | None = None,
        flush_cache: bool = False,
        timeout_s: float | None = None,
    ) -> JsonObject:
        """Copy tensors (name, dtype, shape) out of a trainer's memory on the same machine (embedded engine): `memory`
        is its `handle`, `offset` and `device`, or a `region`. With `pause_mode` the engine pauses itself only for the
        copy."""
        body = {**memory, **_update(version, flush_cache, tensors, bucket)}
        if pause_mode is not None:
            body["pause_mode"] = pause_mode
        return await self._control_json("POST", "/update_weights_from_handle", body, timeout_s)

    async def destroy_weights_update_group(self, group_name: str, *, timeout_s: float | None = None) -> None:
        """Leave a process group for weight updates."""
        await self._control_json("POST", "/destroy_weights_update_group", {"group_name": group_name}, timeout_s)

    async def check_weights(self, action: str, *, timeout_s: float | None = None) -> JsonObject:
        """``/weights_checker``: checksum or shapes (embedded engine); snapshot, compare (SGLang)."""
        return await self._control_json("POST", "/weights_checker", {"action": action}, timeout_s)

    async def get_weight_version(self, *, timeout_s: float | None = None) -> str:
        """Version of the weights that the engine samples with; from /model_info if the engine lacks the call (404)."""
        call = "/get_weight_version"
        try:
            answer = await self._control_json("GET", call, None, timeout_s)
        except EngineRejected as refused:
            if refused.status != HTTPStatus.NOT_FOUND:
                raise
            call = "/model_info"
            answer = await self._control_json("GET", call, None, timeout_s)
        if "weight_version" not in answer:
            raise EngineProtocolError(self.base_url, call, f"gave an answer without weight_version: {quote(answer)}")
        return str(answer["weight_version"])

    async def release_memory(
        self, tags: Sequence[str] | None = None, *, discard_weights: bool = False, timeout_s: float | None = None
    ) -> None:
        """Release device memory ("weights", "kv_cache"); None means all.

        `discard_weights` (embedded engine): no copy is kept, and the engine waits for whole weights when it resumes.
        """
        body = _tags(tags) | ({"discard_weights": True} if discard_weights else {})
        await self._control("POST", "/release_memory_occupation", body, timeout_s)

    async def resume_memory(self, tags: Sequence[str] | None = None, *, timeout_s: float | None = None) -> None:
        """Undo `release_memory`."""
        await self._control("POST", "/resume_memory_occupation", _tags(tags), timeout_s)


async def call_all(clients: Sequence[EngineClient], call: Callable[[EngineClient], Awaitable[T]]) -> list[T]:
    """Call all engines concurrently; the first error is raised after every call has ended."""
    results = await asyncio.gather(*(call(client) for client in clients), return_exceptions=True)
    values: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        values.append(result)
    return values


def _update(
    version: int | str,
    flush_cache: bool,
    tensors: Sequence[JsonObject] | None = None,
    bucket: tuple[int, int] | None = None,
) -> JsonObject:
    """Fields of a weight update: its version, and the names, dtypes and shapes of the tensors of a bucket."""
    body: JsonObject = {"weight_version": str(version), "flush_cache": flush_cache}
    if tensors is not None:
        body |= {f"{field}s": [tensor[field] for tensor in tensors] for field in ("name", "dtype", "shape")}
    return body if bucket is None else body | {"bucket": list(bucket)}


def _tags(tags: Sequence[str] | None) -> JsonObject:
    return {} if tags is None else {"tags": list(tags)}
