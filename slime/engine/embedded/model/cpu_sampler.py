"""Samples tokens from logits in plain torch.

The log-prob of a token is that of the temperature-scaled distribution: log softmax(logits / T), after penalties and
biases, before top-k, top-p and min-p cut it. Greedy rows (temperature 0) report T = 1.

A draw takes one uniform number per token and reads the token off the cumulative distribution. The number is a hash of
the sequence's seed and the position, so a seeded request draws the same tokens in any batch and after any restart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from slime.engine.embedded.scheduler import Sequence


def stream_seed(seed: int, choice: int) -> int:
    """Return the 64-bit seed of one sample (`choice`) of a seeded request."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest(), "little")


def uniforms(sequences: SequenceOf[Sequence], ahead: SequenceOf[int]) -> np.ndarray:
    """Return one number in [0, 1) per sequence: splitmix64 of its seed, at the position after `ahead` unread tokens."""
    state = np.array([s.seed for s in sequences], dtype=np.uint64)
    position = np.array([len(s.output_ids) + 1 + n for s, n in zip(sequences, ahead, strict=True)], dtype=np.uint64)
    return uniforms_at(state, position)


def uniforms_at(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return uniform numbers for given 64-bit seeds and positions; the first token of a response is at position 1."""
    with np.errstate(over="ignore"):
        z = seeds + positions * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def draw(
    logits: torch.Tensor, temperature: torch.Tensor | None, uniform: torch.Tensor, greedy: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample tokens and log-probs `[b]` from fp32 logits `[b, V]`; None: all temperatures are 1, no row is greedy."""
    logprobs = (logits if temperature is None else logits / temperature[:, None]).log_softmax(-1)
    tokens = _inverse_cdf(logprobs.exp(), uniform)
    if greedy is not None:
        tokens = torch.where(greedy, logprobs.argmax(-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _inverse_cdf(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the first index whose cumulative weight exceeds `uniform` of the total; never one of weight zero."""
    cumulative = weights.cumsum(-1)
    target = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=weights.shape[1] - 1)


def draw_each(
    logits: torch.Tensor, sequences: SequenceOf[Sequence], uniform: torch.Tensor, greedy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample every row with its own penalties and filters."""
    edited = torch.stack([edit_logits(row, seq) for row, seq in zip(logits, sequences, strict=True)])
    temperature = torch.tensor([temperature_of(s) for s in sequences], device=logits.device)
    logprobs = (edited / temperature[:, None]).log_softmax(-1)
    drawn = _inverse_cdf(mask_unsampled(logprobs, sequences).exp(), uniform)
    tokens = torch.where(greedy, logprobs.argmax(-1), drawn)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def temperature_of(seq: Sequence) -> float:
    return 1.0 if seq.params.greedy and seq.params.temperature == 0.0 else seq.params.temperature


def edit_logits(logits: torch.Tensor, seq: Sequence) -> torch.Tensor:
    """Apply penalties, biases and the ban on stopping before `min_new_tokens` to one row."""
    params = seq.params
    if not params.edits_logits:
        return logits
    logits = logits.clone()
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*seq.prompt_ids, *seq.output_ids}), device=logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if seq.output_ids and (params.frequency_penalty or params.presence_penalty):
        ids, counts = torch.tensor(seq.output_ids, device=logits.device).unique(return_counts=True)
        logits[ids] -= params.frequency_penalty * counts + params.presence_penalty
    for name, bias in (params.logit_bias or {}).items():
        logits[int(name)] += bias
    if len(seq.output_ids) < params.min_new_tokens:
        for token in seq.stop_ids:
            if token < len(logits):
                logits[token] = float("-inf")
    return logits


def mask_unsampled(scaled: torch.Tensor, sequences: SequenceOf[Sequence]) -> torch.Tensor:
    """Set -inf outside each row's top-k and top-p nucleus, and below min-p times the most likely token."""
    if all(s.params.greedy_or_full_support for s in sequences):
        return scaled
    device = scaled.device
    ordered, index = scaled.sort(dim=-1, descending=True, stable=True)  # ties by index
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs  # mass of the tokens that are more likely than this one
    rank = torch.arange(scaled.shape[1], device=device)
    vocab = scaled.shape[1]
    top_k = torch.tensor([s.params.top_k if s.params.top_k > 0 else vocab for s in sequences], device=device)
    top_p = torch.tensor([s.params.top_p for s in sequences], device=device)
    min_p = torch.tensor([s.params.min_p for s in sequences], device=device)
    keep = (
        (rank < top_k[:, None]) & ((before < top_p[:, None]) | (rank == 0)) & (probs >= min_p[:, None] * probs[:, :1])
    )
    return torch.full_like(scaled, float("-inf")).scatter(1, index, ordered.masked_fill(~keep, float("-inf")))
