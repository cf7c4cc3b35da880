"""How far the engine's and the trainer's log-probs are from each other, and from those of transformers in float32.

The engine draws responses at temperature 1 in the given dtype; the same tokens are then scored by transformers in
float32 and in that dtype, and by the trainer's model. All have the same weights, rounded to the dtype once, so what is
printed is rounding on the way: the mean and the largest difference of a token's log-prob, for each two of them.

    python benchmarks/logprob_gap.py                                                      # tiny, on the CPU
    python benchmarks/logprob_gap.py --shape qwen3-4b --device cuda --sequences 16 --prompt-len 128 --response-len 1024
"""

from __future__ import annotations

import argparse
import gc
import itertools
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM
from workload import make_model

from slime.engine.embedded.engine import EngineCore
from slime.engine.embedded.options import parse_options
from slime.engine.embedded.sampling_params import SamplingParams
from slime.engine.embedded.scheduler import Sequence
from slime.train.backends.fsdp.attention import ATTENTION_NAME, register_packed_attention
from slime.train.backends.fsdp.fused.layer import fuse_layers
from slime.train.backends.fsdp.packed_model import PolicyModel
from slime.train.samples.packing import pack


@dataclass(frozen=True)
class Answer:
    """A prompt with its response, and the log-probs that the engine drew it with."""

    tokens: list[int]
    log_probs: list[float]


def draw(folder: Path, args: argparse.Namespace) -> list[Answer]:
    """Responses of the embedded engine, of one length."""
    total = args.sequences * (args.prompt_len + args.response_len)
    options = ["--model-path", str(folder), "--dtype", args.dtype, "--device", args.device]
    options += ["--max-running-requests", str(args.sequences), "--max-total-tokens", str(2 * total)]
    ended = threading.Semaphore(0)

    def die(error: BaseException) -> None:
        raise SystemExit(f"the engine ended: {error}")

    def notify(sequence: Sequence) -> None:
        if sequence.finish is not None:
            ended.release()

    core = EngineCore(parse_options(options), on_death=die)
    core.load(args.device)
    core.start()
    sequences = [
        Sequence(
            f"request {index}",
            np.random.default_rng(index).integers(3, 90, args.prompt_len).tolist(),
            SamplingParams(temperature=1.0),
            frozenset(),
            args.response_len,
            notify,
            seed=index,
        )
        for index in range(args.sequences)
    ]
    core.submit(sequences)
    for _ in sequences:
        ended.acquire()
    core.stop()
    return [Answer(list(sequence.tokens), list(sequence.logprobs)) for sequence in sequences]


@torch.inference_mode()
def score_with_transformers(folder: Path, answers: list[Answer], device: str, dtype: torch.dtype) -> Tensor:
    """One sequence at a time, softmax in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device).eval()
    found = []
    for answer in answers:
        tokens, count = torch.tensor([answer.tokens], device=device), len(answer.log_probs)
        logits = model(input_ids=tokens).logits[0, -count - 1 : -1].float()
        found.append(logits.log_softmax(-1).gather(1, tokens[0, -count:, None])[:, 0].cpu())
    return torch.cat(found)


@torch.no_grad()
def score_with_trainer(folder: Path, answers: list[Answer], device: str, dtype: torch.dtype) -> Tensor:
    """All sequences in one packed row, through the layers that training uses on this device."""
    register_packed_attention()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=ATTENTION_NAME)
    model = model.to(device).eval()
    if device == "cuda":
        fuse_layers(model)
    row = pack(
        [np.array(answer.tokens) for answer in answers],
        [len(answer.log_probs) for answer in answers],
        torch.device(device),
    )
    log_probs, _ = PolicyModel(model)(row)
    return log_probs.float().cpu()


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=32)
    parser.add_argument("--response-len", type=int, default=96)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(Path(scratch) / "model", args.shape, args.dtype)
        answers = draw(folder, args)
        free_memory()
        found = {"engine": torch.cat([torch.tensor(answer.log_probs) for answer in answers])}
        found["transformers, float32"] = score_with_transformers(folder, answers, args.device, torch.float32)
        free_memory()
        found[f"transformers, {args.dtype}"] = score_with_transformers(folder, answers, args.device, dtype)
        free_memory()
        found["trainer"] = score_with_trainer(folder, answers, args.device, dtype)
    exact = found["transformers, float32"]
    title = f"{args.shape}: {len(exact):,} log-probs, mean {exact.mean():.3f}, standard deviation {exact.std():.3f}"
    table = Table("", "", "mean", "most", title=title)
    for one, other in itertools.combinations(found, 2):
        apart = (found[one] - found[other]).abs()
        table.add_row(one, other, f"{apart.mean():.4f}", f"{apart.max():.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
