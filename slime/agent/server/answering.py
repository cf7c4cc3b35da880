"""One answer to a client, streamed or whole, from the turn that is being sampled for it.

Invariants: a stream has its headers at once and is never silent for longer than `KEEP_ALIVE_S`; a turn is recorded
before the last of its answer is sent; a client that goes away, and a session that ends, give up what is being sampled.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import orjson
from aiohttp import web

from slime.agent.sampling.detokenizer import token_bytes
from slime.agent.sampling.turn import TakenTurn
from slime.agent.server.dialects import Asked, Dialect, Finished, Kind, Problem, StreamWriter, TokenLogProb, Usage
from slime.agent.server.sessions import OpenSession
from slime.agent.session.session import Prompt
from slime.engine.http.errors import EngineError, EngineRejected
from slime.models.parsers.events import Event
from slime.rollout.retry import AbortedTooOften

KEEP_ALIVE_S = 10.0
_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

logger = logging.getLogger(__name__)


async def answer_whole(held: OpenSession, dialect: Dialect, asked: Asked, tokenizer: Any) -> web.StreamResponse:
    """The answer in one piece; raises `Problem`."""
    _, task = await held.begin(asked.request, None)
    taken = await _turn_of(held, task)
    return json_response(dialect.whole(asked, finished_turn(taken, asked, tokenizer)))


async def answer_stream(
    http: web.Request, held: OpenSession, dialect: Dialect, asked: Asked, tokenizer: Any
) -> web.StreamResponse:
    """The answer as it is sampled; raises `Problem` as long as nothing was sent."""
    stream = _Stream(http)
    prompt, task = await held.begin(asked.request, stream.event)
    try:
        await stream.open(dialect, asked, prompt)
        try:
            while not await _first_of(task, held.ended, timeout_s=KEEP_ALIVE_S):
                await stream.keep_alive()
            taken = await _turn_of(held, task)
        except Problem as problem:
            await stream.send(stream.writer.problem(problem))
        else:
            await stream.send(stream.writer.end(finished_turn(taken, asked, tokenizer)))
        await stream.response.write_eof()
    except ConnectionResetError:
        logger.info("a client went away before its answer was complete")
    finally:
        task.cancel()
    return stream.response


async def _first_of(*awaited: asyncio.Future[Any], timeout_s: float | None = None) -> bool:
    """Wait for one of them; whether one is done."""
    done, _ = await asyncio.wait(awaited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return bool(done)


class _Stream:
    """The bytes of a streamed answer."""

    def __init__(self, http: web.Request) -> None:
        self._http = http
        self.response = web.StreamResponse(headers=_STREAM_HEADERS)
        self.writer: StreamWriter
        self._is_open = asyncio.Event()
        self._is_silent = True

    async def open(self, dialect: Dialect, asked: Asked, prompt: Prompt) -> None:
        """Headers and the beginning; from now on events are sent."""
        self.writer = dialect.writer(asked, prompt.turn_id)
        await self.response.prepare(self._http)
        await self.send(self.writer.begin())
        self._is_open.set()

    async def event(self, event: Event) -> None:
        """What the model wrote just now."""
        await self._is_open.wait()
        await self.send(self.writer.event(event))

    async def keep_alive(self) -> None:
        """Called regularly: sends something if nothing else was sent since the last time."""
        if self._is_silent:
            await self.response.write(self.writer.keep_alive())
        self._is_silent = True

    async def send(self, data: bytes) -> None:
        if data:
            self._is_silent = False
            await self.response.write(data)


async def _turn_of(held: OpenSession, task: asyncio.Task[TakenTurn]) -> TakenTurn:
    """The turn, when it is recorded, or the `Problem` that keeps it from being so."""
    try:
        await _first_of(task, held.ended)
        if not task.done():
            task.cancel()
            raise held.ended.result().again()
        if task.cancelled():  # by the end of the session
            raise held.ended.result().again() if held.ended.done() else Problem(Kind.CLOSED, "this turn was given up")
        return task.result()
    except (EngineError, AbortedTooOften) as error:
        held.failure = str(error)
        logger.warning("a turn failed: %s", error)
        if isinstance(error, EngineRejected):
            raise Problem(Kind.REFUSED, f"the engine refused this request: {error.message}") from error
        raise Problem(Kind.ENGINE_FAILED, str(error)) from error
    except (Problem, ConnectionResetError):
        raise
    except Exception as error:
        held.failure = f"{type(error).__name__}: {error}"
        logger.exception("a turn failed")
        raise Problem(Kind.ENGINE_FAILED, f"this turn failed here ({type(error).__name__})") from error
    finally:
        task.cancel()


def finished_turn(taken: TakenTurn, asked: Asked, tokenizer: Any) -> Finished:
    """What a dialect tells of a turn."""
    answer, output = taken.answer, taken.output
    completion = len(answer.ids)
    thought = len(output.reasoning or "")
    usage = Usage(
        prompt=len(taken.prompt.ids),
        cached=taken.prompt.shared,
        completion=completion,
        reasoning=round(completion * thought / len(answer.text)) if thought and answer.text else 0,
    )
    log_probs = _log_probs(taken, tokenizer) if asked.want_log_probs else None
    return Finished(taken.turn.id, output, taken.finish_reason, usage, log_probs)


def _log_probs(taken: TakenTurn, tokenizer: Any) -> list[TokenLogProb]:
    ids = taken.answer.ids.tolist()
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
    each = zip(texts, token_bytes(tokenizer, ids), taken.answer.log_probs.tolist(), strict=True)
    return [TokenLogProb(*entry) for entry in each]


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A body as JSON."""
    return web.Response(body=orjson.dumps(body), status=status, headers=headers, content_type="application/json")
