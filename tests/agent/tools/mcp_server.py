"""MCP test server over stdio or, with a port, HTTP, whose tools answer, fail, crash or hang."""

import os
import sys
import time

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("test")
kept = []


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def keep(value: str) -> str:
    """Stores a value and returns all stored values."""
    kept.append(value)
    return ",".join(kept)


@server.tool()
def fail() -> str:
    raise ToolError("no such thing")


@server.tool()
def die() -> str:
    os._exit(9)


@server.tool()
async def hang(file: str) -> str:
    """Blocks the whole server until the file exists; creates `{file}.waited_for` first."""
    open(f"{file}.waited_for", "w").close()  # noqa: ASYNC230
    while not os.path.exists(file):  # noqa: ASYNC240
        time.sleep(0.01)  # noqa: ASYNC251
    return "woken"


@server.tool()
async def doze() -> str:
    """Never answers, while the server stays responsive."""
    import anyio

    await anyio.sleep_forever()
    return ""


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
