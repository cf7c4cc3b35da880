"""How evenly one optimizer step of long-tailed lengths is shared out: the slowest rank's FLOPs over the mean rank's.

    python benchmarks/balance.py
    python benchmarks/balance.py --samples 512 --ranks 16 --sigma 1.2

Lengths are lognormal, cut off at `--longest`. Four ways to share them out: micro-batches filled in the order of the
samples and dealt out in turn (slime upstream without --balance-data), by tokens (here without flags), by FLOPs
(--balance-data), and micro-batches of equal FLOPs on top (--balance-by-flops). "In step" is the same ratio when ranks
wait for each other after every micro-batch, as sharded weights make them: the sum over micro-batches of the slowest
rank's. Figures are the mean and the worst over `--draws` draws of lengths.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import DeepseekV2Config, PretrainedConfig, Qwen3Config
from workload import SHAPES

from slime.train.flops import FlopsModel
from slime.train.microbatch_plan import build_schedule, raise_to_multiple

MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3-0.6b (dense, GQA)": lambda: Qwen3Config(**SHAPES["qwen3-0.6b"]),
    "deepseek-v2-lite (MoE, MLA)": lambda: DeepseekV2Config(
        hidden_size=2048, intermediate_size=10944, num_hidden_layers=27, num_attention_heads=16, num_key_value_heads=16,
        vocab_size=102400, q_lora_rank=None, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128,
        v_head_dim=128, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1408,
        first_k_dense_replace=1,
    ),
}  # fmt: skip
WAYS: dict[str, dict[str, bool]] = {
    "tokens": {},
    "flops": {"costs": True},
    "equal_flops": {"costs": True, "by_flops": True},
}
TITLES = {
    "round_robin": "in turn",
    "tokens": "by tokens",
    "flops": "--balance-data",
    "equal_flops": "--balance-by-flops",
}


def draw_lengths(args: argparse.Namespace, seed: int) -> list[int]:
    generator = random.Random(seed)
    drawn = (args.prompt_len + int(generator.lognormvariate(0, args.sigma) * args.median) for _ in range(args.samples))
    return [min(length, args.longest) for length in drawn]


def round_robin(lengths: Sequence[int], ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """First fit in the order the samples come, the heaviest split until the ranks divide them, dealt out in turn."""
    bins: list[list[int]] = []
    room: list[int] = []
    for position, length in enumerate(lengths):
        place = next((i for i, free in enumerate(room) if free >= length), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[place].append(position)
        room[place] -= length
    raise_to_multiple(bins, lengths, ranks)
    return [bins[rank::ranks] for rank in range(ranks)]


def slowest_over_mean(ranks: Sequence[Sequence[Sequence[int]]], costs: Sequence[float]) -> tuple[float, float]:
    """Over the whole step, and when the ranks go micro-batch by micro-batch."""
    loads = [[sum(costs[position] for position in members) for members in rank] for rank in ranks]
    totals = [sum(rank) for rank in loads]
    in_step = sum(max(together) for together in zip(*loads, strict=True))
    return max(totals) / fmean(totals), in_step / fmean(totals)


def measure(args: argparse.Namespace, flops: FlopsModel) -> dict[str, Any]:
    """Mean and worst imbalance of every way, and the seconds that one schedule takes."""
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in TITLES}
    seconds: list[float] = []
    for seed in range(args.draws):
        lengths = draw_lengths(args, seed)
        costs = [flops.sequence(length) for length in lengths]
        ratios["round_robin"].append(slowest_over_mean(round_robin(lengths, args.ranks, args.max_tokens), costs))
        for name, switches in WAYS.items():
            begin = time.perf_counter()
            schedule = build_schedule(
                lengths,
                range(len(lengths)),
                num_ranks=args.ranks,
                global_batch_size=len(lengths),
                max_tokens=args.max_tokens,
                costs=costs if switches.get("costs") else None,
                by_flops=switches.get("by_flops", False),
            )
            seconds.append(time.perf_counter() - begin)
            ratios[name].append(slowest_over_mean(schedule.steps[0].ranks, costs))
    figures: dict[str, Any] = {"schedule_s": round(max(seconds), 4)}
    for name, pairs in ratios.items():
        whole, in_step = zip(*pairs, strict=True)
        means = {"mean": fmean(whole), "worst": max(whole), "in_step": fmean(in_step)}
        figures[name] = {key: round(value, 4) for key, value in means.items()}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--median", type=int, default=1024, help="of the response lengths")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the lengths' logarithm")
    parser.add_argument("--longest", type=int, default=16384)
    parser.add_argument("--max-tokens", type=int, default=16384, help="tokens per micro-batch")
    parser.add_argument("--draws", type=int, default=20)
    args = parser.parse_args()
    title = f"slowest rank's FLOPs over the mean: {args.samples} samples, {args.ranks} ranks, lognormal lengths"
    table = Table(title=title, title_justify="left")
    table.add_column("shared out")
    results = {model: measure(args, FlopsModel.from_config(make())) for model, make in MODELS.items()}
    for model in results:
        table.add_column(model, justify="right")
    for name, row in TITLES.items():
        cells = (
            f"{of[name]['mean']:.3f} (worst {of[name]['worst']:.3f})\nin step {of[name]['in_step']:.3f}"
            for of in results.values()
        )
        table.add_row(row, *cells)
    Console().print(table)
    shape = {"samples": args.samples, "ranks": args.ranks, "sigma": args.sigma, "max_tokens": args.max_tokens}
    print(json.dumps(shape | results))


if __name__ == "__main__":
    main()
