"""An MCP server over stdio that knows what rooms and trains cost in a city on a day."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from prices import CITIES, DAYS, offered

server = MCPServer("travel")


def _answer(kind: str, city: str, day: int) -> str:
    if city not in CITIES or day not in DAYS:
        raise ToolError(f"nothing is known about {city} {day}")
    return offered(kind, city, day)


@server.tool()
def hotels(city: str, day: int) -> str:
    """Rooms in a city on a day of the season, with their prices."""
    return _answer("hotels", city, day)


@server.tool()
def trains(city: str, day: int) -> str:
    """Trains to a city on a day of the season, with their prices."""
    return _answer("trains", city, day)


if __name__ == "__main__":
    server.run("stdio")
