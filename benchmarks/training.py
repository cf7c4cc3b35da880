"""Training steps and the reference's log-probs without an engine: one trainer rank in this process.

    python benchmarks/training.py                                                            # tiny, on the CPU
    python benchmarks/training.py --shape qwen3-0.6b --device cuda --sequences 256 --prompt-len 128 \
        --response-len 512 --max-tokens 32768                                                # 163,840 tokens
    python benchmarks/training.py ... --profile 25      # then one more step: kernels, idle time, waits of the host
    python benchmarks/training.py ... --profile 25 --trace step.json       # and that step for a trace viewer

The samples go the way that the driver sends them, with KL to a reference; `--ragged` cuts the responses to uneven
lengths. With `--compare-sharing` every step is made twice, without and with `--share-prompts`, and ratios are printed.
Flags that it does not know are the run's own. Figures are medians of the steps after those that warm up. MFU:
the FLOPs of forward and backward (three forwards; nothing that is computed twice counts twice, and a shared prompt
counts for every sample that has it) against --peak-tflops.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch.autograd import DeviceType
from workload import make_model

from slime.config import Config, derive, parse_flags
from slime.config.parallelism import shares_prompts
from slime.data.sample import Sample
from slime.models.loading import load_config
from slime.train.flops import FlopsModel
from slime.train.microbatch_plan import PromptGroups, build_schedule
from slime.train.processes import TrainerRendezvous
from slime.train.samples.batch import flatten_samples, make_train_batch
from slime.train.samples.dp_shards import rank_shares
from slime.train.topology import join_ranks
from slime.train.trainer import Trainer

WAITS = ("aten::item", "aten::nonzero", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def make_samples(args: argparse.Namespace) -> list[list[Sample]]:
    """Groups of eight random answers to a random prompt, with the log-probs that an engine would have sent."""
    rng = np.random.default_rng(0)
    groups: list[list[Sample]] = []
    prompt: list[int] = []
    for index in range(args.sequences):
        if index % 8 == 0:
            prompt = rng.integers(2, 90, args.prompt_len).tolist()
        response = int(rng.integers(1, args.response_len + 1)) if args.ragged else args.response_len
        sample = Sample(
            group_index=index // 8, index=index, tokens=prompt + rng.integers(2, 90, response).tolist(),
            response_length=response, loss_mask=[1] * response, reward=float(rng.integers(0, 2)),
            rollout_log_probs=(-11.7 + rng.normal(0, 0.01, response)).tolist(), status=Sample.Status.COMPLETED,
        )  # fmt: skip
        if index % 8 == 0:
            groups.append([])
        groups[-1].append(sample)
    return groups


def configure(args: argparse.Namespace, more: list[str], folder: Path) -> Config:
    return derive(
        parse_flags(more).replace(
            hf_checkpoint=str(folder), device=args.device, dtype="bfloat16" if args.device == "cuda" else "float32",
            num_rollout=99, rollout_batch_size=args.sequences // 8, n_samples_per_prompt=8, use_kl_loss=True,
            kl_loss_coef=0.001, use_dynamic_batch_size=True, max_tokens_per_gpu=args.max_tokens, lr=1e-6,
        )
    )  # fmt: skip


class OneRank:
    """A trainer that is fed as the driver feeds it."""

    def __init__(self, config: Config, device: str, scratch: Path) -> None:
        os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
        self._config = config
        self._trainer = Trainer(config, device)
        self._trainer.init(join_ranks(device, meeting=TrainerRendezvous(str(scratch / "store")), timeout_minutes=5))

    def share_prompts(self, share: bool) -> None:
        self._trainer.config = self._trainer.config.replace(share_prompts=share)

    def train(self, rollout_id: int, groups: list[list[Sample]]) -> dict[str, float]:
        batch = make_train_batch(self._config, flatten_samples(groups))
        shares = shares_prompts(self._trainer.config)
        schedule = build_schedule(
            batch.total_lengths,
            batch.rollout_ids,
            num_ranks=1,
            global_batch_size=len(set(batch.rollout_ids)),
            micro_batch_size=1,
            max_tokens=self._config.max_tokens_per_gpu,
            trainable=batch.trainable,
            prompts=PromptGroups(batch.group_indices, batch.prompt_lengths) if shares else None,
        )
        answer = self._trainer.train(rollout_id, rank_shares(batch, schedule)[0])
        return {**answer["rollout_metrics"], **answer["metrics"][-1]}


@dataclass(frozen=True)
class Event:
    name: str
    on_device: bool
    begin: float  # milliseconds
    end: float


def profile(ranks: OneRank, groups: list[list[Sample]], rollout_id: int, args: argparse.Namespace) -> None:
    """One more step, with a table for each of its parts: kernels by time, idle share, what the host waited for."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        ranks.train(rollout_id, groups)
    assert found.profiler is not None
    assert found.profiler.kineto_results is not None  # as they are: turned into torch's own events they take a minute
    if args.trace:
        found.profiler.kineto_results.save(args.trace)
    events = [
        Event(e.name(), e.device_type() == DeviceType.CUDA, e.start_ns() / 1e6, (e.start_ns() + e.duration_ns()) / 1e6)
        for e in found.profiler.kineto_results.events()
        if not (e.device_type() == DeviceType.CUDA and e.is_user_annotation())
    ]
    marks = [event for event in events if event.name.startswith("slime: ") and not event.on_device]
    for mark in marks:
        show_part(mark, [event for event in events if mark.begin <= event.begin <= mark.end], args.profile)


