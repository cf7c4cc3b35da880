"""Float64 reference for draws from rows of logits, used by the tests of the sampling kernels."""

from __future__ import annotations

from typing import Any

import torch

from slime.engine.embedded.model.cpu_sampler import edit_logits, temperature_of
from slime.engine.embedded.model.interface import DrawBatch
from slime.engine.embedded.sampling_params import parse_sampling_params
from slime.engine.embedded.scheduler import Sequence

SLACK = 2e-5  # float32 error, as a share of the total probability mass


def sequence(
    row: int, vocab: int, *, prompt: list[int] | None = None, stops: tuple[int, ...] = (), **raw: Any
) -> Sequence:
    params = parse_sampling_params({"max_new_tokens": 64, **raw}, vocab_size=vocab)
    seq = Sequence(f"rid-{row}", prompt or [1, 2, 3], params, frozenset(stops), 64, notify=lambda seq: None)
    seq.row = row
    return seq


def batch_of(sequences: list[Sequence], uniform: torch.Tensor, tokens: torch.Tensor) -> DrawBatch:
    device = tokens.device
    return DrawBatch(
        torch.tensor([s.row for s in sequences], device=device),
        uniform.float().to(device),
        torch.tensor([temperature_of(s) for s in sequences], device=device),
        torch.tensor([float(s.params.greedy) for s in sequences], device=device),
        tokens,
        torch.full((len(sequences), 2), -7.0, dtype=torch.float64, device=device),
    )


def wrong(logits: torch.Tensor, seq: Sequence, uniform: float, token: int, logprob: float) -> str | None:
    """Describe why a token drawn from a row of raw logits breaks the rules of `sampler`; None: it is valid."""
    params = seq.params
    scaled = edit_logits(logits, seq).double() / temperature_of(seq)
    logprobs = scaled.log_softmax(-1)
    if abs(float(logprobs[token]) - logprob) > 1e-4 * max(1.0, abs(logprob)):
        return f"the log-prob of {token} is {float(logprobs[token])}, not {logprob}"
    if params.greedy:
        best = int(scaled.float().argmax())
        return None if scaled[token] >= scaled[best] - 1e-5 else f"{token} is not the arg-max, {best}"
    probs, (fewest, most) = logprobs.exp(), staying(logits, seq)
    if not most[token]:
        return f"{token}, whose probability is {float(probs[token])}, should have been cut"
    # between the cumulative masses of both cuts either draw is valid
    low = min(float((probs * s)[:token].sum() / (probs * s).sum()) for s in (fewest, most))
    high = max(float((probs * s)[: token + 1].sum() / (probs * s).sum()) for s in (fewest, most))
    slack = SLACK + float((probs * (most & ~fewest)).sum())
    return None if low - slack <= uniform <= high + slack else f"{token} covers {low}..{high}, not {uniform}"


def staying(logits: torch.Tensor, seq: Sequence) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks of the smallest and largest valid set of tokens after the cuts, given the float32 error."""
    params = seq.params
    logprobs = (edit_logits(logits, seq).double() / temperature_of(seq)).log_softmax(-1)
    probs, order = logprobs.exp(), logprobs.sort(descending=True, stable=True).indices
    before, rank = torch.empty_like(probs), torch.empty_like(order)
    before[order] = probs[order].cumsum(0) - probs[order]
    rank[order] = torch.arange(len(order), device=order.device)
    bounds = []
    for slack in (-SLACK, SLACK):
        stays = before < (params.top_p + slack if params.top_p < 1.0 else 2.0)
        stays &= probs >= params.min_p * probs.max() * (1.0 - slack)
        if params.top_k > 0:
            stays &= rank < params.top_k
        bounds.append(stays | (rank == 0))
    return bounds[0], bounds[1]
