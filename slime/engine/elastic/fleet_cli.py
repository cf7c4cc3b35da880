"""Who is in the fleet of a run: asked of the run by `slime fleet`, and written as a table."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slime.engine.elastic.handshake import (
    ADDRESS_FILE,
    TOKEN_FILE,
    Refused,
    read_token,
    received,
    split_address,
    visiting,
)
from slime.engine.fleet.status import Load, ask_load
from slime.engine.http.client import EngineClient
from slime.engine.http.errors import EngineError
from slime.engine.http.pool import EnginePool
from slime.errors import UserError

_ASK_S = 5.0
_COLUMNS = ("name", "address", "state", "version", "running", "queued", "age")


@dataclass(frozen=True)
class Row:
    """One engine; what it does not say is None."""

    name: str
    address: str
    state: str
    version: str | None
    running: int | None
    queued: int | None
    age: float


async def fleet_rows(
    pool: EnginePool, names: Mapping[str, str], since: Mapping[str, float], away: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Every engine of the pool, asked at once; `away` are those that get no requests, and why."""

    async def row(client: EngineClient) -> Row:
        url = client.base_url
        state = away.get(url) or pool.state_of(url)
        asked = asyncio.to_thread(ask_load, url, client.api_key)
        version, load = await asyncio.gather(_version(client), asked)
        running, queued = (load.running, load.queued) if isinstance(load, Load) else (None, None)
        age = time.time() - since.get(url, time.time())
        return Row(names.get(url, url), url.removeprefix("http://"), state, version, running, queued, age)

    return [asdict(one) for one in await asyncio.gather(*(row(client) for client in pool.clients))]


async def _version(client: EngineClient) -> str | None:
    try:
        return await client.get_weight_version(timeout_s=_ASK_S)
    except EngineError:
        return None


def fleet_command(words: Sequence[str]) -> int:
    """`slime fleet [RUN_DIR|HOST:PORT]`: who is there; with --drain, have one of them leave."""
    parser = argparse.ArgumentParser(
        prog="slime fleet", description="List the engines of a run that was started with --fleet-address."
    )
    parser.add_argument("run", nargs="?", default=".", help="run folder, or HOST:PORT of its door (default: .)")
    parser.add_argument("--join-token-file", help="file with the run's token (default: that of the run folder)")
    parser.add_argument("--drain", metavar="NAME", help="have this joined engine finish and leave")
    parser.add_argument("--json", action="store_true", help="one JSON object per engine")
    given = parser.parse_args(list(words))
    address, token = _whom(given.run, given.join_token_file)
    if given.drain is not None:
        asyncio.run(_asked(address, token, {"wants": "drain", "name": given.drain}, "asked"))
        print(f"{given.drain} was asked to leave")
        return 0
    rows = asyncio.run(_asked(address, token, {"wants": "list"}, "fleet"))["engines"]
    print("\n".join(json.dumps(row) for row in rows) if given.json else table(rows))
    return 0


def _whom(run: str, token_file: str | None) -> tuple[str, str]:
    folder = Path(run)
    if not folder.is_dir():
        split_address(run, "slime fleet")
        return run, read_token(token_file)
    try:
        address = str(json.loads((folder / ADDRESS_FILE).read_text())["address"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{run} has no {ADDRESS_FILE} that can be read: give the folder of a run that goes on and was started with "
            "--fleet-address, or HOST:PORT"
        ) from error
    return address, read_token(token_file or str(folder / TOKEN_FILE))


async def _asked(address: str, token: str, what: dict[str, Any], answer: str) -> dict[str, Any]:
    async with visiting(address, token, **what) as ws:
        message = await received(ws)
    if message.get("kind") != answer:
        raise Refused(str(message.get("why", f"the run answered {message.get('kind')}")))
    return message


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per engine below a line of names."""
    cells = [list(_COLUMNS)] + [[_cell(name, row.get(name)) for name in _COLUMNS] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_COLUMNS))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name != "age":
        return str(value)
    seconds = int(value)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
