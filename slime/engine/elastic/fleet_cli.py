"""`slime fleet`: requests the list of a run's engines and prints it as a table, or drains an engine."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime.engine.elastic.handshake import (
    ADDRESS_FILE,
    TOKEN_FILE,
    JoinRefused,
    Message,
    connect_to_run,
    read_token,
    receive_message,
    split_address,
)
from slime.engine.fleet.status import EngineLoad, request_load
from slime.engine.http.client import EngineClient
from slime.engine.http.errors import EngineError
from slime.engine.http.pool import EnginePool
from slime.errors import UserError
from slime.storage.json_types import JsonMapping, JsonObject

_ASK_S = 5.0
_COLUMNS = ("name", "address", "state", "version", "running", "queued", "age")


async def fleet_rows(
    pool: EnginePool, names: Mapping[str, str], since: Mapping[str, float], away: Mapping[str, str]
) -> list[JsonObject]:
    """Rows of all engines of the pool, queried in parallel; `away` has the engines without requests, with reasons.

    Each row has the keys of `_COLUMNS`; unknown values are None, and the age is in seconds.
    """

    async def row(client: EngineClient) -> JsonObject:
        url = client.base_url
        state = away.get(url) or pool.state_of(url)

        async def known_version() -> str | None:
            try:
                return await client.get_weight_version(timeout_s=_ASK_S)
            except EngineError:
                return None

        asking = asyncio.to_thread(request_load, url, client.api_key)
        version, load = await asyncio.gather(known_version(), asking)
        running, queued = (load.running, load.queued) if isinstance(load, EngineLoad) else (None, None)
        age = time.time() - since.get(url, time.time())
        cells = (names.get(url, url), url.removeprefix("http://"), state, version, running, queued, age)
        return dict(zip(_COLUMNS, cells, strict=True))

    return list(await asyncio.gather(*(row(client) for client in pool.clients)))


def fleet_command(words: Sequence[str]) -> int:
    """`slime fleet [RUN_DIR|HOST:PORT]`: list the engines of a run; with --drain, drain a joined engine."""
    parser = argparse.ArgumentParser(
        prog="slime fleet", description="List the engines of a run that was started with --fleet-address."
    )
    parser.add_argument("run", nargs="?", default=".", help="run folder, or HOST:PORT of its fleet (default: .)")
    parser.add_argument("--join-token-file", help="file with the run's token (default: that of the run folder)")
    parser.add_argument("--drain", metavar="NAME", help="drain this joined engine, which then leaves the run")
    parser.add_argument("--json", action="store_true", help="one JSON object per engine")
    given = parser.parse_args(list(words))
    folder = Path(given.run)
    if folder.is_dir():
        try:
            address = str(json.loads((folder / ADDRESS_FILE).read_text())["address"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{given.run} has no readable {ADDRESS_FILE}: give the folder of a running run that was started with "
                "--fleet-address, or HOST:PORT"
            ) from error
        token = read_token(given.join_token_file or str(folder / TOKEN_FILE))
    else:
        address = given.run
        split_address(address, "slime fleet")
        token = read_token(given.join_token_file)
    if given.drain is not None:
        asyncio.run(_send_fleet_request(address, token, {"wants": "drain", "name": given.drain}, "asked"))
        print(f"{given.drain} drains and leaves the run")
        return 0
    rows = asyncio.run(_send_fleet_request(address, token, {"wants": "list"}, "fleet"))["engines"]
    print("\n".join(json.dumps(row) for row in rows) if given.json else table(rows))
    return 0


async def _send_fleet_request(address: str, token: str, request: Message, kind: str) -> Message:
    """Send a request to a run and return its response, which must be of this kind."""
    async with connect_to_run(address, token, **request) as ws:
        message = await receive_message(ws)
    if message.get("kind") != kind:
        raise JoinRefused(str(message.get("why", f"the run answered {message.get('kind')}")))
    return message


def table(rows: Sequence[JsonMapping]) -> str:
    """Format rows as a table with a header line and one line per engine."""

    def cell(name: str, value: str | float | None) -> str:
        if value is None or name != "age":
            return "-" if value is None else str(value)
        seconds = int(value)
        sizes = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))
        size, unit = next((one for one in sizes if seconds >= one[0]), sizes[-1])
        return f"{seconds // size}{unit}"

    cells = [list(_COLUMNS)] + [[cell(name, row.get(name)) for name in _COLUMNS] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_COLUMNS))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)
