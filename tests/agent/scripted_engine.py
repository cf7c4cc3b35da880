"""Fake SGLang engine that plays a script: serves `/generate`, streamed or not, with tokens written by the test.

A `Script` has plays, which are lists of turns. A request is matched by its token ids. A request that continues a played
prefix gets the next turn of that play. A repeated prompt gets the same turn again. A prompt that ends inside a turn,
because the turn was aborted, gets the rest of it. Any other prompt begins a play: the first one whose `mark` is in the
new text. Therefore a script needs no session ids, and edits of a client's history are visible.

The log-prob of token id t is `log_prob(t)`. This module does not depend on sessions, dialects or chat templates.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

from slime.rollout.event_loop import LoopThread

TAIL = 4
HALF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"


def log_prob(token: int) -> float:
    """Return the log-prob of token id `token`, which is independent of its context."""
    return -(token % 97 + 1) / 128


def encoded(tokenizer: Any, text: str, seed: int | None = None) -> list[int]:
    """Encode `text` and its special tokens; with a seed, split it at random places, as models sometimes do.

    With a seed, encoding the text again gives other ids, if the text is long enough to be split.
    """
    if seed is None:
        return list(tokenizer.encode(text, add_special_tokens=False))
    rng = random.Random(seed)
    ids: list[int] = []
    for piece, special in _around_specials(tokenizer, text):
        if special:
            ids.append(tokenizer.convert_tokens_to_ids(piece))
            continue
        while piece:
            cut = rng.randint(1, 7)
            ids += tokenizer.encode(piece[:cut], add_special_tokens=False)
            piece = piece[cut:]
    return ids


def _around_specials(tokenizer: Any, text: str) -> Iterator[tuple[str, bool]]:
    added = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
    while text:
        found = [(at, -len(word), word) for word in added if (at := text.find(word)) >= 0]
        if not found:
            yield text, False
            return
        at, _, word = min(found)
        if at:
            yield text[:at], False
        yield word, True
        text = text[at + len(word) :]


@dataclass(frozen=True)
class Turn:
    """Tokens that the engine samples in one turn. The last id of a turn with finish `stop` is its stop token.

    With `hold_after`, the first answer pauses after that many tokens until it is aborted or `ScriptedEngine.release` is
    called.
    """

    ids: tuple[int, ...]
    finish: str = "stop"
    hold_after: int | None = None

    @classmethod
    def of(cls, tokenizer: Any, text: str, *, seed: int | None = None, **more: Any) -> Turn:
        """Return a turn with the ids of `text`; the stop token is added if the turn ends with `stop`."""
        ids = encoded(tokenizer, text, seed)
        if more.get("finish", "stop") == "stop" and (not ids or ids[-1] != tokenizer.eos_token_id):
            ids.append(tokenizer.eos_token_id)
        return cls(tuple(ids), **more)


@dataclass(frozen=True)
class Play:
    """The turns of one conversation, which begins when `mark` is in the new part of a prompt."""

    turns: Sequence[Turn]
    mark: str = ""


@dataclass(eq=False)
class _Place:
    """Position in a play: `play.turns[turn]`, from `offset` on, follows these tokens and the client's new ones."""

    length: int
    digest: int
    play: Play
    turn: int
    offset: int = 0
    engines: set[int] = field(default_factory=set)


