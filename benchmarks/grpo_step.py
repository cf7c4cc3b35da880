"""Whole GRPO steps on one workload, split into generation, log-probs, training and weight sync.

    python benchmarks/grpo_step.py                                                       # tiny, on the CPU
    python benchmarks/grpo_step.py --shape qwen3-0.6b --device cuda --prompts 32 --samples 8 \
        --prompt-len 128 --response-len 512 --max-tokens 32768                           # 256 x (128 + 512) tokens

Flags that it does not know are the run's own (--rollout-backend sglang --sglang-python FILE ...). The first steps warm
up (compilation, graphs); the figures are medians of the others. Rewards are random: the work is the same as with real
ones. MFU: the FLOPs of forward and backward (three forwards; recomputation is not counted) against --peak-tflops, by
default what an H200 has in bfloat16. With LoRA a third of these FLOPs, the gradients of the frozen weights, need not
be computed, and is not counted either.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import tempfile
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from workload import make_model

from slime.config import parse_flags
from slime.driver import train
from slime.models.loading import load_config
from slime.train.flops import FlopsModel

PARTS = {
    "generation": "perf/rollout_time",
    "old log-probs": "perf/log_probs_time",
    "reference log-probs": "perf/ref_log_probs_time",
    "training": "perf/actor_train_time",
    "weight sync": "perf/update_weights_time",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--device", default="cpu")
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
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(Path(scratch) / "model", args.shape, dtype)
        data = Path(scratch) / "prompts.jsonl"
        rows = (
            "".join(rng.choices(string.ascii_lowercase, k=args.prompt_len)) for _ in range(args.prompts * args.steps)
        )
        data.write_text("".join(json.dumps({"input": row}) + "\n" for row in rows))
        config = parse_flags(more).replace(
            hf_checkpoint=str(folder), prompt_data=str(data), rm_type="random", device=args.device, dtype=dtype,
            num_rollout=args.steps, rollout_batch_size=args.prompts, n_samples_per_prompt=args.samples,
            rollout_max_response_len=args.response_len, use_dynamic_batch_size=True, max_tokens_per_gpu=args.max_tokens,
            engine_max_running_requests=args.prompts * args.samples, use_kl_loss=args.kl, kl_loss_coef=0.001 * args.kl,
            lr=1e-6, skip_eval_before_train=True, output_dir=str(Path("outputs") / f"grpo_step-{args.shape}"),
        )  # fmt: skip
        facts = FlopsModel.from_config(load_config(folder))
        result = train(config)
    measured = result.metrics[args.warm_up :]
    figures = {"step_s": median(m["perf/step_time"] for m in measured)}
    for part, name in PARTS.items():
        if name in measured[0]:
            figures[f"{part.replace(' ', '_').replace('-', '_')}_s"] = median(m[name] for m in measured)
    tokens = args.prompts * args.samples * args.response_len
    figures["generated_tok_s"] = tokens / figures["generation_s"]
    whole = args.prompts * args.samples * (args.prompt_len + args.response_len)
    figures["trained_tok_s"] = whole / figures["training_s"]
    if args.device == "cuda":
        share = 2 / 3 if config.lora_rank else 1.0
        flops = share * args.prompts * args.samples * facts.sequence(args.prompt_len + args.response_len)
        figures["mfu"] = flops / figures["training_s"] / (args.peak_tflops * 1e12)
        figures["trainer_peak_gib"] = max(m["perf/trainer_peak_memory_gib"] for m in result.metrics)
    figures["logprob_abs_diff"] = max(m["train/train_rollout_logprob_abs_diff"] for m in measured)
    title = f"GRPO step: {args.prompts} x {args.samples} x ({args.prompt_len} + {args.response_len}) tokens"
    table = Table(title=f"{title}, {args.shape}, {args.device}", title_justify="left")
    table.add_column("part")
    table.add_column("seconds", justify="right")
    for name, value in figures.items():
        if name.endswith("_s") and not name.endswith("tok_s"):
            table.add_row(name.removesuffix("_s").replace("_", " "), f"{value:.3f}")
    Console().print(table)
    shape = {"shape": args.shape, "device": args.device, "kl": args.kl, "peak_memory_gib": result.peak_memory_gib}
    print(json.dumps(shape | {k: round(v, 4) for k, v in figures.items()}))


if __name__ == "__main__":
    main()
