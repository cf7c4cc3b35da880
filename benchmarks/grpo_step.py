"""Whole GRPO steps on one workload, split into generation, log-probs, training and weight sync.

    python benchmarks/grpo_step.py                                                       # tiny, on the CPU
    python benchmarks/grpo_step.py --shape qwen3-0.6b --device cuda --prompts 32 --samples 8 \
        --prompt-len 128 --response-len 512 --max-tokens 32768                           # 256 x (128 + 512) tokens

`--backends fsdp megatron` measures both trainers in one run. `--turns resident offload` measures a run in which trainer
and engine both stay on the GPU, and one in which each gives its memory to the other (--offload). Flags that it does not
know are the run's own (--rollout-backend sglang --sglang-python FILE ...). The parts of every step are printed; the
first steps warm up (compilation, graphs); the figures are medians of the others, peaks of memory the largest. Rewards
are random: the work is the same as with real ones. MFU: the FLOPs of forward and backward (three forwards;
recomputation is not counted, a shared prompt is for every sample that has it) against --peak-tflops, by default what an
H200 has in bfloat16. With LoRA a third of these FLOPs, the gradients of the frozen weights, need not be computed, and
is not counted either.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import string
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from workload import make_model

from slime.config import Config, parse_flags
from slime.driver.loop import train
from slime.models.loading import load_config
from slime.train.flops import FlopsModel

PARTS = {
    "generation": "perf/rollout_time",
    "old log-probs": "perf/log_probs_time",
    "reference log-probs": "perf/ref_log_probs_time",
    "training": "perf/actor_train_time",
    "weight sync": "perf/update_weights_time",
    "weight sync: paused": "perf/update_weights_paused_time",
    "samples to tensors": "perf/data_preprocess_time",
    "idle": "perf/idle_time",
    "switch": "perf/switch_time",
    "switch: release": "perf/switch_release_time",
    "switch: wake": "perf/switch_wake_time",
    "switch: weights": "perf/switch_resume_weights_time",
    "switch: sleep": "perf/switch_sleep_time",
    "switch: cache": "perf/switch_resume_kv_cache_time",
}
MEMORY = re.compile(r"perf/(device|host)_memory_(\w+)_peak_gib")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backends", nargs="+", default=["fsdp"], help="trainers, one after the other: fsdp megatron")
    parser.add_argument(
        "--turns", nargs="+", choices=("resident", "offload"), help="how the two share a GPU; see above"
    )
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=32)
    parser.add_argument("--response-len", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--peak-tflops", type=float, default=989.0)
    parser.add_argument("--kl", action="store_true", help="with a reference model")
    args, more = parser.parse_known_args()
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(Path(scratch) / "model", args.shape, dtype_of(args))
        data = write_prompts(Path(scratch) / "prompts.jsonl", args)
        for backend, turns in itertools.product(args.backends, args.turns or [None]):
            own = [*more, *(["--offload"] if turns == "offload" else [])]
            name = backend if turns is None else f"{backend}, {turns}"
            found[name] = measure(configure(args, own, folder, data, name.replace(", ", "-")), args)
            told = {"backend": name, "shape": args.shape, "device": args.device, "kl": args.kl}
            print(json.dumps(told | {name: round(value, 4) for name, value in found[name].items()}), flush=True)
    Console().print(show(found, args))


def dtype_of(args: argparse.Namespace) -> str:
    return "bfloat16" if args.device == "cuda" else "float32"


def write_prompts(file: Path, args: argparse.Namespace) -> Path:
    rng = random.Random(0)
    rows = ("".join(rng.choices(string.ascii_lowercase, k=args.prompt_len)) for _ in range(args.prompts * args.steps))
    file.write_text("".join(json.dumps({"input": row}) + "\n" for row in rows))
    return file


def configure(args: argparse.Namespace, more: list[str], folder: Path, data: Path, name: str) -> Config:
    return parse_flags(more).replace(
        hf_checkpoint=str(folder), prompt_data=str(data), rm_type="random", device=args.device, dtype=dtype_of(args),
        num_rollout=args.steps, rollout_batch_size=args.prompts, n_samples_per_prompt=args.samples,
        rollout_max_response_len=args.response_len, use_dynamic_batch_size=True, max_tokens_per_gpu=args.max_tokens,
        engine_max_running_requests=args.prompts * args.samples, use_kl_loss=args.kl, kl_loss_coef=0.001 * args.kl,
        lr=1e-6, skip_eval_before_train=True, train_backend=name.split("-")[0],
        output_dir=str(Path("outputs") / f"grpo_step-{args.shape}-{name}"),
    )  # fmt: skip


def measure(config: Config, args: argparse.Namespace) -> dict[str, float]:
    """Seconds of each part, tokens a second, and what the trainer reached and took."""
    result = train(config)
    Console().print(each_step(result.metrics))
    measured = result.metrics[args.warm_up :]
    figures = {"step_s": median(m["perf/step_time"] for m in measured)}
    for part, name in PARTS.items():
        if name in measured[0]:
            figures[re.sub(r"\W+", "_", part) + "_s"] = median(m[name] for m in measured)
    sequences, length = args.prompts * args.samples, args.prompt_len + args.response_len
    figures["generated_tok_s"] = sequences * args.response_len / figures["generation_s"]
    figures["trained_tok_s"] = sequences * length / figures["training_s"]
    if args.device == "cuda":
        facts = FlopsModel.from_config(load_config(Path(config.hf_checkpoint)))
        flops = (2 / 3 if config.lora_rank else 1.0) * sequences * facts.sequence(length)
        figures["mfu"] = flops / figures["training_s"] / (args.peak_tflops * 1e12)
        figures["trainer_peak_gib"] = max(m["perf/trainer_peak_memory_gib"] for m in result.metrics)
    peaks = [(found, name) for name in measured[-1] if (found := MEMORY.fullmatch(name)) is not None]
    for found, name in peaks:
        figures[f"{found[1]}_{found[2]}_peak_gib"] = max(m.get(name, 0.0) for m in measured)
    figures["logprob_abs_diff"] = max(m["train/train_rollout_logprob_abs_diff"] for m in measured)
    figures["peak_memory_gib"] = result.peak_memory_gib or 0.0
    return figures


def each_step(steps: list[dict[str, Any]]) -> Table:
    """Seconds of the parts of every step, so that one that took longer says where."""
    table = Table(title="seconds of each step", title_justify="left")
    known = {part: name for part, name in PARTS.items() if any(name in step for step in steps)}
    for column in ("", "whole", *known):
        table.add_column(column, justify="right")
    for number, step in enumerate(steps):
        parts = (f"{step[name]:.3f}" if name in step else "-" for name in known.values())
        table.add_row(str(number), f"{step['perf/step_time']:.3f}", *parts)
    return table


def show(found: dict[str, dict[str, float]], args: argparse.Namespace) -> Table:
    title = f"GRPO step: {args.prompts} x {args.samples} x ({args.prompt_len} + {args.response_len}) tokens"
    table = Table(title=f"{title}, {args.shape}, {args.device}", title_justify="left")
    table.add_column("part")
    for backend in found:
        table.add_column(backend, justify="right")
    first, *others = found.values()
    for other in list(found)[1:]:
        table.add_column(f"{other} / {next(iter(found))}", justify="right")
    for name in dict.fromkeys(name for figures in found.values() for name in figures):
        value = first.get(name)
        ratios = [f"{other[name] / value:.2f}" if value and name in other else "-" for other in others]
        cells = [f"{figures[name]:,.3f}" if name in figures else "-" for figures in found.values()]
        table.add_row(name.replace("_", " "), *cells, *ratios)
    return table


if __name__ == "__main__":
    main()
