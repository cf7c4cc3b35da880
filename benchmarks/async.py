"""Samples trained per second in every mode, on responses of very different lengths and a reward that takes its time.

    python benchmarks/async.py
    python benchmarks/async.py --device cuda --shape qwen3-0.6b --prompts 32 --samples 8 --median 128 --reward-seconds 1

One machine, embedded engine, one trainer. On a GPU both share the only one: there the engine is one that runs already,
for the synchronous modes too. Response lengths are drawn once for each sample from a long-tailed distribution (a few
are ten times the median), so every mode has the same work; the first steps warm up. `thrown away` are tokens that were
sampled and neither trained on nor continued; the staleness of a sample is the number of steps that the weights which
sampled its oldest token were behind.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table
from workload import engine, make_model

from slime.config import Config
from slime.driver.loop import train

TAIL_SHARE, TAIL_FACTOR = 0.06, 10
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "over-sampling": {"over_sampling_batch_size": 2},
    "partial": {"over_sampling_batch_size": 2, "partial_rollout": True},
    "one-step": {"async_mode": "one-step"},
    "full": {"async_mode": "full"},
}
"""Flags of each mode; --over-sampling-batch-size in batches."""

PLUGIN = '''
import asyncio, random
from slime.rollout.sglang_rollout import generate as sample_one

async def generate(args, sample, sampling_params):
    """A response of exactly the length that was drawn for this sample."""
    chance = random.Random(sample.index)
    length = round({median} * chance.lognormvariate(0, 0.3))
    if chance.random() < {tail_share}:
        length = {median} * {tail_factor}
    params = dict(sampling_params, max_new_tokens=length, ignore_eos=True)
    return await sample_one(args, sample, params)

async def reward(args, sample):
    await asyncio.sleep({reward_seconds})
    return float(sample.index % 2)
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--median", type=int, default=32, help="tokens of most responses")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--reward-seconds", type=float, default=0.5)
    parser.add_argument("--max-weight-staleness", type=int, default=2)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    args = parser.parse_args()
    args.dtype = "float32" if args.device == "cpu" else "bfloat16"
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = make_model(Path(scratch) / "model", args.shape, args.dtype)
        args.engine = None
        if args.device == "cuda":
            running = str(4 * args.prompts * args.samples)
            options = ["--dtype", args.dtype, "--max-running-requests", running, "--mem-fraction", "0.3"]
            args.engine = stack.enter_context(engine(folder, Path(scratch) / "engine.log", options, args.device))
        plugin = Path(scratch) / "workload_plugin.py"
        plugin.write_text(
            PLUGIN.format(
                median=args.median,
                tail_share=TAIL_SHARE,
                tail_factor=TAIL_FACTOR,
                reward_seconds=args.reward_seconds,
            )
        )
        data = Path(scratch) / "prompts.jsonl"
        chance = random.Random(0)
        rows = ("".join(chance.choices(string.ascii_lowercase, k=16)) for _ in range(4 * args.prompts * args.steps))
        data.write_text("".join(json.dumps({"input": row}) + "\n" for row in rows))
        figures = {mode: measure(mode, args, folder, data, plugin) for mode in args.modes}
    report(figures, args)


def measure(mode: str, args: argparse.Namespace, folder: Path, data: Path, plugin: Path) -> dict[str, float]:
    """One run; figures of the steps after the warm-up."""
    flags = dict(MODES[mode])
    if "over_sampling_batch_size" in flags:
        flags["over_sampling_batch_size"] *= args.prompts
    if mode == "full":
        flags["max_weight_staleness"] = args.max_weight_staleness
    if args.engine is not None:
        flags["rollout_external_engine_addrs"] = [args.engine.removeprefix("http://")]
    config = Config(
        hf_checkpoint=str(folder), prompt_data=str(data), device=args.device, dtype=args.dtype, num_rollout=args.steps,
        rollout_batch_size=args.prompts, n_samples_per_prompt=args.samples, rollout_num_gpus=1,
        rollout_max_response_len=args.median * TAIL_FACTOR, custom_generate_function_path=f"{plugin}:generate",
        custom_rm_path=f"{plugin}:reward", use_dynamic_batch_size=True, max_tokens_per_gpu=16384, lr=1e-6,
        output_dir=str(folder.parent / mode), progress="none", **flags,
    )  # fmt: skip
    print(f"{mode} ...", file=sys.stderr, flush=True)
    metrics = train(config).metrics[args.warm_up :]
    seconds = sum(step["perf/step_time"] for step in metrics)
    return {
        "samples_per_s": len(metrics) * args.prompts * args.samples / seconds,
        "step_s": median(step["perf/step_time"] for step in metrics),
        "wait_s": median(step["perf/rollout_wait_time"] for step in metrics),
        "train_s": median(step["perf/train_time"] for step in metrics),
        "thrown_away_tokens": sum(step.get("rollout/thrown_away_tokens", 0.0) for step in metrics),
        "staleness": fmean(step.get("rollout/staleness/mean", 0.0) for step in metrics),
        "max_staleness": max(step.get("rollout/staleness/max", 0.0) for step in metrics),
    }


def report(figures: dict[str, dict[str, float]], args: argparse.Namespace) -> None:
    base = figures.get("sync", next(iter(figures.values())))["samples_per_s"]
    title = f"{args.prompts} x {args.samples} samples a step, median {args.median} tokens, {TAIL_SHARE:.0%} of them "
    title += f"{args.median * TAIL_FACTOR}, reward {args.reward_seconds:g} s, {args.shape}, {args.device}"
    table = Table(title=title, title_justify="left")
    columns = ("mode", "samples/s", "ratio", "step s", "waiting s", "training s", "thrown away", "staleness", "oldest")
    for name in columns:
        table.add_column(name, justify="left" if name == "mode" else "right")
    for mode, one in figures.items():
        one["ratio"] = one["samples_per_s"] / base
        table.add_row(
            mode, f"{one['samples_per_s']:.1f}", f"{one['ratio']:.2f}x", f"{one['step_s']:.2f}", f"{one['wait_s']:.2f}",
            f"{one['train_s']:.2f}", f"{one['thrown_away_tokens']:.0f}", f"{one['staleness']:.2f}",
            f"{one['max_staleness']:.0f}",
        )  # fmt: skip
    Console(width=120).print(table)
    print(json.dumps({mode: {name: round(value, 3) for name, value in one.items()} for mode, one in figures.items()}))


if __name__ == "__main__":
    main()
