"""Tools of real MCP servers over stdio and HTTP: a server that dies or hangs fails only its own calls."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from slime.agent.messages import ToolCall
from slime.agent.tools import McpServer, ToolBox, ToolEnvironment, ToolFailure
from slime.cluster.ports import free_port
from slime.cluster.process import process_tree
from slime.errors import UserError
from tests.e2e.runs import wait_until

SERVER = Path(__file__).with_name("mcp_server.py")
COMMAND = [sys.executable, str(SERVER)]
PATIENCE_S = 120.0


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def http_server(port: int) -> Iterator[str]:
    process = subprocess.Popen([*COMMAND, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not listens(port):
            assert process.poll() is None
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def open_box(server: McpServer) -> AsyncIterator[ToolBox]:
    environment = ToolEnvironment([server])
    try:
        async with environment.open() as box:
            yield box
    finally:
        await environment.aclose()


def in_box(server: Callable[[], McpServer], work: Callable[[ToolBox], Awaitable[None]]) -> None:
    async def main() -> None:
        async with open_box(server()) as box:
            await work(box)

    asyncio.run(main())


def set_timeout(box: ToolBox, name: str, timeout_s: float) -> None:
    """Set the timeout of one tool of the server."""
    tool: Any = box._tools[name]
    tool.limits = dataclasses.replace(tool.limits, timeout_s=timeout_s)


async def call_tool(box: ToolBox, name: str, **arguments: Any) -> tuple[str, str]:
    result = await box.call(name, arguments)
    return result.outcome.value, result.text


async def check_tools(box: ToolBox) -> None:
    schemas = {schema["function"]["name"]: schema["function"] for schema in box.schemas}
    assert list(schemas) == ["add", "keep", "fail", "die", "hang", "doze"]
    assert schemas["add"]["description"] == "Adds two numbers."
    assert schemas["add"]["parameters"]["required"] == ["a", "b"]
    assert await call_tool(box, "add", a=2, b=3) == ("ok", "5")
    outcome, text = await call_tool(box, "add", a="x", b=3)
    assert outcome == "error"
    assert "valid integer" in text
    outcome, text = await call_tool(box, "fail")
    assert outcome == "error"
    assert "no such thing" in text
    many = [ToolCall(str(i), "add", f'{{"a": {i}, "b": 1}}') for i in range(20)]
    assert [result.text for result in await box.run(many)] == [str(i + 1) for i in range(20)]


def test_stdio_tools_work_and_a_dead_server_is_restarted() -> None:
    async def work(box: ToolBox) -> None:
        await check_tools(box)
        assert await call_tool(box, "keep", value="a") == ("ok", "a")
        # The server dies: this call fails, and the next one uses a restarted server.
        outcome, text = await call_tool(box, "die")
        assert outcome == "crashed"
        assert "MCP server" in text
        assert await call_tool(box, "keep", value="b") == ("ok", "b")

    in_box(lambda: McpServer.stdio(COMMAND), work)


def test_http_tools_work_and_a_server_may_go_and_return() -> None:
    port = free_port()

    async def main() -> None:
        with http_server(port) as url:
            server = McpServer.http(url, timeout_s=PATIENCE_S)
            environment = ToolEnvironment([server])
            async with environment.open() as box:
                await check_tools(box)
        async with environment.open() as box:  # the server is gone, but attempts can start
            outcome, _ = await call_tool(box, "add", a=1, b=1)
            assert outcome == "crashed"
            with http_server(port):
                assert await call_tool(box, "add", a=1, b=1) == ("ok", "2")
            await environment.aclose()

    asyncio.run(main())


def test_call_timeout_does_not_affect_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.agent.tools.mcp.PROBE_TIMEOUT_S", PATIENCE_S)

    async def work(box: ToolBox) -> None:
        set_timeout(box, "doze", 0.5)
        assert await call_tool(box, "keep", value="a") == ("ok", "a")
        late, quick = await box.run([ToolCall("0", "doze", "{}"), ToolCall("1", "keep", '{"value": "b"}')])
        assert (late.outcome.value, late.text) == ("timeout", "Error: doze did not answer within 0.5 s")
        assert (quick.outcome.value, quick.text) == ("ok", "a,b")
        assert await call_tool(box, "keep", value="c") == ("ok", "a,b,c")  # still the same server

    in_box(lambda: McpServer.stdio(COMMAND, timeout_s=PATIENCE_S), work)


def test_hung_server_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("slime.agent.tools.mcp.PROBE_TIMEOUT_S", 0.2)
    never, hangs = tmp_path / "never", tmp_path / "never.waited_for"

    async def work(box: ToolBox) -> None:
        assert await call_tool(box, "keep", value="a") == ("ok", "a")
        timeout_s = 0.25
        while not hangs.exists():  # the call may time out before the server reads it
            set_timeout(box, "hang", timeout_s := 2 * timeout_s)
            assert (await call_tool(box, "hang", file=str(never)))[0] in ("timeout", "crashed")
        while (answer := await call_tool(box, "keep", value="b"))[0] != "ok":
            assert answer[0] == "crashed"
        assert answer[1] == "b"  # a new process, which has no stored values

    in_box(lambda: McpServer.stdio(COMMAND, timeout_s=PATIENCE_S), work)


def test_per_attempt_server_offers_only_the_chosen_tools() -> None:
    async def main() -> None:
        server = McpServer.stdio(COMMAND, tools=["keep"], prefix="my_", per_attempt=True)
        environment = ToolEnvironment([server])

        async def attempt(value: str) -> str:
            async with environment.open() as box:
                assert [schema["function"]["name"] for schema in box.schemas] == ["my_keep"]
                return (await call_tool(box, "my_keep", value=value))[1]

        assert await asyncio.gather(attempt("a"), attempt("b")) == ["a", "b"]

    asyncio.run(main())


def test_rejects_a_tool_that_the_server_lacks() -> None:
    with pytest.raises(UserError, match=r"has no tool fly; it has: add, keep"):
        in_box(lambda: McpServer.stdio(COMMAND, tools=["fly"]), lambda box: call_tool(box, "fly"))


def test_failed_start_error_includes_the_output_of_the_server() -> None:
    command = [sys.executable, "-c", "raise SystemExit('the licence is missing')"]
    with pytest.raises(ToolFailure, match=r"cannot be used.*its last words: the licence is missing"):
        in_box(lambda: McpServer.stdio(command), lambda box: call_tool(box, "add"))
    with pytest.raises(ToolFailure, match=r"its last words: error: cannot start /nowhere/server: No such file"):
        in_box(lambda: McpServer.stdio(["/nowhere/server"]), lambda box: call_tool(box, "add"))


def test_missing_mcp_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(UserError, match=r"MCP servers need the package mcp: pip install 'slime\[agents\]'"):
        McpServer.http("http://127.0.0.1:1/mcp")


DRIVER = """\
import asyncio, sys

from slime.agent.tools import McpServer, ToolEnvironment


async def main() -> None:
    environment = ToolEnvironment([McpServer.stdio([sys.executable, sys.argv[1]])])
    async with environment.open() as box:
        print("ready", flush=True)
        await box.call("hang", {"file": sys.argv[2]})


asyncio.run(main())
"""


def test_hung_server_does_not_outlive_a_killed_driver(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DRIVER, str(SERVER), str(tmp_path / "never")]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "ready\n"
    started = process_tree(driver.pid)[1:]
    assert len(started) == 3  # a guard, its deputy, the server
    driver.kill()
    driver.wait()
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started), within_s=PATIENCE_S)
