"""HTTP servers reject foreign origins, rebound host names, and bodies that are not JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from slime.agent.server.app import AgentApp
from slime.engine.elastic.file_server import FileShares
from slime.engine.http.pool import EnginePool
from slime.engine.http.router import Router

KEY = "open-sesame"
JSON = {"Content-Type": "application/json"}
SHOWN = {"Authorization": f"Bearer {KEY}"}
NO_ENGINE = "http://127.0.0.1:9"
Ask = Callable[..., Any]


def statuses(make: Callable[[], web.Application], *asked: tuple[str, str, dict[str, str]]) -> list[int]:
    """Return the HTTP status of each request (method, path, headers); POST requests have a body."""

    async def scenario() -> list[int]:
        async with TestClient(TestServer(make())) as client:
            found = []
            for method, path, headers in asked:
                data = b"{}" if method == "POST" else None
                async with client.request(method, path, data=data, headers=headers) as answer:
                    found.append(answer.status)
            return found

    return asyncio.run(scenario())


def router(key: str | None) -> Callable[[], web.Application]:
    return lambda: Router(EnginePool([NO_ENGINE], api_key="of the engine"), key=key).app


FOREIGN = [
    ({**JSON, "Host": "evil.example"}, 403),
    ({**JSON, "Host": "evil.example:80", "Origin": "http://evil.example:80"}, 403),
    ({**JSON, "Origin": "http://evil.example"}, 403),
    ({**JSON, "Origin": "null"}, 403),
    ({"Content-Type": "text/plain"}, 415),
    ({"Content-Type": "text/plain;application/json"}, 415),
]


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_router_without_a_key_accepts_only_local_json_requests(path: str) -> None:
    asked = [("POST", path, headers) for headers, _ in FOREIGN]
    assert statuses(router(None), *asked) == [status for _, status in FOREIGN]
    assert statuses(router(None), ("POST", path, JSON)) == [502]  # forwarded, but no engine is reachable
    assert statuses(router(None), ("GET", "/workers", {}), ("GET", "/workers", {"Host": "evil.example"})) == [200, 403]


def test_router_with_a_key_requires_it_except_for_health() -> None:
    wrong = {**JSON, "Authorization": "Bearer guessed"}
    asked = [("POST", "/generate", headers) for headers in (JSON, wrong, {**JSON, **SHOWN})]
    assert statuses(router(KEY), *asked) == [401, 401, 502]
    assert statuses(router(KEY), ("GET", "/workers", {}), ("GET", "/health", {})) == [401, 503]
    from_elsewhere = {"Host": "gpu1.cluster"}
    for kept in (KEY, None):  # the health route needs no key
        assert statuses(router(kept), ("GET", "/health", from_elsewhere)) == [503]
    assert statuses(router(KEY), ("GET", "/workers", from_elsewhere)) == [401]
    named = {**JSON, **SHOWN, "Host": "gpu1.cluster", "Origin": "http://evil.example"}
    assert statuses(router(KEY), ("POST", "/generate", named)) == [502]  # the key permits any origin


def test_agent_endpoints_reject_foreign_origins_and_non_json() -> None:
    def app() -> web.Application:
        return AgentApp(None, None, ["m"], None).app  # type: ignore[arg-type]

    pages = [{**JSON, "Origin": origin} for origin in ("http://evil.example", "null")]
    asked = [("POST", "/v1/messages", headers) for headers in (*pages, {"Content-Type": "text/plain"})]
    assert statuses(app, *asked) == [403, 403, 415]
    assert statuses(app, ("GET", "/healthz", {"Host": "host.docker.internal"})) == [200]


def test_file_server_requires_the_key_of_an_admitted_session() -> None:
    shelves = FileShares()

    def app() -> web.Application:
        made = web.Application()
        made.router.add_get("/files/{shelf}/{name:.+}", shelves.serve)
        return made

    asked = ("GET", "/files/model/config.json", SHOWN)
    assert statuses(app, asked) == [401]
    shelves.admit(KEY)
    assert statuses(app, asked, ("GET", asked[1], {"Authorization": "Bearer \xff"})) == [404, 401]
    shelves.dismiss(KEY)
    assert statuses(app, asked) == [401]
