"""The HTTP endpoints for agents: the path selects the dialect, the key selects the session.

Invariants: every request is answered in its own dialect, and affects only the session of its key. Nothing of a body is
read before its key is known, and the cost of a body counts against the limits of its session. A stream has its headers
at once and is never silent for longer than `KEEP_ALIVE_S`. A turn is recorded before the end of its answer is sent.
When a client disconnects or a session ends, the turn that is being sampled is abandoned.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from slime.agent.server.dialects import (
    DIALECTS,
    Asked,
    Dialect,
    FinishedTurn,
    Kind,
    Problem,
    TokenLogProb,
    Usage,
    dialect_of,
    model_body,
    models_body,
    refusal_problem,
)
from slime.agent.server.online_intake import LiveConversations
from slime.agent.server.sessions import OpenSession, Sessions
from slime.agent.session.limits import SessionRefusal
from slime.agent.session.turn import RecordedTurn, token_bytes
from slime.cluster.http_checks import no_foreign_pages
from slime.cluster.http_server import Connections
from slime.engine.http.codec import parse_json
from slime.engine.http.errors import EngineError, EngineRejected
from slime.models.parsers.events import Event
from slime.rollout.gate import AbortedTooOften

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEEP_ALIVE_S = 10.0
_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

logger = logging.getLogger(__name__)


async def answer_turn(
    http: web.Request, held: OpenSession, dialect: Dialect, asked: Asked, tokenizer: PreTrainedTokenizerBase
) -> web.StreamResponse:
    """Sample a turn and answer with it, whole or as a stream; raises only before anything is sent."""
    if not asked.stream:
        _, task = await held.begin(asked.request, None)
        return json_response(dialect.whole(asked, await _finished_turn(held, task, asked, tokenizer)))
    response, is_open, is_silent = web.StreamResponse(headers=_STREAM_HEADERS), asyncio.Event(), False

    async def on_events(events: list[Event]) -> None:
        nonlocal is_silent
        if not is_open.is_set():
            await is_open.wait()
        if data := b"".join(map(writer.event, events)):
            is_silent = False
            await response.write(data)

    prompt, task = await held.begin(asked.request, on_events)
    writer = dialect.writer(asked, prompt.turn_id)
    try:
        await response.prepare(http)
        await response.write(writer.begin())
        is_open.set()
        try:
            while not await _wait_first(task, held.ended, timeout_s=KEEP_ALIVE_S):
                if is_silent:
                    await response.write(writer.keep_alive())
                is_silent = True
            last = writer.end(await _finished_turn(held, task, asked, tokenizer))
        except Problem as problem:
            last = writer.problem(problem)
        await response.write_eof(last)
    except ConnectionResetError:
        logger.info("a client disconnected before its answer was complete")
    finally:
        task.cancel()
    return response


async def _wait_first(*awaited: asyncio.Future[Any], timeout_s: float | None = None) -> bool:
    """Wait until one of the futures is done; False after the timeout."""
    done, _ = await asyncio.wait(awaited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return bool(done)


async def _finished_turn(
    held: OpenSession, task: asyncio.Task[RecordedTurn], asked: Asked, tokenizer: PreTrainedTokenizerBase
) -> FinishedTurn:
    """Wait until the turn is recorded and return what a dialect needs of it; raises `Problem` if it failed."""
    try:
        if not task.done():
            await _wait_first(task, held.ended)
        if not task.done() or task.cancelled():  # by the end of the session
            raise held.ended.result().again() if held.ended.done() else Problem(Kind.CLOSED, "this turn was abandoned")
        taken = task.result()
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
    answer, output = taken.answer, taken.output
    completion = len(answer.id_array)
    thought = len(output.reasoning or "")
    usage = Usage(
        prompt=len(taken.prompt.ids),
        cached=taken.prompt.shared,
        completion=completion,
        reasoning=round(completion * thought / len(answer.text)) if thought and answer.text else 0,
    )
    log_probs = None
    if asked.want_log_probs:
        ids = answer.id_array.tolist()
        texts = [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
        each = zip(texts, token_bytes(tokenizer, ids), answer.log_probs, strict=True)
        log_probs = [TokenLogProb(*entry) for entry in each]
    return FinishedTurn(taken.turn.id, output, taken.finish_reason, usage, log_probs)


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A response with a JSON body."""
    return web.Response(body=orjson.dumps(body), status=status, headers=headers, content_type="application/json")


