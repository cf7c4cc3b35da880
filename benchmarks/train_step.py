"""A packed training step against transformers' `Trainer` on the same model and samples, padded.

    python benchmarks/train_step.py                                  # 29 M parameters on the CPU, float32
    python benchmarks/train_step.py --shape tiny --samples 256

Both sides make supervised optimizer steps (AdamW) over the same samples, whose lengths have a long tail: most are
short, a few are ten times the median. Tokens per second count real tokens; padding is work, not progress. The figure is
the median of `--repeat` steps after one that warms up.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from workload import make_model

from slime.cluster.devices import threads_per_process
from slime.config import Config, derive
from slime.data.sample import Sample
from slime.train.trainer_group import TrainerGroup


def make_samples(count: int, median_len: int, longest: int, seed: int = 0) -> list[Sample]:
    """Log-normal lengths; a quarter of each sample is its prompt."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.exp(rng.normal(np.log(median_len), 1.0, count)), 8, longest).astype(int)
    samples = []
    for index, length in enumerate(lengths.tolist()):
        tokens = rng.integers(2, 90, length).tolist()
        response = length - max(1, length // 4)
        samples.append(
            Sample(group_index=index, index=index, tokens=tokens, response_length=response,
                   loss_mask=[1] * response, status=Sample.Status.COMPLETED)
        )  # fmt: skip
    return samples


def packed_steps(folder: Path, samples: list[Sample], args: argparse.Namespace, run_dir: Path) -> list[float]:
    """Seconds of whole `TrainerGroup.train` calls: batch, schedule, one update in the trainer's process."""
    config = derive(
        Config(
            hf_checkpoint=str(folder), loss_type="sft_loss", rollout_batch_size=len(samples), num_rollout=99,
            global_batch_size=len(samples), use_dynamic_batch_size=True, max_tokens_per_gpu=args.max_tokens,
            dtype=args.dtype, lr=1e-5,
        )
    )  # fmt: skip
    groups = [[sample] for sample in samples]
    seconds = []
    with TrainerGroup(config, device=args.device, run_dir=run_dir) as trainers:
        trainers.start()
        for rollout_id in range(args.repeat + 1):
            began = time.perf_counter()
            trainers.train(rollout_id, groups)
            seconds.append(time.perf_counter() - began)
    return seconds[1:]


def padded_steps(folder: Path, samples: list[Sample], args: argparse.Namespace, scratch: Path) -> list[float]:
    """Seconds of `Trainer`'s optimizer steps, each over all samples in padded batches."""
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    if args.device == "cpu":
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def padded(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
        longest = max(len(row["input_ids"]) for row in rows)
        fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        return {
            name: torch.tensor([row[name] + [v] * (longest - len(row[name])) for row in rows])
            for name, v in fill.items()
        }

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.ends = [time.perf_counter()]

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())

    rows = [
        {
            "input_ids": s.tokens,
            "labels": [-100] * (len(s.tokens) - s.response_length) + s.tokens[-s.response_length :],
            "attention_mask": [1] * len(s.tokens),
        }
        for s in samples
    ]
    clock = Clock()
    settings = TrainingArguments(
        output_dir=str(scratch / "trainer"), max_steps=args.repeat + 1, learning_rate=1e-5, seed=0,
        per_device_train_batch_size=args.batch, gradient_accumulation_steps=-(-len(rows) // args.batch),
        use_cpu=args.device == "cpu",
        bf16=args.dtype == "bfloat16", report_to=[], disable_tqdm=True, logging_strategy="no", save_strategy="no",
    )  # fmt: skip
    Trainer(model=model, args=settings, train_dataset=rows, data_collator=padded, callbacks=[clock]).train()  # type: ignore[arg-type]
    return [end - begin for begin, end in zip(clock.ends, clock.ends[1:], strict=False)][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--median-len", type=int, default=64)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8, help="samples in a padded batch")
    parser.add_argument("--max-tokens", type=int, default=2048, help="tokens in a packed row")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    if args.device == "cpu":
        os.environ.update(threads_per_process(1))  # both sides with the same threads
    samples = make_samples(args.samples, args.median_len, args.longest)
    tokens = sum(len(s.tokens) for s in samples)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(Path(scratch) / "model", args.shape, "float32")
        packed = median(packed_steps(folder, samples, args, Path(scratch)))
        padded = median(padded_steps(folder, samples, args, Path(scratch)))
    title = f"One step over {len(samples)} samples, {tokens} tokens, {args.shape} on {args.device}, {args.dtype}"
    table = Table(title=title, title_justify="left")
    for column in ("what", "seconds", "tokens/s", "ratio"):
        table.add_column(column, justify="left" if column == "what" else "right")
    table.add_row("slime, packed", f"{packed:.2f}", f"{tokens / packed:,.0f}", f"{padded / packed:.2f}x")
    table.add_row("transformers.Trainer, padded", f"{padded:.2f}", f"{tokens / padded:,.0f}", "")
    Console().print(table)
    facts = {"shape": args.shape, "device": args.device, "dtype": args.dtype, "samples": len(samples), "tokens": tokens}
    print(
        json.dumps(
            facts | {"packed_s": round(packed, 3), "padded_s": round(padded, 3), "ratio": round(padded / packed, 3)}
        )
    )


if __name__ == "__main__":
    main()
