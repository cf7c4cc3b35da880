"""The endpoints that agents talk to: HTTP in, the dialect of its path, the session of its key.

Invariants: whatever a client sends is answered in its own dialect, and touches no session but the one whose key it has.
Nothing of a body is read before its key is known, and what a body costs counts against the limits of its session.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from aiohttp import web

from slime.agent.live.door import Door
from slime.agent.server.answering import answer_stream, answer_whole, json_response
from slime.agent.server.dialects import (
    DIALECTS,
    Asked,
    Dialect,
    Kind,
    Problem,
    dialect_of,
    model_body,
    models_body,
    refusal_problem,
)
from slime.agent.server.intake import INLINE_BODY_BYTES
from slime.agent.server.sessions import OpenSession, Sessions
from slime.agent.session.limits import SessionRefusal
from slime.agent.session.rendering import TemplateRefused
from slime.cluster.http_checks import no_foreign_pages
from slime.cluster.http_server import Connections
from slime.engine.http.codec import parse_json

MOST_NOTES = 100
"""Different notes about the requests of one session that are logged."""

logger = logging.getLogger(__name__)


class AgentApp:
    """The aiohttp application; `names` are the model's, the first is what clients are told."""

    def __init__(
        self,
        sessions: Sessions,
        tokenizer: Any,
        names: Sequence[str],
        connections: Connections,
        door: Door | None = None,
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
            key = dialect.key(http.headers)
            door = self._door if self._door is not None and self._door.is_for(key) else None
            intake = self._sessions.find(key).intake if door is None else door.intake(http.headers)
            with intake.request() as room, self._connections.serving(http.transport, key or ""):
                body = await room.body(http)
                understood = partial(self._understood, dialect, http.path, body, http.headers, intake.context)
                asked = await intake.run(understood, inline=len(body) <= INLINE_BODY_BYTES)
                held = self._sessions.find(key) if door is None else await door.enter(http.headers)
                room.move_to(held.intake)
                return await self._answered(http, held, dialect, asked)
        except Problem as problem:
            return _refused(dialect, problem)

    def _understood(
        self, dialect: Dialect, path: str, body: bytes, headers: Mapping[str, str], context: int | None
    ) -> Asked:
        """What a body asks for, which may have a prompt that fits; raises `Problem`."""
        try:
            asked = dialect.asked(path, parse_json(body), headers)
            self._sessions.check_length(asked.request, context)
        except SessionRefusal as refusal:
            raise refusal_problem(refusal) from refusal
        except (ValueError, RecursionError) as error:
            raise Problem(Kind.BAD_BODY, f"the body is not JSON: {error}") from error
        return asked

    async def _answered(
        self, http: web.Request, held: OpenSession, dialect: Dialect, asked: Asked
    ) -> web.StreamResponse:
        for note in asked.notes:
            if note not in held.noted and len(held.noted) < MOST_NOTES:
                held.noted.add(note)
                logger.info("%s", note)
        if asked.model not in self._names and asked.model not in held.names:
            raise Problem(
                Kind.UNKNOWN_MODEL, f"the model {asked.model!r} is not served here: ask for {self._names[0]!r}"
            )
        try:
            if asked.count_only:
                return json_response(dialect.counted(await held.count_tokens(asked.request)))
            if asked.stream:
                return await answer_stream(http, held, dialect, asked, self._tokenizer)
            return await answer_whole(held, dialect, asked, self._tokenizer)
        except SessionRefusal as refusal:
            raise refusal_problem(refusal) from refusal
        except TemplateRefused as refused:
            raise Problem(Kind.BAD_BODY, str(refused)) from refused

    async def _models(self, http: web.Request) -> web.Response:
        return json_response(models_body(self._names[:1]))

    async def _model(self, http: web.Request) -> web.Response:
        name = http.match_info["name"]
        if name not in self._names:
            dialect = dialect_of(http.path, http.headers)
            return _refused(dialect, Problem(Kind.UNKNOWN_MODEL, f"the model {name!r} is not served here"))
        return json_response(model_body(name))

    async def _healthy(self, http: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def _no_path(self, http: web.Request) -> web.Response:
        problem = Problem(Kind.NO_PATH, f"{http.method} {http.path} is not served here")
        return _refused(dialect_of(http.path, http.headers), problem)


def _refused(dialect: Dialect, problem: Problem) -> web.Response:
    status, headers, body = dialect.problem(problem)
    return json_response(body, status, headers)