class Script:
    """Plays and the position of each conversation; several engines may share one script."""

    def __init__(self, tokenizer: Any, plays: Sequence[Play | Sequence[Turn]] = ()) -> None:
        self.tokenizer = tokenizer
        self.plays: list[Play] = []
        self._places: list[_Place] = []
        self._lengths = np.zeros(64, np.int64)
        self._tails = np.zeros((64, TAIL), np.int64)
        for play in plays:
            self.add(play)

    def add(self, play: Play | Sequence[Turn]) -> None:
        """Add a play; if several plays match, the one added last begins."""
        self.plays.insert(0, play if isinstance(play, Play) else Play(tuple(play)))

    def place_of(self, ids: np.ndarray) -> _Place | None:
        """Return the position of a prompt in the script, or None if no play matches it."""
        held = self.longest(ids)
        new = ids[held.length :] if held else ids
        if held and (held.offset or not len(new)):
            return held if not len(new) else None
        text = self.tokenizer.decode(new, skip_special_tokens=False)
        for play in self.plays:
            if play.mark in text and (play.mark or held is None):
                return _Place(len(ids), 0, play, 0)
        return held

    def longest(self, ids: np.ndarray, engine: int | None = None) -> _Place | None:
        """Return the longest place that is a prefix of the prompt; with `engine`, only of the places it computed."""
        count = len(self._places)
        lengths, tails = self._lengths[:count], self._tails[:count]
        fits = lengths <= len(ids)
        if len(ids) >= TAIL and fits.any():
            at = np.clip(lengths[:, None] - np.arange(TAIL, 0, -1), 0, len(ids) - 1)
            fits &= (ids[at] == tails).all(axis=1)
        digests: dict[int, int] = {}
        for index in sorted(np.flatnonzero(fits), key=lambda i: (lengths[i], i), reverse=True):
            place = self._places[index]
            if engine is not None and engine not in place.engines:
                continue
            if place.length not in digests:
                digests[place.length] = hash(ids[: place.length].tobytes())
            if digests[place.length] == place.digest:
                return place
        return None

    def played(self, ids: np.ndarray, place: _Place, sampled: int, engine: int) -> None:
        """Record that `sampled` tokens of the place's turn followed this prompt."""
        turn = place.play.turns[place.turn]
        done = place.offset + sampled
        whole = np.concatenate([ids, np.asarray(turn.ids[place.offset : done], ids.dtype)])
        after = (place.turn + 1, 0) if done >= len(turn.ids) else (place.turn, done)
        self._note(_Place(len(whole), hash(whole.tobytes()), place.play, *after, {engine}), whole)

    def cut(self, ids: np.ndarray, place: _Place, sampled: int, engine: int) -> None:
        """Record a turn that its token limit ended; the next turn follows it."""
        whole = np.concatenate([ids, np.asarray(place.play.turns[place.turn].ids[place.offset :][:sampled], ids.dtype)])
        self._note(_Place(len(whole), hash(whole.tobytes()), place.play, place.turn + 1, 0, {engine}), whole)

    def _note(self, place: _Place, whole: np.ndarray) -> None:
        count = len(self._places)
        if count == len(self._lengths):
            self._lengths = np.concatenate([self._lengths, np.zeros(count, np.int64)])
            self._tails = np.concatenate([self._tails, np.zeros((count, TAIL), np.int64)])
        self._places.append(place)
        self._lengths[count] = place.length
        self._tails[count] = whole[-TAIL:] if len(whole) >= TAIL else -1


@dataclass
class Asked:
    """One request and its answer."""

    rid: str | None
    input_ids: np.ndarray
    params: Mapping[str, Any]
    headers: Mapping[str, str]
    streamed: bool
    output_ids: list[int] = field(default_factory=list)
    finish: str | None = None


