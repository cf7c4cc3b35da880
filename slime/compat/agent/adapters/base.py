"""Upstream slime's `BaseAdapter`: an aiohttp application in front of one engine or router, with sessions by id.

Invariant: sessions are accessed only in the application's event loop, from whichever thread or loop they are opened and
finished. A turn's tokens are the sampled ones, as in `slime.agent.server`, whose components are used here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from slime.agent.adapters.common import DEFAULT_SID, Session
from slime.agent.server.app import answer_turn, json_response, session_key
from slime.agent.server.dialects import (
    Asked,
    Dialect,
    Kind,
    Problem,
    dialect_of,
    models_body,
    refusal_problem,
)
from slime.agent.server.request_limits import Intake
from slime.agent.server.sessions import OpenSession, Sessions
from slime.agent.server.settings import Opening
from slime.agent.session.limits import SessionRefusal
from slime.agent.session.template import ChatModel
from slime.agent.session.tree import Turn
from slime.cluster.http_checks import foreign, no_foreign_pages
from slime.data.sample import Sample
from slime.engine.http.codec import parse_json
from slime.engine.http.pool import EnginePool
from slime.engine.sglang.router import RoutedPool
from slime.models.parsers.formats import Formats

MODEL = "slime-actor"
MOST_UNKNOWN = 1024
"""Limit of requests whose session is not known yet."""
REMEMBERED = 16384
NEW_TOKENS = 4096
"""New tokens of a turn that neither the session nor the client limits: engines would stop after 128."""
T = TypeVar("T")

logger = logging.getLogger(__name__)


class BaseAdapter:
    """Endpoints of the APIs in `dialects`; a session accepts requests under its id after `open_session`.

    `tool_parser` and `reasoning_parser` are SGLang's names; without them the chat template decides. The sampling
    parameters of a session override its client's. `fork_threshold_tokens` has no effect: no sampled turn is ever
    overwritten. `debug_callback` is called with a dict for each recorded turn. A session's id is its only protection,
    so ids should not be guessable if agents must not reach each other's sessions. Requests whose headers do not name an
    open session share the limits of one session until their bodies are read.
    """

    dialects: tuple[Dialect, ...] = ()

    def __init__(
        self,
        *,
        tokenizer: Any,
        sglang_url: str,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        max_turns_per_sid: int | None = None,
        fork_threshold_tokens: int | None = None,
        debug_callback: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.sglang_url = sglang_url.rstrip("/")
        self.max_turns_per_sid = max_turns_per_sid
        self.fork_threshold_tokens = fork_threshold_tokens
        self.debug_callback = debug_callback
        self.store: dict[str, Session] = {}
        self.inflight: Counter[str] = Counter()
        self.closed: OrderedDict[str, None] = OrderedDict()
        self.manager = Trajectories(self)
        self._model = ChatModel(tokenizer, formats=Formats(tool_parser, reasoning_parser))
        self._model.template({})  # probed now, not during the first request
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool: EnginePool | None = None
        self._sessions: Sessions | None = None
        self._unknown: Intake | None = None
        self._held: dict[str, OpenSession] = {}
        self._idle: dict[str, asyncio.Event] = {}
        self.app = web.Application(middlewares=[no_foreign_pages])
        self.app.on_startup.append(self._start)
        self.app.on_cleanup.append(self._stop)
        self._register_routes()

    # sessions, from any thread

    def open_session(
        self, sid: str, *, sampling_defaults: Mapping[str, Any] | None = None, max_context_tokens: int = 0
    ) -> None:
        """Accept requests under this id from now on; raises `ValueError` if the id is or was in use."""
        if sid in self.store or sid in self.closed:
            raise ValueError(f"session {sid!r} is already known")
        self.store[sid] = Session(sid, dict(sampling_defaults or {}), max_context_tokens)

    async def finish_session(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: Any = 0.0,
        extra_metadata: Mapping[str, Any] | None = None,
        wait_timeout: float = 5.0,
    ) -> list[Sample]:
        """End a session and return its turns as samples; empty without turns, and on a second call."""
        held = await self._in_app(self._ended(sid, wait_timeout))
        if held is None:
            return []
        return held.session.samples(base_sample, reward, extra_metadata)

    async def shutdown_session(self, sid: str, *, wait_timeout: float = 5.0) -> None:
        """Accept no further requests under this id, and wait for those in flight.

        Their sampled turns are kept for `finish_session`.
        """
        await self._in_app(self._quiet(sid, wait_timeout))

    async def drop_session(self, sid: str, *, wait_timeout: float = 0.0) -> None:
        """End a session and discard its turns."""
        await self._in_app(self._ended(sid, wait_timeout))

    # hooks of subclasses

    def _register_routes(self) -> None:
        for dialect in self.dialects:
            for path in dialect.paths:
                self.app.router.add_post(path, partial(self._post, dialect))
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_get("/healthz", self._healthy)
        self.app.router.add_route("*", "/{rest:.*}", self._no_path)

    def _session_id(self, request: web.Request, body: Mapping[str, Any]) -> str:
        """Return the session id of a request."""
        raise NotImplementedError

    def _preprocess_body(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body to parse, perhaps changed."""
        return body

    def _translate(self, dialect: Dialect, request: web.Request, body: Mapping[str, Any]) -> Asked:
        """Parse the client's request; raises `Problem`."""
        return dialect.asked(request.path, body)

    def _build_reply(self, dialect: Dialect, problem: Problem) -> web.Response:
        """Build the error response of a request without a turn."""
        status, headers, body = dialect.problem(problem)
        return json_response(body, status, headers)

    async def _respond(
        self, request: web.Request, held: OpenSession, dialect: Dialect, asked: Asked
    ) -> web.StreamResponse:
        if asked.count_only:
            return json_response(dialect.counted(await held.count_tokens(asked.request)))
        return await answer_turn(request, held, dialect, asked, self.tokenizer)

    # requests, in the application's loop

    async def _post(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        try:
            intake = self._intake_of(session_key(request.headers))
            with intake.request() as room:
                raw = await room.body(request, is_decompressed=True)
                is_small = len(raw) <= intake.inline_bytes
                given = _object_of(raw) if is_small else await intake.run(partial(_object_of, raw))
                body = self._preprocess_body(given)
                sid = self._session_id(request, body)
                if sid == DEFAULT_SID and (found := foreign(request.headers)) is not None:  # a publicly known id
                    raise Problem(Kind.NO_SESSION, found.message)
                intake = self._session_of(sid).intake
                room.move_to(intake)
                understood = partial(self._understood, dialect, request, body, intake.context)
                asked = understood() if is_small else await intake.run(understood)
                held = self._session_of(sid)  # the session may have ended since
                with _Answering(self, sid):
                    return await self._respond(request, held, dialect, asked)
        except SessionRefusal as refusal:
            return self._build_reply(dialect, refusal_problem(refusal))
        except Problem as problem:
            return self._build_reply(dialect, problem)

    def _intake_of(self, key: str | None) -> Intake:
        """Return the limits of a request by the key in its headers, before its body names the session."""
        if self._unknown is None:
            raise Problem(Kind.SHUTTING_DOWN, "the endpoints are shutting down")
        if key is None or key not in self.store or key in self.closed:
            return self._unknown
        return self._session_of(key).intake

    def _understood(
        self, dialect: Dialect, request: web.Request, body: Mapping[str, Any], context: int | None
    ) -> Asked:
        """Parse a body and check that its prompt can fit; raises `Problem`."""
        asked = self._translate(dialect, request, body)
        if self._sessions is not None and not asked.count_only:
            self._sessions.model.check_length(asked.request, context)
        return asked

    def _session_of(self, sid: str) -> OpenSession:
        """Return the session of an id, creating it on its first request."""
        if sid in self.closed:
            raise Problem(Kind.CLOSED, "this session is over")
        if sid not in self.store:
            raise Problem(Kind.NO_SESSION, f"session {sid!r} was not opened")
        if sid not in self._held:
            if self._sessions is None:
                raise Problem(Kind.SHUTTING_DOWN, "the endpoints are shutting down")
            opened = self.store[sid]
            bound = opened.sampling_defaults.get("max_new_tokens")
            limits = {"max_turns": self.max_turns_per_sid, "max_context": opened.max_context_tokens or None}
            limits["max_new_tokens"] = bound or (None if opened.max_context_tokens else NEW_TOKENS)
            self._held[sid] = self._sessions.open(Opening(sid, opened.sampling_defaults, limits))
        return self._held[sid]

    def _told(self, sid: str, turns: list[Turn]) -> None:
        for turn in turns if self.debug_callback is not None else []:
            told = {"sid": sid, "turn": turn.number, "prompt_ids": turn.context.ids.tolist()}
            told |= {"output_ids": turn.ids.tolist(), "text": turn.text, "finish_reason": turn.finish_reason}
            try:
                self.debug_callback(told)  # type: ignore[misc]
            except Exception:
                logger.exception("debug_callback failed")

    async def _models(self, request: web.Request) -> web.Response:
        return json_response(models_body([MODEL]))

    async def _healthy(self, request: web.Request) -> web.Response:
        return json_response({"ok": True})

    async def _no_path(self, request: web.Request) -> web.Response:
        problem = Problem(Kind.NO_PATH, f"{request.method} {request.path} is not served here")
        return self._build_reply(dialect_of(request.path, request.headers), problem)

    # the ends of sessions, in the application's loop

    async def _quiet(self, sid: str, wait_timeout: float) -> None:
        if sid in self.store:
            self.closed[sid] = None
        if self.inflight[sid]:
            idle = self._idle.setdefault(sid, asyncio.Event())
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_timeout):
                    await idle.wait()
        while len(self.closed) > REMEMBERED and next(iter(self.closed)) not in self.store:
            self.closed.popitem(last=False)

    async def _ended(self, sid: str, wait_timeout: float) -> OpenSession | None:
        await self._quiet(sid, wait_timeout)
        self.store.pop(sid, None)
        self._idle.pop(sid, None)
        held = self._held.pop(sid, None)
        if held is not None and self._sessions is not None:
            await self._sessions.close(sid, Problem(Kind.CLOSED, "this session is over"))
        return held

    async def _in_app(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the application's loop and await it from any loop."""
        if self._loop is None or self._loop is asyncio.get_running_loop():
            return await coro
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coro, self._loop))

    async def _start(self, app: web.Application) -> None:
        self._loop = asyncio.get_running_loop()
        self._pool = RoutedPool([self.sglang_url], self.sglang_url, router_only=True)  # a router forwards the keys
        self._sessions = Sessions(self._model, self._pool, fault_tolerant=False, version=None)
        self._unknown = self._sessions.common_intake(None, MOST_UNKNOWN, "sessions that no header names")

    async def _stop(self, app: web.Application) -> None:
        assert self._sessions is not None
        assert self._pool is not None
        await self._sessions.close_all(Problem(Kind.SHUTTING_DOWN, "the endpoints are shutting down"))
        await self._pool.aclose()
        self._loop = self._sessions = self._pool = self._unknown = None


