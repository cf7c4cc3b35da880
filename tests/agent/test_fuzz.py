"""Hostile clients of the agent server neither fail nor delay the sessions of other clients."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slime.agent.server.control import RemoteServer
from slime.agent.server.dialects import Kind
from slime.agent.server.settings import Opening
from tests.agent.fuzz import SLEEP_S, WARM_TURNS, excesses
from tests.agent.scripted_engine import Play, Script, ScriptedEngine, Turn, _Place

REQUESTS = int(os.environ.get("SLIME_FUZZ_REQUESTS", "300"))
SEED = int(os.environ.get("SLIME_FUZZ_SEED", "1"))
LATENCY_S = float(os.environ.get("SLIME_FUZZ_LATENCY_S", "10"))
"""Longest latency of a request of a quiet session, beyond the machine's own delay of a concurrent sleep."""
FILES = 700
"""The server's limit of open files, which is lower than the held connections need."""
PARAMS = {"temperature": 0.7, "top_p": 1.0, "max_new_tokens": 8, "sampling_seed": 7}


class AnyPrompt(Script):
    """Script that answers every prompt with the same turn and records nothing."""

    def place_of(self, ids: Any) -> Any:
        return _Place(len(ids), 0, self.plays[0], 0)

    def longest(self, ids: Any, engine: int | None = None) -> Any:
        return None

    def played(self, *_: Any) -> None: ...

    def cut(self, *_: Any) -> None: ...


def start_server(folder: str, engine: str, log: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "slime.agent.server", "--model", folder, "--engine", engine]
    limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (FILES, FILES))
    with log.open("w") as file:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, preexec_fn=limit)


def start_client(*arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.agent.fuzz", *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


async def open_sessions(addresses: dict[str, Any], keys: list[str]) -> str:
    remote = RemoteServer(addresses, addresses["secret"])
    for key in keys:
        await remote.call("open", **asdict(Opening(key=key, params=PARAMS, limits={"max_context": 4096})))
    await remote.aclose()
    return remote.url


async def collect_sessions(addresses: dict[str, Any], keys: list[str]) -> list[dict[str, Any]]:
    remote = RemoteServer(addresses, addresses["secret"])
    records = [await remote.call("close", key=key, kind=str(Kind.CLOSED), message="over", collect=True) for key in keys]
    await remote.aclose()
    return records


def test_excess_latency_subtracts_only_overlapping_delays() -> None:
    sleeps = [(0.0, SLEEP_S), (0.5, 2.5 + SLEEP_S), (3.0, 9.0 + SLEEP_S), (11.0, 11.0 + SLEEP_S)]
    requests = [(0.1, 0.2), (1.0, 2.9), (2.0, 3.5), (10.0, 14.0)]
    assert excesses(requests, sleeps) == pytest.approx([0.1, -0.1, -4.5, 4.0])


def test_quiet_sessions_answer_while_others_are_attacked(
    agent_folder: str, agent_tokenizer: Any, tmp_path: Path
) -> None:
    engine = ScriptedEngine(AnyPrompt(agent_tokenizer, [Play((Turn.of(agent_tokenizer, "46"),))]))
    engine.requests = deque(maxlen=4)  # type: ignore[assignment]
    attacked = [f"attacked-{number}" for number in range(2 + REQUESTS // 5000)]
    quiet = [f"quiet-{number}" for number in range(1 + REQUESTS // 1000)]
    log = tmp_path / "log"
    with engine.serving() as url:
        server = start_server(agent_folder, url, log)
        assert server.stdout is not None
        try:
            addresses = json.loads(server.stdout.readline())
            base = asyncio.run(open_sessions(addresses, attacked + quiet))
            probe = start_client("probe", base, addresses["model"], *quiet)
            assert probe.stdout is not None
            assert probe.stdout.readline() == "warm\n"
            attack = start_client("attack", addresses["port"], SEED, REQUESTS, *attacked)
            start = time.perf_counter()
            outcome = json.loads(attack.communicate()[0])
            took = time.perf_counter() - start
            measured = json.loads(probe.communicate("")[0])
            assert server.poll() is None, log.read_text()[-3000:]
            records = asyncio.run(collect_sessions(addresses, attacked + quiet))
        finally:
            server.terminate()
            server.wait()
    turns, counts, late = (sorted(measured[name]) for name in ("turns", "counts", "late"))
    for name, times in (("turns", turns), ("counts", counts), ("sleeps", late)):
        at = [times[int(len(times) * part)] * 1000 for part in (0.5, 0.99, 0.999)]
        print(
            f"{name}: {len(times)}, ms at 50 %, 99 %, 99.9 %, most: {at[0]:.1f} {at[1]:.1f} {at[2]:.1f} {times[-1] * 1000:.1f}"
        )
    print(f"{REQUESTS} requests in {took:.0f} s: {outcome['statuses']}")
    assert outcome["wrong"] == []
    assert outcome["statuses"]["200"] > REQUESTS // 10
    assert outcome["statuses"]["401"] > REQUESTS // 20
    assert outcome["statuses"]["400"] > REQUESTS // 20
    assert measured["wrong"] == []
    assert measured["beyond"] <= LATENCY_S
    sampled = [len(record["record"]["turns"]) for record in records[len(attacked) :]]
    assert sum(sampled) == WARM_TURNS + len(turns)
    logged = log.read_text().splitlines()
    assert not [line for line in logged if " ERROR " in line or "Traceback" in line]
    assert len(logged) < 200 + REQUESTS // 50
