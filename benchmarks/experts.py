"""Experts multiplied in groups against a Python loop over them, in the embedded engine: same requests, in one run.

Both sides go through the engine in this process, without HTTP; the loop is transformers' own (`eager`). Sides take
turns, and the figure of each is its median run.

    python benchmarks/experts.py                      # 86 M weights, of which a token uses 20 M, on the CPU
"""

from __future__ import annotations

import argparse
import queue
import random
import tempfile
import time
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from workload import make_model


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="moe")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--response-len", type=int, default=24)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def measure(args: argparse.Namespace, folder: Path) -> list[tuple[int, float, float]]:
    """For each number of requests: tokens a second in groups, and with the loop."""
    import torch

    from slime.engine.embedded.engine import EngineCore
    from slime.engine.embedded.http.requests import ModelFacts, parse_generate
    from slime.engine.embedded.options import parse_options

    torch.set_num_threads(args.threads)
    options = ["--model-path", str(folder), "--dtype", args.dtype, "--max-total-tokens", "16384"]
    core = EngineCore(parse_options([*options, "--context-length", "1024"]), on_death=print)
    core.load("cpu")
    core.start()
    facts = ModelFacts(None, core.loaded.vocab_size, core.loaded.context_len, frozenset())
    grouped = core.runner.model.config._experts_implementation
    rng = random.Random(0)

    def run(count: int, implementation: str) -> float:
        core.runner.model.set_experts_implementation(implementation)
        done: queue.SimpleQueue[object] = queue.SimpleQueue()
        params = {"max_new_tokens": args.response_len, "ignore_eos": True}
        began = time.perf_counter()
        for _ in range(count):
            ids = [rng.randrange(3, 99) for _ in range(args.prompt_len)]
            [request], _ = parse_generate({"input_ids": ids, "sampling_params": params}, facts)
            core.submit(request.sequences(facts, done.put))
        for _ in range(count):
            done.get()
        return count * args.response_len / (time.perf_counter() - began)

    figures = []
    for count in args.requests:
        run(count, grouped)
        rates = [(run(count, grouped), run(count, "eager")) for _ in range(args.repeat)]
        figures.append((count, median(r[0] for r in rates), median(r[1] for r in rates)))
    core.stop()
    return figures


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as scratch:
        figures = measure(args, make_model(Path(scratch) / "model", args.shape, args.dtype))
    table = Table(title=f"{args.shape}, {args.dtype}, {args.threads} threads", title_justify="left")
    for column in ("requests at once", "in groups", "a loop over experts", "ratio"):
        table.add_column(column, justify="right")
    for count, grouped, loop in figures:
        table.add_row(str(count), f"{grouped:,.0f} tok/s", f"{loop:,.0f} tok/s", f"{grouped / loop:.2f}x")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
