"""Draws from logits of real sizes against the rules spelled out in float64, and what they cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from slime.engine.embedded.model.interface import DrawBatch
from slime.engine.embedded.sampling.sampler import KernelDraw
from slime.engine.embedded.scheduler import Sequence
from tests.engine.drawing import batch_of, sequence, wrong

_DEVICE = torch.device("cuda")
_ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 0},
    {"top_p": 0.95},
    {"top_k": 50},
    {"min_p": 0.05},
    {"top_p": 0.8, "top_k": 700, "min_p": 0.001, "temperature": 1.7},
    {"top_p": 0.999, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.2},
    {"logit_bias": {"7": 3.0, "11": -1e30}, "min_p": 1e-6},
    {"top_p": 1e-9},
]


def _rows(vocab: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(vocab)
    spike = torch.full((vocab,), -50.0)
    spike[-1] = 60.0
    return {
        "random weights": torch.randn(vocab) * 0.64,
        "peaked": torch.randn(vocab) * 2.5,
        "spiky": torch.randn(vocab) * 6,
        "equal": torch.zeros(vocab),
        "few values": torch.randint(0, 5, (vocab,)).float(),
        "close together": torch.randn(vocab) * 1e-3,
        "rounded": (torch.randn(vocab) * 2.5).bfloat16().float(),
        "one token": spike,
        "mostly -inf": torch.randn(vocab).masked_fill(torch.rand(vocab) < 0.7, -torch.inf),
    }


def checks() -> Iterator[tuple[str, float, float]]:
    for vocab in (151936, 262144, 32003):
        rows = _rows(vocab)
        sequences = [sequence(i, vocab, **raw) for i, raw in enumerate(_ASKED * len(rows))]
        logits = torch.stack([row for row in rows.values() for _ in _ASKED]).to(_DEVICE)
        draw = KernelDraw(len(sequences), vocab, _DEVICE)
        tokens = torch.zeros(len(sequences) + 1, dtype=torch.int64, device=_DEVICE)
        uniform = torch.rand(len(sequences))
        uniform[::7] = 1 - 2**-24
        batch = batch_of(sequences, uniform, tokens)
        edited = logits.clone()
        draw.plain(edited, batch)
        draw.special(edited, batch, sequences, [0] * len(sequences))
        names = [name for name in rows for _ in _ASKED]
        drawn = zip(names, logits, sequences, uniform.tolist(), batch.results.tolist(), strict=True)
        faults = [
            f"{name}, top-k {seq.params.top_k}, top-p {seq.params.top_p}, min-p {seq.params.min_p}: {fault}"
            for name, row, seq, u, (token, logprob) in drawn
            if (fault := wrong(row, seq, u, int(token), logprob))
        ]
        for fault in faults[:6]:
            print("      ", fault)
        yield f"draws that break the rules, of {len(sequences)} from {vocab} tokens", float(len(faults)), 0.0
    yield from _most_likely()
    _timings()


def _most_likely() -> Iterator[tuple[str, float, float]]:
    vocab = 151936
    sequences = [sequence(i, vocab, temperature=0.7, top_p=0.9) for i in range(40)]
    for seq in sequences[1:]:
        seq.top_logprobs = 5
    logits = torch.randn(40, vocab, device=_DEVICE) * 3
    batch = batch_of(sequences, torch.rand(40), torch.zeros(41, dtype=torch.int64, device=_DEVICE))
    draw = KernelDraw(40, vocab, _DEVICE)
    draw.plain(logits, batch)
    arrived = draw.special(logits, batch, sequences, [0] * 40)
    torch.cuda.synchronize()
    assert arrived is not None
    arrived()
    best = (logits[1:].double() / 0.7).log_softmax(-1).topk(5)
    found = torch.tensor([[p for p, _ in seq.output_top[0]] for seq in sequences[1:]], device=_DEVICE)
    tokens = torch.tensor([[t for _, t in seq.output_top[0]] for seq in sequences[1:]], device=_DEVICE)
    yield "the most likely tokens", float((tokens != best.indices).sum()), 0.0
    yield "their log-probs", (found - best.values).abs().max().item(), 1e-4


def _timings() -> None:
    """Milliseconds of GPU time for one step."""
    vocab = 151936
    asked: dict[str, dict[str, Any]] = {
        "plain": {},
        "top-p 0.95": {"top_p": 0.95},
        "top-k 50": {"top_k": 50},
        "min-p 0.05": {"min_p": 0.05},
        "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.1},
        "top-p 0.95 + penalties": {"top_p": 0.95, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
    }
    for count in (256, 16, 1):
        draw = KernelDraw(count, vocab, _DEVICE)
        tokens = torch.zeros(count + 1, dtype=torch.int64, device=_DEVICE)
        for scale in (0.64, 2.5):
            logits = torch.randn(count, vocab, device=_DEVICE) * scale
            for name, raw in asked.items():
                sequences = [sequence(i, vocab, prompt=list(range(100, 740)), **raw) for i in range(count)]
                batch = batch_of(sequences, torch.rand(count), tokens)
                print(f"      {count} rows, logits of std {scale}, {name}: {_cost(draw, logits, batch, sequences)}")


def _cost(draw: KernelDraw, logits: torch.Tensor, batch: DrawBatch, sequences: list[Sequence]) -> str:
    ahead = [0]

    def step() -> None:
        draw.plain(logits, batch)
        if not sequences[0].plain:
            draw.special(logits, batch, sequences, ahead * len(sequences))
            ahead[0] += 1

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started = time.perf_counter()
    begin.record()
    for _ in range(10):
        step()
    end.record()
    host = (time.perf_counter() - started) * 100
    torch.cuda.synchronize()
    return f"{begin.elapsed_time(end) / 10:.3f} ms ({host:.3f} of the host)"