class Trajectories:
    """The turns of an adapter's sessions, under upstream's method names."""

    def __init__(self, adapter: BaseAdapter) -> None:
        self._adapter = adapter

    def has_session(self, sid: str) -> bool:
        """Return True if a turn was recorded under this id."""
        return self.turn_count(sid) > 0

    def turn_count(self, sid: str) -> int:
        """Return the number of turns recorded under this id."""
        held = self._adapter._held.get(sid)
        return 0 if held is None else len(held.session.tree.turns)


class _Answering:
    """Counts a request as in flight while the body runs; notifies the waiter when the last one of a session ends."""

    def __init__(self, adapter: BaseAdapter, sid: str) -> None:
        self._adapter, self._sid = adapter, sid
        self._turns = adapter._held[sid].session.tree.turns
        self._before = len(self._turns)

    def __enter__(self) -> None:
        self._adapter.inflight[self._sid] += 1

    def __exit__(self, *exception: object) -> None:
        adapter, sid = self._adapter, self._sid
        adapter.inflight[sid] -= 1
        if not adapter.inflight[sid]:
            del adapter.inflight[sid]
            if sid in adapter._idle:
                adapter._idle[sid].set()
        adapter._told(sid, list(self._turns.values())[self._before :])


def _object_of(raw: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object; raises `Problem`."""
    try:
        body = parse_json(raw)
    except (ValueError, RecursionError) as error:
        raise Problem(Kind.BAD_BODY, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Problem(Kind.BAD_BODY, "the body must be an object")
    return body