def show_part(part: Event, events: list[Event], count: int) -> None:
    kernels = sorted((event for event in events if event.on_device), key=lambda event: event.begin)
    busy, last = 0.0, float("-inf")
    for event in kernels:
        busy += max(event.end - max(event.begin, last), 0.0)
        last = max(last, event.end)
    wall = part.end - part.begin
    print(f"\n{part.name}: {wall:.1f} ms, device busy {busy:.1f} ms ({busy / wall:.0%}), {len(kernels)} kernels")
    show_gaps(part, kernels, count)
    for title, chosen in (("waits", [event for event in events if event.name in WAITS]), ("kernels", kernels)):
        totals: dict[str, list[float]] = {}
        for event in chosen:
            totals.setdefault(event.name, []).append(event.end - event.begin)
        print(f"  {title}:")
        for name, spans in sorted(totals.items(), key=lambda item: -sum(item[1]))[:count]:
            print(f"  {sum(spans):9.2f} ms {len(spans):6} x  {name[:150]}")


def show_gaps(part: Event, kernels: list[Event], count: int) -> None:
    """The longest times without a kernel, each with its place in the part and the kernels around it."""
    bounds = [Event("begin", True, part.begin, part.begin), *kernels, Event("end", True, part.end, part.end)]
    gaps, last = [], bounds[0]
    for event in bounds[1:]:
        if event.begin > last.end:
            gaps.append((event.begin - last.end, last.end - part.begin, last.name, event.name))
        last = max(last, event, key=lambda one: one.end)
    print("  idle:")
    for length, place, before, after in sorted(gaps, reverse=True)[:count]:
        print(f"  {length:9.2f} ms at {place:9.1f}    {before[:60]} -> {after[:60]}")


def compare_sharing(ranks: OneRank, groups: list[list[Sample]], args: argparse.Namespace) -> None:
    """Steps without and with shared prompts in turns, and how many times faster the latter are."""
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for rollout_id in range(2 * args.steps):
        share = rollout_id % 2 == 1
        ranks.share_prompts(share)
        found[share].append(ranks.train(rollout_id, groups))
    torch.distributed.destroy_process_group()
    facts: dict[str, object] = {"shape": args.shape, "device": args.device, "sequences": args.sequences}
    facts |= {"prompt": args.prompt_len, "response": args.response_len, "ragged": args.ragged}
    for name in ("actor_train", "ref_log_probs", "train"):
        each = [median(m[f"perf/{name}_time"] for m in found[share][args.warm_up :]) for share in (False, True)]
        facts |= {f"{name}_s": [round(value, 4) for value in each], f"{name}_times": round(each[0] / each[1], 2)}
    print(json.dumps(facts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, default=32)
    parser.add_argument("--response-len", type=int, default=64)
    parser.add_argument("--ragged", action="store_true")
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument(
        "--compare-sharing", action="store_true", help="steps without and with --share-prompts, in turns"
    )
    parser.add_argument("--peak-tflops", type=float, default=989.0)
    parser.add_argument("--profile", type=int, default=0, metavar="KERNELS")
    parser.add_argument("--trace", default="", metavar="FILE", help="where the profile's events go, in Chrome's format")
    args, more = parser.parse_known_args()
    groups, began = make_samples(args), time.perf_counter()
    lengths = [len(sample.tokens) for group in groups for sample in group]
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(Path(scratch) / "model", args.shape, "bfloat16" if args.device == "cuda" else "float32")
        ranks = OneRank(configure(args, more, folder), args.device, Path(scratch))
        found = []
        if args.compare_sharing:
            compare_sharing(ranks, groups, args)
            return
        for rollout_id in range(args.steps):
            found.append(ranks.train(rollout_id, groups))
            parts = {
                name: round(found[-1][f"perf/{name}_time"], 3) for name in ("train", "ref_log_probs", "actor_train")
            }
            print(f"{time.perf_counter() - began:6.1f} s: {parts}", file=sys.stderr, flush=True)
        flops = sum(map(FlopsModel.from_config(load_config(folder)).sequence, lengths))
        if args.profile:
            profile(ranks, groups, args.steps, args)
        torch.distributed.destroy_process_group()
    measured = found[args.warm_up :]
    seconds = {
        name: median(m[f"perf/{name}_time"] for m in measured) for name in ("actor_train", "ref_log_probs", "train")
    }
    facts = {"shape": args.shape, "device": args.device, "tokens": sum(lengths)}
    facts |= {f"{name}_s": round(value, 4) for name, value in seconds.items()}
    facts |= {"tokens_s": round(sum(lengths) / seconds["actor_train"])}
    facts |= {"mfu": round(flops / seconds["actor_train"] / (args.peak_tflops * 1e12), 4)}
    kept = ("train/loss", "train/grad_norm", "train/kl_loss", "rollout/log_probs", "rollout/ref_log_probs")
    facts |= {name: found[0][name] for name in (*kept, "train/entropy_loss") if name in found[0]}
    facts |= {n: found[-1][n] for n in ("perf/trainer_peak_memory_gib",) if n in found[-1]}
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