class ScriptedEngine:
    """Serves a script on a free port, in a thread; `requests` lists the received requests in order.

    `chunk` tokens make one event of a stream, which carries new tokens only (`--incremental-streaming-output`) or, with
    `incremental=False`, all tokens so far. `step_s` is the time per chunk, in seconds. `complaints` lists the requests
    without a matching turn, which get status 400. `holding` is set as soon as a turn is held.
    """

    _count = 0

    def __init__(
        self, script: Script, *, chunk: int = 4, step_s: float = 0.0, incremental: bool = True, version: str = "1"
    ) -> None:
        self.script = script
        self.chunk, self.step_s, self.incremental = chunk, step_s, incremental
        self.weight_version = version
        self.requests: list[Asked] = []
        self.aborts: list[dict[str, Any]] = []
        self.complaints: list[str] = []
        self.holding = threading.Event()
        ScriptedEngine._count += 1
        self._number = ScriptedEngine._count
        self._running: dict[int, _Answer] = {}
        self._held_once: set[tuple[int, int]] = set()
        self._paused: asyncio.Event | None = None
        self.app = web.Application(client_max_size=1 << 28)
        self._add_routes()

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Serve the engine inside the context; yield its URL."""
        loop = LoopThread("scripted-engine")
        runner = web.AppRunner(self.app, shutdown_timeout=0.1)
        try:
            loop.run(runner.setup())
            loop.run(web.TCPSite(runner, "127.0.0.1", 0).start())
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            loop.run(runner.cleanup())
            loop.close()

    def release(self) -> None:
        """Resume held turns. May be called from any thread."""
        for answer in list(self._running.values()):
            answer.loop.call_soon_threadsafe(answer.released.set)

    @property
    def sampled(self) -> list[list[int]]:
        """Sampled ids of each request."""
        return [asked.output_ids for asked in self.requests]

    def _add_routes(self) -> None:
        post, get = self.app.router.add_post, self.app.router.add_get
        post("/generate", self._generate)
        post("/abort_request", self._abort)
        post("/pause_generation", self._pause)
        post("/continue_generation", self._continue)
        for path in ("/update_weights_from_disk", "/update_weights_from_tensor"):
            post(path, self._update)
        for path in ("/health", "/health_generate", "/flush_cache"):
            self.app.router.add_route("*", path, _ok)
        get("/server_info", self._info)
        get("/model_info", self._info)
        get("/get_weight_version", self._info)

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "scripted", "model_path": "", "weight_version": self.weight_version})

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.aborts.append(body)
        self._abort_those(None if body.get("abort_all") else body.get("rid"))
        return web.json_response({"success": True})

    def _abort_those(self, rid: str | None) -> None:
        for answer in self._running.values():
            if rid is None or answer.asked.rid == rid:
                answer.aborted = True
                answer.released.set()

    async def _pause(self, request: web.Request) -> web.Response:
        mode = (await request.json()).get("mode", "abort")
        self._paused = asyncio.Event()
        if mode == "abort":
            self._abort_those(None)
        return web.json_response({"success": True})

    async def _continue(self, _: web.Request) -> web.Response:
        if self._paused is not None:
            self._paused.set()
            self._paused = None
        return web.json_response({"success": True})

    async def _update(self, request: web.Request) -> web.Response:
        version = request.query.get("weight_version")
        self.weight_version = version or str((await request.json())["weight_version"])
        return web.json_response({"success": True, "message": "", "weight_version": self.weight_version})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        ids = np.asarray(body["input_ids"], np.int32)
        params, streamed = body.get("sampling_params") or {}, bool(body.get("stream"))
        asked = Asked(body.get("rid"), ids, params, dict(request.headers), streamed)
        self.requests.append(asked)
        if self._paused is not None:
            await self._paused.wait()
        place = self.script.place_of(ids)
        if place is None or place.turn >= len(place.play.turns):
            return self._complaint(asked, place)
        answer = _Answer(self, asked, place)
        self._running[id(answer)] = answer
        try:
            return await (self._streamed(request, answer) if streamed else self._whole(answer))
        finally:
            del self._running[id(answer)]

    def _complaint(self, asked: Asked, place: _Place | None) -> web.Response:
        tail = self.script.tokenizer.decode(asked.input_ids[-200:], skip_special_tokens=False)
        what = f"turn {place.turn} of play {place.play.mark!r}" if place else "a conversation that no play begins with"
        self.complaints.append(f"nothing is written for {what}: ...{tail}")
        return web.json_response({"error": {"message": self.complaints[-1], "code": 400}}, status=400)

    async def _whole(self, answer: _Answer) -> web.Response:
        async for _ in answer.steps():
            pass
        return web.json_response(answer.event(0))

    async def _streamed(self, request: web.Request, answer: _Answer) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for start in answer.steps():
            event = answer.event(start if self.incremental else 0)
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def holds(self, place: _Place) -> int | None:
        """Return the token count after which this turn is held, the first time it is played; otherwise None."""
        key = (id(place.play), place.turn)
        if place.play.turns[place.turn].hold_after is None or key in self._held_once:
            return None
        self._held_once.add(key)
        return place.play.turns[place.turn].hold_after


class _Answer:
    """State of a request in flight."""

    def __init__(self, engine: ScriptedEngine, asked: Asked, place: _Place) -> None:
        self.engine, self.asked, self.place = engine, asked, place
        self.loop = asyncio.get_running_loop()
        self.released = asyncio.Event()
        self.aborted = False
        self.versions: list[str] = []
        self.shown = 0
        held = engine.script.longest(asked.input_ids, engine._number)
        self.cached = min(held.length, len(asked.input_ids) - 1) if held else 0
        self.turn = place.play.turns[place.turn]
        self.limit = int(asked.params.get("max_new_tokens", 128))

    async def steps(self) -> Any:
        """Sample the turn; yield the index of the first new token of each event."""
        engine, asked = self.engine, self.asked
        left = list(self.turn.ids[self.place.offset :])
        wanted, hold = left[: self.limit], engine.holds(self.place)
        while asked.finish is None:
            start = len(asked.output_ids)
            end = min(len(wanted), start + engine.chunk)
            if hold is not None and end >= hold:
                end, hold = hold, None
                self._sample(wanted[start:end])
                yield start
                engine.holding.set()
                await self.released.wait()
                start = end
                end = start if self.aborted else min(len(wanted), start + engine.chunk)
            elif engine.step_s:
                await asyncio.sleep(engine.step_s)
            else:
                await asyncio.sleep(0)
            if not self.aborted:
                self._sample(wanted[start:end])
            if self.aborted or len(asked.output_ids) == len(wanted):
                self._end(len(wanted) < len(left))
            yield start

    def _sample(self, ids: list[int]) -> None:
        self.asked.output_ids += ids
        self.versions += [self.engine.weight_version] * len(ids)

    def _end(self, is_cut: bool) -> None:
        script, asked, number = self.engine.script, self.asked, self.engine._number
        if self.aborted:
            asked.finish = "abort"
            script.played(asked.input_ids, self.place, len(asked.output_ids), number)
        elif is_cut:
            asked.finish = "length"
            script.cut(asked.input_ids, self.place, len(asked.output_ids), number)
        else:
            asked.finish = self.turn.finish
            script.played(asked.input_ids, self.place, len(asked.output_ids), number)

    def event(self, start: int) -> dict[str, Any]:
        """Return the answer from token `start` on."""
        asked, ids = self.asked, self.asked.output_ids
        meta_info: dict[str, Any] = {
            "id": asked.rid or "",
            "finish_reason": self._finish_reason(),
            "prompt_tokens": len(asked.input_ids),
            "completion_tokens": len(ids),
            "cached_tokens": self.cached,
            "weight_version": self.engine.weight_version,
            "output_token_logprobs": [[log_prob(token), token, None] for token in ids[start:]],
        }
        if len(set(self.versions)) > 1:
            meta_info["weight_versions"] = self._spans()
        text = self._text()
        shown, self.shown = self.shown if start else 0, len(text)
        return {"text": text[shown:], "output_ids": ids[start:], "meta_info": meta_info}

    def _finish_reason(self) -> dict[str, Any] | None:
        finish = self.asked.finish
        if finish == "stop":
            return {"type": "stop", "matched": self.asked.output_ids[-1]}
        return None if finish is None else {"type": finish}

    def _text(self) -> str:
        ids, params = self.asked.output_ids, self.asked.params
        if self.asked.finish == "stop" and not params.get("no_stop_trim"):
            ids = ids[:-1]
        text = self.engine.script.tokenizer.decode(ids, skip_special_tokens=params.get("skip_special_tokens", True))
        return text if self.asked.finish else text.rstrip(HALF_A_CHARACTER)

    def _spans(self) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for index, version in enumerate(self.versions):
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": index, "end": index})
            spans[-1]["end"] = index + 1
        return spans


async def _ok(_: web.Request) -> web.Response:
    return web.json_response({"status": "ok", "success": True})
