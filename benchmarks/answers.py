"""The HTTP side of the embedded engine alone: how long requests take to reach it and answers to leave it.

There is no model: when all requests of a load are in, every sequence gets its tokens, step by step as fast as a GPU
gives them, and all end with the same step. With `--against` the code of another revision does the same in turns.

    python benchmarks/answers.py                    # this code
    python benchmarks/answers.py --against HEAD~5   # and the ratio to an earlier one, or to a folder with a `slime`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "slime/quickstart/tokenizer"
LOADS = {"256 x (128 + 512)": (256, 128, 512), "1 x (128 + 65,536)": (1, 128, 65536)}
STEP_SECONDS = {512: 0.004, 65536: 0.00005}


def serve(port: int, count: int, length: int) -> None:
    """Answer requests of `count` sequences with `length` tokens each; says when they were in and when they ended."""
    from aiohttp import web

    from slime.engine.embedded.engine import EngineCore
    from slime.engine.embedded.http.async_engine import EngineBridge
    from slime.engine.embedded.http.requests import ModelFacts
    from slime.engine.embedded.http.server import EngineServer
    from slime.engine.embedded.options import parse_options

    rng = random.Random(0)
    drawn = [(rng.randrange(3, 99), -rng.expovariate(1.0)) for _ in range(8192)]

    class GivenTokens(EngineCore):
        weight_version = "default"
        waiting: tuple[Any, ...] = ()

        def submit(self, sequences: list[Any]) -> None:
            self.waiting += tuple(sequences)
            if len(self.waiting) == count:
                threading.Thread(target=self.split_by_sample, args=(self.waiting, time.perf_counter())).start()
                self.waiting = ()

        def split_by_sample(self, sequences: tuple[Any, ...], all_in: float) -> None:
            for step in range(length):
                for at, seq in enumerate(sequences):
                    seq.append(*drawn[(step * 7 + at) % len(drawn)], "default")
                time.sleep(STEP_SECONDS[length])
            ended = time.perf_counter()
            for seq in sequences:
                seq.notify(seq)
            print(json.dumps({"in": all_in, "ended": ended}), flush=True)

    engine = EngineBridge(GivenTokens(parse_options(["--model-path", str(TOKENIZER)]), on_death=print))
    engine.facts = ModelFacts(load_text(), 320, 1 << 20, frozenset())
    web.run_app(EngineServer(engine).app, port=port, host="127.0.0.1", print=None, access_log=None, backlog=2048)


def load_text() -> Any:
    """The tokenizer as the server of this revision has it."""
    try:
        from slime.engine.embedded.tokenizer import plain_tokenizer
    except ImportError:  # an earlier one
        from slime.data.chat_template import load_tokenizer

        return load_tokenizer(str(TOKENIZER))
    return plain_tokenizer(TOKENIZER)


@contextmanager
def server(tree: Path, count: int, length: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """This program as a server, with the `slime` of `tree`."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, __file__, "--serve", str(port), str(count), str(length)]
    env = {**os.environ, "PYTHONPATH": f"{tree}:{':'.join(sys.path)}"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            while process.poll() is None:
                with socket.socket() as sock:
                    if sock.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}/generate", process
        finally:
            process.kill()


async def ask(url: str, count: int, prompt: int, length: int) -> tuple[float, float]:
    """Send all at once and read the answers; when that began and when it was over."""
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def send() -> None:
            params = {"max_new_tokens": length, "ignore_eos": True, "temperature": 1.0}
            body = {"input_ids": [5] * prompt, "sampling_params": params, "return_logprob": True}
            async with session.post(url, json=body) as answer:
                assert answer.status == 200
                assert len(await answer.read()) > 20 * length

        began = time.perf_counter()
        await asyncio.gather(*(send() for _ in range(count)))
        return began, time.perf_counter()


def measure(trees: dict[str, Path], load: tuple[int, int, int], repeat: int) -> dict[str, dict[str, float]]:
    """Milliseconds until all requests are in, and from the end of all sequences until all answers are read."""
    count, prompt, length = load
    seen: dict[str, dict[str, list[float]]] = {name: {"in": [], "out": []} for name in trees}
    with ExitStack() as stack:
        running = {name: stack.enter_context(server(tree, count, length)) for name, tree in trees.items()}
        for turn in range(repeat + 1):
            for name, (url, process) in running.items():
                began, over = asyncio.run(ask(url, count, prompt, length))
                assert process.stdout is not None
                times = json.loads(process.stdout.readline())
                if turn:  # the first one is for warmth
                    seen[name]["in"].append(1e3 * (times["in"] - began))
                    seen[name]["out"].append(1e3 * (over - times["ended"]))
    return {name: {what: median(values) for what, values in both.items()} for name, both in seen.items()}


def checked_out(against: str, scratch: Path) -> Path:
    """The folder with the `slime` to compare with."""
    if Path(against).is_dir():
        return Path(against).resolve()
    packed = subprocess.run(["git", "archive", against, "slime"], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", scratch], input=packed.stdout, check=True)
    return scratch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="REV", help="a revision of this repository, or a folder with its `slime`")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--serve", type=int, nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(*args.serve)
        return
    with tempfile.TemporaryDirectory() as scratch:
        trees = {"this": ROOT}
        if args.against:
            trees[args.against] = checked_out(args.against, Path(scratch))
        for name, load in LOADS.items():
            found = measure(trees, load, args.repeat)
            for tree, times in found.items():
                print(f"{name:20} {tree:12} in {times['in']:8.1f} ms   answers {times['out']:8.1f} ms")
            if args.against:
                ratios = [found[args.against][what] / found["this"][what] for what in ("in", "out")]
                print(f"{name:20} {'ratio':12} in {ratios[0]:8.2f} x    answers {ratios[1]:8.2f} x")


if __name__ == "__main__":
    main()
