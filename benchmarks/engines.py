"""The embedded engine and SGLang's server over HTTP: the same model, requests and client, both in one run.

    python benchmarks/engines.py --shape qwen3-0.6b --device cuda --dtype bfloat16 --sglang /opt/sglang/bin/python
    python benchmarks/engines.py                                   # a small model on the CPU, this engine alone

`--sglang` names the interpreter that has SGLang; `--sglang-path` a folder for its PYTHONPATH instead of a virtual
environment. Every load is sent once to warm up with other prompts, then `--repeat` times; the figure is the median.
Log-probs are returned for every token. Tokens that were asked for count, over the seconds until the last answer.

Loads: `batch` 256 x (128 + 512); `one` and `sixteen` streams of (128 + 512); `ragged` 512 requests of 16-256 + 64-768
tokens over 256 rows; `cut` the batch with top-p 0.95 and penalties on every row; `long` 64 x (16,384 + 256); `agents`
32 conversations of 20 turns that grow to 16k tokens, each turn sent when the last one was answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import orjson
from engine import Requests, make_requests
from rich.console import Console
from rich.table import Table
from workload import engine, free_port, make_model, serving

PLAIN = {"temperature": 1.0, "ignore_eos": True}
CUT = {**PLAIN, "top_p": 0.95, "frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.05}
Load = Callable[["Client", int, float], Awaitable[int]]


class Client:
    """Sends requests to one server and sees that every answer is whole."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def generate(self, ids: list[int], length: int, params: dict[str, Any]) -> list[int]:
        body = {"input_ids": ids, "sampling_params": {**params, "max_new_tokens": length}, "return_logprob": True}
        async with self._session.post(f"{self._url}/generate", json=body) as answer:
            reply = orjson.loads(await answer.read())  # a slow client would be measured with every server
            assert answer.status == 200, reply
            told = reply["meta_info"]["output_token_logprobs"]
            assert len(told) == length, f"{len(told)} tokens of {length}"
            return [entry[1] for entry in told]


def at_once(count: int, prompt: tuple[int, int], response: tuple[int, int], params: dict[str, Any] = PLAIN) -> Load:
    async def send(client: Client, seed: int, scale: float) -> int:
        n = max(1, round(count * scale))
        requests: Requests = make_requests(n, list(prompt), list(response), seed=seed)
        await asyncio.gather(*(client.generate(ids, length, params) for ids, length in requests))
        return sum(length for _, length in requests)

    return send


def conversations(count: int, turns: int, start: int, read: int, reply: int) -> Load:
    """Each turn: the conversation so far and `read` new tokens go in, `reply` tokens come out."""

    async def talk(client: Client, rng: random.Random) -> int:
        ids = [rng.randrange(3, 99) for _ in range(start)]
        for _ in range(turns):
            ids = ids + [rng.randrange(3, 99) for _ in range(read)]
            ids = ids + await client.generate(ids, reply, PLAIN)
        return turns * reply

    async def send(client: Client, seed: int, scale: float) -> int:
        rngs = [random.Random(1000 * seed + place) for place in range(max(1, round(count * scale)))]
        return sum(await asyncio.gather(*(talk(client, rng) for rng in rngs)))

    return send


LOADS: dict[str, Load] = {
    "batch": at_once(256, (128, 128), (512, 512)),
    "one": at_once(1, (128, 128), (512, 512)),
    "sixteen": at_once(16, (128, 128), (512, 512)),
    "ragged": at_once(512, (16, 256), (64, 768)),
    "cut": at_once(256, (128, 128), (512, 512), CUT),
    "long": at_once(64, (16384, 16384), (256, 256)),
    "agents": conversations(32, turns=20, start=512, read=512, reply=256),
}


async def rates(url: str, loads: list[str], repeat: int, scale: float) -> dict[str, list[float]]:
    """Tokens a second of every load, a number for each time."""
    found: dict[str, list[float]] = {}
    timeout = aiohttp.ClientTimeout(total=3600)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)  # SGLang closes an idle connection after five
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        client = Client(session, url)
        for name in loads:
            found[name] = []
            for at in range(repeat + 1):
                began = time.perf_counter()
                tokens = await LOADS[name](client, 100 + at, scale)
                found[name].append(tokens / (time.perf_counter() - began))
            del found[name][0]
            print(f"  {name}: {', '.join(f'{rate:,.0f}' for rate in found[name])} tok/s", flush=True)
    return found


