"""Limits on one client of the agent server: key check before the body, session limits, work off the event loop."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import logging
import socket
import weakref
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from slime.agent.messages import Message, TurnRequest
from slime.agent.server.app import AgentApp
from slime.agent.server.dialects import Kind, Problem
from slime.agent.server.online_intake import NAME, LiveConversations
from slime.agent.server.request_limits import INLINE_CHARACTERS, RequestReservation
from slime.agent.server.sessions import OpenSession, Sessions
from slime.agent.server.settings import LiveSettings, Opening
from slime.agent.session.limits import PromptExceedsContext
from slime.agent.session.session import SampledTurn
from slime.agent.session.template import ChatModel
from slime.agent.session.tree import Decision
from slime.cluster.http_server import ClientLogLimit, Connections, bind_sockets
from slime.engine.http.pool import EnginePool

CONTEXT = 4096


def with_server(
    tokenizer: Any,
    use: Callable[[Sessions, Connections, int], Awaitable[Any]],
    *,
    most: int = 16,
    door_of: Callable[[Sessions], LiveConversations] | None = None,
) -> Any:
    """Run `use` against a server with a session `k` of at most `CONTEXT` prompt tokens; return its result."""

    async def run() -> Any:
        pool = EnginePool([], may_be_empty=True)
        sessions = Sessions(ChatModel(tokenizer, context=CONTEXT), pool)
        sessions.open(Opening(key="k", params={}))
        connections = Connections(most)
        door = None if door_of is None else door_of(sessions)
        app = AgentApp(sessions, tokenizer, ["m"], connections, door).app
        runner = web.AppRunner(app, handler_cancellation=True, auto_decompress=False, lingering_time=0.1)
        await runner.setup()
        [listening] = await bind_sockets("127.0.0.1", 0)
        assert runner.server is not None
        connections.accept_on(listening, runner.server)
        try:
            return await use(sessions, connections, listening.getsockname()[1])
        finally:
            await connections.aclose()
            await runner.cleanup()
            await sessions.close_all(Problem(Kind.CLOSED, "over"))
            await pool.aclose()
            if door is not None:
                await door.aclose()

    return asyncio.run(run())


async def post_raw(port: int, body: bytes, *lines: str, path: str = "/v1/messages/count_tokens") -> tuple[int, Any]:
    """Send exactly these bytes, possibly fewer than announced; return (status, JSON) of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    given = (
        lines if any(line.startswith("Content-Length") for line in lines) else (*lines, f"Content-Length: {len(body)}")
    )
    head = "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *given])
    try:
        writer.write(head.encode() + b"\r\n\r\n" + body)
        status = int((await reader.readline()).split()[1])
        length = 0
        while line := (await reader.readline()).strip():
            if line.lower().startswith(b"content-length:"):
                length = int(line.split()[1])
        return status, json.loads(await reader.readexactly(length))
    finally:
        writer.close()


def request_body(text: str) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()


KEY = "Authorization: Bearer k"


def test_wrong_key_is_rejected_before_the_body_arrives(agent_tokenizer: Any) -> None:
    async def use(sessions: Sessions, connections: Connections, port: int) -> Any:
        return [await post_raw(port, b"{", *lines, "Content-Length: 60000000") for lines in ((), ("x-api-key: guess",))]

    assert [status for status, _ in with_server(agent_tokenizer, use)] == [400, 400]  # Claude Code does not retry 400


@pytest.mark.parametrize(
    ("body", "lines", "says"),
    [
        (b"{", ("Content-Length: 60000000",), "more than 4194304 bytes"),
        (gzip.compress(b" " * (5 << 20)), ("Content-Encoding: gzip",), "more than 4194304 bytes"),
        (gzip.compress(request_body("hi"))[:-9], ("Content-Encoding: gzip",), "ends early"),
        (b"\x00", ("Content-Encoding: br",), "send gzip, deflate or none"),
        (b"\x00", ("Content-Encoding: gzip",), "cannot be decompressed"),
        (b"[" + b"{}," * 100_000 + b"1]", (), "more than 131072 JSON values"),
        (request_body("a b " * 500_000), (), "prompt is too long"),
        (b'{"messages": ' + b"[" * 50_000, (), "not JSON"),
    ],
    ids=["announced", "bomb", "cut off", "unknown coding", "no gzip", "many values", "many tokens", "deep"],
)
def test_rejects_bodies_beyond_the_limits_and_frees_their_allowance(
    agent_tokenizer: Any, body: bytes, lines: tuple[str, ...], says: str
) -> None:
    async def use(sessions: Sessions, connections: Connections, port: int) -> Any:
        refused = await post_raw(port, body, KEY, *lines)
        small = request_body("hi")
        answered = [await post_raw(port, small, KEY)]
        answered += [await post_raw(port, gzip.compress(small), KEY, "Content-Encoding: gzip")]
        intake = sessions.find("k").intake
        return refused, answered, (intake._requests, intake._bytes)

    (status, answer), answered, held = with_server(agent_tokenizer, use)
    assert status == 400
    assert says in answer["error"]["message"]
    assert [status for status, _ in answered] == [200, 200]
    assert answered[0][1] == answered[1][1]
    assert held == (0, 0)


