"""An MCP server for the tests, over stdio or (with a port) HTTP, whose tools do what they are told to."""

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
    """Remembers a value and says all of them."""
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
    """Blocks the whole server until the file is there; another one says that it does."""
    open(f"{file}.waited_for", "w").close()  # noqa: ASYNC230
    while not os.path.exists(file):  # noqa: ASYNC240
        time.sleep(0.01)  # noqa: ASYNC251
    return "woken"


@server.tool()
async def doze() -> str:
    """Never answers; the server goes on."""
    import anyio

    await anyio.sleep_forever()
    return ""


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