def sglang(args: argparse.Namespace, folder: Path, log: Path) -> AbstractContextManager[str]:
    port = free_port()
    argv = [args.sglang, "-m", "sglang.launch_server", "--model-path", str(folder), "--port", str(port)]
    argv += ["--dtype", args.dtype, "--max-running-requests", str(args.rows), "--cuda-graph-max-bs", str(args.rows)]
    argv += args.sglang_options.split()
    env = {"PYTHONPATH": args.sglang_path, "SGLANG_ENABLE_JIT_DEEPGEMM": "0"}
    return serving("SGLang server", argv, env, log, port)


def measure(name: str, server: AbstractContextManager[str], log: Path, args: argparse.Namespace) -> dict[str, Any]:
    print(f"{name} starts", flush=True)
    began = time.perf_counter()
    with server as url:
        ready = time.perf_counter() - began
        print(f"  ready after {ready:.1f} s {started(log)}", flush=True)
        found = asyncio.run(rates(url, args.loads, args.repeat, args.scale))
    return {"ready_s": ready, **{load: median(runs) for load, runs in found.items()}, "runs": found}


def started(log: Path) -> str:
    """What this engine's log says of its start: the seconds of each part."""
    return next((line.split("started in ", 1)[1] for line in log.read_text().splitlines() if "started in " in line), "")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, default=256, help="sequences that run at once")
    parser.add_argument("--loads", nargs="+", default=["batch", "one", "sixteen", "ragged", "cut"], choices=LOADS)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--scale", type=float, help="of the number of requests; on the CPU 1/32, else 1")
    parser.add_argument("--options", default="", help="further options of this engine, in one string")
    parser.add_argument("--starts", type=int, default=2, help="how often this engine starts; loads run in the last")
    parser.add_argument("--sglang", metavar="PYTHON")
    parser.add_argument("--sglang-path", default="", metavar="FOLDER")
    parser.add_argument(
        "--sglang-options",
        default="--attention-backend triton --sampling-backend pytorch --disable-prefill-cuda-graph "
        "--mem-fraction-static 0.7",
    )
    args = parser.parse_args()
    args.scale = args.scale or (1 / 32 if args.device == "cpu" else 1.0)
    return args


def main() -> None:
    args, found = parse(), {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(Path(scratch) / "model", args.shape, args.dtype)
        options = ["--dtype", args.dtype, "--max-running-requests", str(args.rows), *args.options.split()]
        starts = []
        for at in range(args.starts - 1):
            began = time.perf_counter()
            log = Path(scratch) / f"start{at}.log"
            with engine(folder, log, options, args.device):
                starts.append(time.perf_counter() - began)
            print(f"slime was ready after {starts[-1]:.1f} s: {started(log)}", flush=True)
        log = Path(scratch) / "engine.log"
        found["slime"] = measure("slime", engine(folder, log, options, args.device), log, args)
        found["slime"]["earlier_starts_s"] = starts
        if args.sglang:
            log = Path(scratch) / "sglang.log"
            found["SGLang"] = measure("SGLang", sglang(args, folder, log), log, args)
    show(args, found)


def show(args: argparse.Namespace, found: dict[str, dict[str, Any]]) -> None:
    table = Table(title=f"{args.shape} on {args.device}, {args.dtype}, {args.rows} rows", title_justify="left")
    table.add_column("load, tokens/s")
    for name in [*found, *(["ratio"] if len(found) > 1 else [])]:
        table.add_column(name, justify="right")
    for load in args.loads:
        values = [figures[load] for figures in found.values()]
        table.add_row(
            load, *(f"{v:,.0f}" for v in values), *([f"{values[0] / values[1]:.2f}x"] if len(values) > 1 else [])
        )
    ready = [f"{figures['ready_s']:.1f}" for figures in found.values()]
    first = [f"{s:.1f}" for s in found["slime"]["earlier_starts_s"]]
    table.add_row("start-up, seconds" + (f" (before: {', '.join(first)})" if first else ""), *ready)
    Console().print(table)
    print(json.dumps({"shape": args.shape, "device": args.device, "dtype": args.dtype, **found}))


if __name__ == "__main__":
    sys.exit(main())