def session_key(headers: Mapping[str, str]) -> str | None:
    """The session key: the first present of bearer token, `x-api-key`, `x-slime-session` and `x-session-id`."""
    lower = {name.lower(): value.strip() for name, value in headers.items()}
    scheme, _, token = lower.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return next((lower[name] for name in ("x-api-key", "x-slime-session", "x-session-id") if lower.get(name)), None)


MOST_NOTES = 100
"""Maximum number of different notes that are logged for one session."""


class AgentApp:
    """The aiohttp application; `names` are the names of the model, of which `/v1/models` returns the first."""

    def __init__(
        self,
        sessions: Sessions,
        tokenizer: PreTrainedTokenizerBase,
        names: Sequence[str],
        connections: Connections,
        door: LiveConversations | None = None,
    ) -> None:
        self._sessions, self._tokenizer, self._names = sessions, tokenizer, tuple(names)
        self._connections, self._door = connections, door
        self.app = web.Application(middlewares=[no_foreign_pages])
        for dialect in DIALECTS:
            for path in dialect.paths:
                self.app.router.add_post(path, partial(self._post, dialect))
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_get("/v1/models/{name:.+}", self._model)
        for path in ("/", "/healthz", "/health"):
            self.app.router.add_get(path, self._healthy)
        self.app.router.add_route("*", "/{rest:.*}", self._no_path)

    async def _post(self, dialect: Dialect, http: web.Request) -> web.StreamResponse:
        try:
            # The key selects the session, whose limits apply before anything of the body is read.
            key = session_key(http.headers)
            door = self._door if self._door is not None and self._door.is_for(key) else None
            if door is None:
                held = self._sessions.find(key)
                intake = held.intake
            else:
                intake = door.intake(http.headers)
            with intake.request() as room, self._connections.serving(http.transport, key or ""):
                body = await room.body(http)
                # The dialect parses the body; a live service opens the conversation that the headers name.
                try:
                    if len(body) <= intake.inline_bytes:
                        asked = dialect.asked(http.path, parse_json(body))
                    else:
                        asked = await intake.run(
                            partial(self._asked_in_thread, dialect, http.path, body, intake.context)
                        )
                except (ValueError, RecursionError) as error:
                    raise Problem(Kind.BAD_BODY, f"the body is not JSON: {error}") from error
                if door is not None:
                    held = await door.enter(http.headers)
                room.move_to(held.intake)
                for note in asked.notes:
                    if note not in held.noted and len(held.noted) < MOST_NOTES:
                        held.noted.add(note)
                        logger.info("%s", note)
                if asked.model not in self._names and asked.model not in held.names:
                    raise Problem(
                        Kind.UNKNOWN_MODEL, f"the model {asked.model!r} is not served here: ask for {self._names[0]!r}"
                    )

                # The answer: a count of tokens, or a turn.
                if asked.count_only:
                    return json_response(dialect.counted(await held.count_tokens(asked.request)))
                return await answer_turn(http, held, dialect, asked, self._tokenizer)
        except SessionRefusal as refusal:
            return _problem_response(dialect, refusal_problem(refusal))
        except Problem as problem:
            return _problem_response(dialect, problem)

    def _asked_in_thread(self, dialect: Dialect, path: str, body: bytes, context: int | None) -> Asked:
        asked = dialect.asked(path, parse_json(body))
        self._sessions.model.check_length(asked.request, context)
        return asked

    async def _models(self, http: web.Request) -> web.Response:
        return json_response(models_body(self._names[:1]))

    async def _model(self, http: web.Request) -> web.Response:
        name = http.match_info["name"]
        if name not in self._names:
            dialect = dialect_of(http.path, http.headers)
            return _problem_response(dialect, Problem(Kind.UNKNOWN_MODEL, f"the model {name!r} is not served here"))
        return json_response(model_body(name))

    async def _healthy(self, http: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def _no_path(self, http: web.Request) -> web.Response:
        problem = Problem(Kind.NO_PATH, f"{http.method} {http.path} is not served here")
        return _problem_response(dialect_of(http.path, http.headers), problem)


def _problem_response(dialect: Dialect, problem: Problem) -> web.Response:
    status, headers, body = dialect.problem(problem)
    return json_response(body, status, headers)