def test_request_above_the_in_flight_limit_gets_429(agent_tokenizer: Any) -> None:
    async def use(sessions: Sessions, connections: Connections, port: int) -> Any:
        intake = sessions.find("k").intake
        rooms = [intake.request() for _ in range(intake.limits.requests)]
        for room in rooms:
            room.__enter__()
        full = await post_raw(port, request_body("hi"), KEY)
        rooms.pop().__exit__(None, None, None)
        return full[0], (await post_raw(port, request_body("hi"), KEY))[0]

    assert with_server(agent_tokenizer, use) == (429, 200)


def test_bodies_of_one_session_share_one_byte_limit(agent_tokenizer: Any) -> None:
    async def use(sessions: Sessions, connections: Connections, port: int) -> None:
        intake = sessions.find("k").intake
        with intake.request() as first, intake.request() as second:
            first._take(intake.limits.held_bytes)
            with pytest.raises(Problem) as problem:
                RequestReservation._take(second, 1)
            assert problem.value.kind is Kind.FULL
        assert intake._bytes == 0

    with_server(agent_tokenizer, use)


def test_new_conversations_share_one_request_limit(
    agent_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients may choose any number of conversation names, so new ones share one limit."""
    live = LiveSettings("live", str(tmp_path / "live.sqlite"), {}, {}, {}, most_conversations=3)
    doors: list[LiveConversations] = []
    key = "Authorization: Bearer live"

    def door_of(sessions: Sessions) -> LiveConversations:
        doors.append(LiveConversations(live, sessions))
        return doors[0]

    async def use(sessions: Sessions, connections: Connections, port: int) -> Any:
        entering = doors[0].intake({NAME: "new"})
        while_answered: list[tuple[int, int]] = []
        count = OpenSession.count_tokens

        def noted(held: OpenSession, request: TurnRequest) -> Awaitable[int]:
            while_answered.append((entering._requests, held.intake._requests))
            return count(held, request)

        monkeypatch.setattr(OpenSession, "count_tokens", noted)

        async def ask(name: str) -> tuple[int, Any]:
            return await post_raw(port, request_body("hi"), key, f"{NAME}: {name}")

        answers = [(await ask("open"))[0]]
        with entering.request() as room:
            room._take(entering.limits.held_bytes)
            answers += [(await ask(name))[0] for name in ("open", "new", "other")]
        with ExitStack() as stack:
            for number in range(entering.limits.requests):
                stack.enter_context(doors[0].intake({NAME: str(number)}).request())
            answers += [(await ask(name))[0] for name in ("open", "new")]
            told = (await ask("other"))[1]["error"]["message"]
        answers.append((await ask("new"))[0])
        return answers, told, while_answered

    answers, told, while_answered = with_server(agent_tokenizer, use, door_of=door_of)
    assert answers == [200, 200, 429, 429, 200, 429, 200]
    assert told == "128 requests of new conversations are in flight: retry later"
    assert while_answered == [(0, 1), (1, 1), (128, 1), (0, 1)]  # a request being answered counts for its conversation


def test_idle_connections_are_dropped_for_a_client_with_a_key(agent_tokenizer: Any) -> None:
    async def use(sessions: Sessions, connections: Connections, port: int) -> Any:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)  # a client that has sent its key
        body = request_body("hi")
        lines = ("POST /v1/messages/count_tokens HTTP/1.1", "Host: x", KEY, "Content-Type: application/json")
        request = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
        writer.write(request.encode() + body)
        heard = await reader.readuntil(b"}")
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        new = await post_raw(port, body, KEY)
        writer.write(request.encode() + body)
        again = await reader.readuntil(b"}")
        writer.close()
        for one in strangers:
            one.close()
        return heard.split()[1], new[0], again.split()[1], connections.refused

    assert with_server(agent_tokenizer, use, most=4) == (b"200", 200, b"200", 0)


def test_stored_problem_does_not_keep_requests_alive(agent_tokenizer: Any) -> None:
    async def use(sessions: Sessions, connections: Connections, port: int) -> Any:
        class Big: ...

        def asked() -> weakref.ref[Big]:
            body = Big()
            with pytest.raises(Problem, match="done"):
                sessions.find("k")
            return weakref.ref(body)

        held = sessions.find("k")
        await sessions.close("k", Problem(Kind.CLOSED, "done"))
        bodies = [asked() for _ in range(3)]
        with pytest.raises(Problem, match="done"):
            await held.begin(TurnRequest((Message("user", "hi"),)), None)
        gc.collect()
        return [body() for body in bodies], sessions._closed["k"].__traceback__, held.ended.result().__traceback__

    assert with_server(agent_tokenizer, use) == ([None] * 3, None, None)


def test_text_far_beyond_the_context_is_tokenized_only_in_part(
    agent_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ChatModel(agent_tokenizer)
    seen: list[int] = []
    count = model._token_count
    monkeypatch.setattr(model, "_token_count", lambda text: seen.append(len(text)) or count(text))
    text = "a b " * 2_500_000
    with pytest.raises(PromptExceedsContext) as refused:
        model.check_length(TurnRequest((Message("user", text),)), CONTEXT)
    assert sum(seen) < 100_000
    whole = len(agent_tokenizer.encode(text[:100_000])) * len(text) // 100_000
    assert refused.value.tokens == pytest.approx(whole, rel=0.05)
    seen.clear()
    fits = TurnRequest((Message("user", "a b " * 2000),))
    model.check_length(fits, CONTEXT)
    assert seen == []  # prompts of usual length are not tokenized
    with pytest.raises(PromptExceedsContext):
        model.check_length(TurnRequest((Message("user", ""),) * (CONTEXT + 1)), CONTEXT)


def test_tools_count_only_if_the_template_renders_them(agent_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def offering(*described: str) -> TurnRequest:
        tools = [{"type": "function", "function": {"name": "f", "description": text}} for text in described]
        return TurnRequest((Message("user", "hi"),), tools=tuple(tools))

    model = ChatModel(agent_tokenizer)
    seen: list[int] = []
    count = model._token_count
    monkeypatch.setattr(model, "_token_count", lambda text: seen.append(len(text)) or count(text))
    for tools in (offering("a b " * 1_000_000), offering(*["a b"] * 200_000)):
        with pytest.raises(PromptExceedsContext):
            model.check_length(tools, CONTEXT)
        assert sum(seen) < 100_000
        seen.clear()
    model.check_length(offering("a b " * 2000), CONTEXT)
    assert seen == []
    model.sources[True] = "{% for message in messages %}{{ message.content }}{% endfor %}"
    model.check_length(offering("a b " * 1_000_000), CONTEXT)


def test_long_prompt_is_tokenized_off_the_loop_with_the_same_count(agent_tokenizer: Any) -> None:
    async def use(sessions: Sessions, connections: Connections, port: int) -> Any:
        held = sessions.find("k")
        loops: list[bool] = []
        render = held.session.render

        def noted(*arguments: Any) -> Any:
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                loops.append(False)
            else:
                loops.append(True)
            return render(*arguments)

        held.session.render = noted  # type: ignore[method-assign]
        texts = ["hi", "a b " * INLINE_CHARACTERS]
        requests = [TurnRequest((Message("user", text),)) for text in texts]
        counted = [await held.count_tokens(request) for request in requests]
        return loops, counted == [held.session.count_tokens(request) for request in requests]

    assert with_server(agent_tokenizer, use) == ([True, False, True, True], True)


def test_long_prompt_is_rendered_again_if_a_turn_is_recorded_meanwhile(agent_tokenizer: Any) -> None:
    async def use(sessions: Sessions, connections: Connections, port: int) -> Any:
        held = sessions.find("k")
        session, render = held.session, held.session.render
        first = TurnRequest((Message("user", "a"),))
        before = session.prepare(first)
        said = Message("assistant", "b", reference=before.turn_id)
        follow = TurnRequest((*first.messages, said, Message("user", "a b " * INLINE_CHARACTERS)))
        places: list[Decision] = []

        def noted(place: Decision, request: TurnRequest) -> Any:
            if not places:  # the turn that the request continues is recorded while its text is rendered
                session.record(before, SampledTurn(agent_tokenizer.encode("b"), [-1.0], "stop", {}, said))
            places.append(place)
            return render(place, request)

        session.render = noted  # type: ignore[method-assign]
        counted = await held.count_tokens(follow)
        ids = session.prepare(follow).ids
        turn = session.tree.turns[before.turn_id]
        history = [*before.ids.tolist(), *turn.ids.tolist()]
        return (
            [place.turn for place in places[:2]] == [None, turn],
            counted == len(ids),
            ids.tolist()[: len(history)] == history,
        )

    assert with_server(agent_tokenizer, use) == (True, True, True)


def test_repeated_client_messages_are_counted_instead_of_logged() -> None:
    noise = ClientLogLimit()

    def passed(message: str, at: float) -> str | None:
        record = logging.makeLogRecord({"name": "x", "levelno": 30, "msg": message, "args": (at,), "created": at})
        return record.getMessage() if noise.filter(record) else None

    first = [passed("a client went away at %s", 0.0) for _ in range(1000)]
    assert sum(message is not None for message in first) == ClientLogLimit.MOST
    assert passed("another at %s", 0.0) == "another at 0.0"
    left = 1000 - ClientLogLimit.MOST
    assert (
        passed("a client went away at %s", 20.0)
        == f"a client went away at 20.0 ({left} more of this kind were not logged)"
    )
    assert passed("a client went away at %s", 21.0) == "a client went away at 21.0"
