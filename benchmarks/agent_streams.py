"""Streamed answers of many sessions at once: what the session servers cost for each token.

    python benchmarks/agent_streams.py
    python benchmarks/agent_streams.py --servers 4 --engines 4 --clients 4 --step 0.01

Engines that send one token in an event (`scripted_engine.py --step`), `--servers` session servers with the sessions
pinned to them, and clients that read the streams without parsing them, each in processes of their own.

tokens/s    over all sessions, from the first request to the last token
cpu         microseconds of the session servers' CPU time for a token
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import aiohttp
import orjson
from agents import CALL, Text, child, cpu_seconds, engines_of

from slime.agent.server.control import RemoteServer
from slime.agent.server.settings import Opening


async def stream(http: aiohttp.ClientSession, url: str, key: str) -> int:
    """Read one streamed answer; returns the number of its events."""
    body = {"model": "slime-actor", "stream": True, "messages": [{"role": "user", "content": key}]}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    events = 0
    async with http.post(f"{url}/v1/chat/completions", data=orjson.dumps(body), headers=headers) as response:
        assert response.status == 200, await response.text()
        async for chunk in response.content.iter_any():
            events += chunk.count(b"data: ")
    return events


async def streams(work: list[tuple[str, str]], turns: int) -> int:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as http:

        async def one(url: str, key: str) -> int:
            return sum([await stream(http, url, key) for _ in range(turns)])

        return sum(await asyncio.gather(*(one(url, key) for url, key in work)))


def client(work: list[tuple[str, str]], turns: int, results: Connection) -> None:
    results.send(asyncio.run(streams(work, turns)))


async def open_sessions(lines: list[str], sessions: int) -> list[tuple[str, str]]:
    """Open the sessions; returns the URL and the key of each."""
    work = []
    for number, line in enumerate(map(json.loads, lines)):
        server = RemoteServer(line, line["secret"])
        for session in range(number, sessions, len(lines)):
            key = f"session-{session}"
            opening = Opening(key=key, params={"max_new_tokens": 4096, "temperature": 1.0})
            await server.call("open", **asdict(opening))
            work.append((server.url, key))
        await server.aclose()
    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--answer", type=int, default=500, help="tokens of an answer")
    parser.add_argument("--step", type=float, default=0.02, help="seconds between the tokens of an answer")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--clients", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        text = Text.make(Path(folder))
        tail = ",".join(map(str, text.tokenizer.encode(CALL)))
        engine = (str(Path(__file__).with_name("scripted_engine.py")), "--answer", str(options.answer), "--tail", tail)
        urls = stack.enter_context(contextmanager(engines_of)((*engine, "--step", str(options.step)), options.engines))
        flags = [word for url in urls for word in ("--engine", url)]
        server = ("-m", "slime.agent.server", "--model", folder, *flags, "--log-level", "warning")
        pids, lines = zip(*(stack.enter_context(child(*server)) for _ in range(options.servers)), strict=True)
        work = asyncio.run(open_sessions(list(lines), options.sessions))
        before, began = sum(map(cpu_seconds, pids)), time.perf_counter()
        processes, receivers = [], []
        for number in range(options.clients):
            receiver, sender = get_context("fork").Pipe(duplex=False)
            process = get_context("fork").Process(
                target=client, args=(work[number :: options.clients], options.turns, sender)
            )
            process.start()
            processes.append(process)
            receivers.append(receiver)
        events = sum(receiver.recv() for receiver in receivers)
        seconds, cpu = time.perf_counter() - began, sum(map(cpu_seconds, pids)) - before
        for process in processes:
            process.join()
        tokens = options.sessions * options.turns * options.answer
        print(f"{options.servers} servers, {options.sessions} sessions, {platform.machine()}, {os.cpu_count()} cores")
        print(f"{tokens:,} tokens in {seconds:.1f} s: {tokens / seconds:,.0f} tokens/s")
        print(f"at most {options.sessions / options.step:,.0f} tokens/s; {events / tokens:.2f} events a token")
        print(f"CPU of the servers: {1e6 * cpu / tokens:.1f} us a token, {cpu / seconds:.2f} cores")


if __name__ == "__main__":
    main()
