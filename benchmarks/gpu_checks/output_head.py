"""Log-probs, entropies and their gradients straight from hidden states, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from slime.algorithms.fused_head import projected_stats
from slime.algorithms.logit_transform import LogitTransform
from slime.algorithms.logprobs import has_fused_head, linear_log_probs

_ROWS, _WIDTH, _VOCAB = 300, 256, 50021


def checks() -> Iterator[tuple[str, float, float]]:
    for dtype in (torch.float32, torch.bfloat16):
        for softcap, temperature, with_bias in ((None, 1.0, False), (None, 0.7, True), (20.0, 1.0, False)):
            for with_entropy in (True, False):  # without its gradient forward keeps that of the log-probs
                yield from _one(dtype, softcap, temperature, with_bias, with_entropy)
    for rows, width, vocab in ((_ROWS, _WIDTH, _VOCAB), (1, 1024, 151936), (4100, 200, 1280)):
        for softcap, temperature, with_bias in ((None, 1.0, False), (20.0, 0.7, True)):
            yield from _without_logits(rows, width, vocab, softcap, temperature, with_bias)


def _one(
    dtype: torch.dtype, softcap: float | None, temperature: float, with_bias: bool, with_entropy: bool
) -> Iterator[tuple[str, float, float]]:
    torch.manual_seed(0)
    device, name = (
        torch.device("cuda"),
        f"{str(dtype).removeprefix('torch.')}, cap {softcap}, bonus {with_entropy}",
    )
    shapes = [(_ROWS, _WIDTH), (_VOCAB, _WIDTH), *([(_VOCAB,)] if with_bias else [])]
    made = [torch.randn(shape, device=device).mul(0.3).to(dtype) for shape in shapes]
    targets = torch.randint(0, _VOCAB, (_ROWS,), device=device)
    toward = torch.linspace(-1, 1, _ROWS, device=device)
    own, wide = ([leaf.to(kind).requires_grad_() for leaf in made] for kind in (dtype, torch.float64))

    def call(leaves: list[Tensor], rows: int) -> list[Tensor]:
        bias = leaves[2] if with_bias else None
        keywords = {"temperature": temperature, "softcap": softcap, "chunk_rows": rows, "with_entropy": True}
        log_probs, entropy = linear_log_probs(leaves[0], leaves[1], bias, targets, **keywords)  # type: ignore[arg-type]
        assert entropy is not None
        bonus = 0.01 * entropy * toward.flip(0) if with_entropy else 0.0
        gradients = torch.autograd.grad((log_probs * toward + bonus).sum(), leaves)
        return [log_probs, entropy, *gradients]

    parts = ("log-probs", "entropies", "gradient of hidden states", "gradient of the weight", "gradient of the bias")
    for part, found, wanted in zip(parts, call(own, 128), call(wide, 1000), strict=False):
        bound = 2e-4 if part in ("log-probs", "entropies") else 1e-4 if dtype == torch.float32 else 2e-2
        size = 1.0 if part in ("log-probs", "entropies") else wanted.abs().max().item()
        yield f"{part}, {name}", (found.double() - wanted).abs().max().item() / size, bound


def _without_logits(
    rows: int, width: int, vocab: int, softcap: float | None, temperature: float, with_bias: bool
) -> Iterator[tuple[str, float, float]]:
    """The statistics of a forward that no backward follows; a target of -1 is none of the columns."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, width, device="cuda").mul(0.3).bfloat16() for n in (rows, vocab))
    bias = torch.randn(vocab, device="cuda").bfloat16() if with_bias else None
    targets = torch.randint(-1, vocab, (rows,), device="cuda")
    targets[0] = vocab - 1
    if not has_fused_head(hidden, weight):
        yield "statistics without logits: this GPU has none", 0.0, 0.0
        return
    transform = LogitTransform(scale=1.5, softcap=softcap, temperature=temperature)
    found = projected_stats(hidden, weight, bias, targets, transform, with_entropy=True)
    z = transform.apply_(hidden.double() @ weight.double().T + (0 if bias is None else bias.double()))
    log_p = torch.log_softmax(z, dim=1)
    picked = z.gather(1, targets.clamp(min=0)[:, None]).squeeze(1) * (targets >= 0)
    wanted = (z.logsumexp(1), picked, -(log_p.exp() * log_p).sum(1))
    for part, own, true in zip(("log-normaliser", "target's logit", "entropy"), found, wanted, strict=True):
        assert own is not None
        yield f"{part}, {rows} x {width} x {vocab}, cap {softcap}", (own.double() - true).abs().max().item(), 2e-4
