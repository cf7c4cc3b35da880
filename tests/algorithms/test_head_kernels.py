"""Output layer kernels, run by Triton's interpreter, against float64."""

import pytest

from tests.triton_interpreter import run_interpreted

pytestmark = pytest.mark.kernels

PROGRAM = r"""
import torch
from slime.algorithms import fused_head, logprobs
from slime.algorithms.logit_transform import LogitTransform

fused_head.STATS_BLOCK = fused_head.GRADIENT_BLOCK = 64
fused_head.ROWS = fused_head.COLUMNS = fused_head.DEPTH = 16
fused_head.GROUP, fused_head.JOINED_TILES, fused_head.JOINED_ROWS = 2, 8, 4

def gradient_of(raw, *rest):
    out = torch.empty(raw.shape, dtype=rest[-1])
    fused_head.logits_gradient(raw, *rest[:-1], out=out)
    return out

for softcap, scale, temperature, with_bias in ((None, 1.0, 1.0, False), (5.0, 0.5, 0.7, True), (None, 2.0, 1.3, True)):
    transform = LogitTransform(scale=scale, softcap=softcap, temperature=temperature)
    torch.manual_seed(0)
    rows, vocab = 5, 203
    raw = (6 * torch.randn(rows, vocab + 7))[:, :vocab]  # rows that do not follow each other
    targets = torch.randint(0, vocab, (rows,))
    targets[2], targets[3] = vocab - 1, -1
    bias = torch.randn(vocab) if with_bias else None

    wide = raw.double().requires_grad_()
    u = scale * (wide if bias is None else wide + bias.double())
    z = (u if softcap is None else softcap * torch.tanh(u / softcap)) / temperature
    log_p = torch.log_softmax(z, dim=1)
    own = torch.where(targets >= 0, log_p[torch.arange(rows), targets.clamp(0)] + z.logsumexp(1), 0.0)
    entropy = -(log_p.exp() * log_p).sum(1)

    normaliser, picked, found = fused_head.softmax_stats(raw, bias, targets, transform, with_entropy=True)
    for name, a, b in (("normaliser", normaliser, z.logsumexp(1)), ("picked", picked, own), ("entropy", found, entropy)):
        torch.testing.assert_close(a.double(), b.detach(), rtol=0, atol=2e-5, msg=lambda text: name + text)
    assert fused_head.softmax_stats(raw, bias, targets, transform, with_entropy=False)[2] is None

    toward, bonus = torch.linspace(-1, 2, rows), torch.linspace(0.5, -0.5, rows)
    log_probs = own - z.logsumexp(1)
    wanted = {
        "log-probs": torch.autograd.grad((log_probs * toward).sum(), wide, retain_graph=True)[0],
        "entropy": torch.autograd.grad((entropy * bonus).sum(), wide)[0],
    }
    pair, args = (bonus, found), (raw, bias, targets, normaliser)
    for dtype, atol in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        got = {
            "log-probs": gradient_of(*args, toward, None, transform, dtype),
            "entropy": gradient_of(*args, None, pair, transform, dtype),
        }
        both = gradient_of(*args, toward, pair, transform, dtype)
        for name, gradient in got.items():
            torch.testing.assert_close(gradient.double(), wanted[name], rtol=0, atol=atol, msg=lambda text: name + text)
        torch.testing.assert_close(both.double(), wanted["log-probs"] + wanted["entropy"], rtol=0, atol=2 * atol)

# the output layer without logits (the interpreter multiplies no bfloat16): rows of the weight and the last tile not full, a group of row tiles neither
for rows, width, vocab in ((37, 24, 203), (16, 16, 16), (1, 40, 65)):
    for softcap, with_bias, dtype in ((None, False, torch.float32), (5.0, True, torch.float16)):
        transform = LogitTransform(scale=1.5, softcap=softcap, temperature=0.7)
        hidden, weight = torch.randn(rows, width).to(dtype), torch.randn(vocab, width).to(dtype)
        bias = torch.randn(vocab).to(dtype) if with_bias else None
        targets = torch.randint(-1, vocab, (rows,))
        targets[0], targets[-1] = vocab - 1, -1
        z = transform.apply_(hidden.double() @ weight.double().T + (bias.double() if with_bias else 0))
        log_p = torch.log_softmax(z, dim=1)
        own = z.gather(1, targets.clamp(0)[:, None]).squeeze(1) * (targets >= 0)
        wanted = {"normaliser": z.logsumexp(1), "picked": own, "entropy": -(log_p.exp() * log_p).sum(1)}
        found = fused_head.projected_stats(hidden, weight, bias, targets, transform, with_entropy=True)
        for (name, true), got in zip(wanted.items(), found):
            torch.testing.assert_close(got.double(), true, rtol=0, atol=5e-5, msg=lambda text: name + text)
        found = fused_head.projected_stats(hidden, weight, bias, targets, transform, with_entropy=False)
        torch.testing.assert_close(found[0].double(), wanted["normaliser"], rtol=0, atol=5e-5)
        assert found[2] is None

logprobs.has_kernels = lambda states: True
logprobs.has_fused_head = lambda hidden, weight: True
hidden, weight, targets = torch.randn(50, 24).half(), torch.randn(77, 24).half(), torch.randint(0, 77, (50,))
taken, projected_stats = [], fused_head.projected_stats
fused_head.projected_stats = lambda rows, *rest, **more: taken.append(len(rows)) or projected_stats(rows, *rest, **more)
logprobs.FUSED_SHARE = 8
log_probs, _ = logprobs.linear_log_probs(hidden, weight, None, targets, chunk_rows=4)
wanted = torch.log_softmax(hidden.double() @ weight.double().T, dim=1)[torch.arange(50), targets]
torch.testing.assert_close(log_probs.double(), wanted, rtol=0, atol=1e-5)
assert taken == [32, 18], taken
logprobs.has_fused_head = lambda hidden, weight: False

for keeps in (False, True):
    logprobs.keeps_gradients = lambda *_: keeps
    hidden, weight, targets = torch.randn(9, 6), torch.randn(77, 6), torch.randint(0, 77, (9,))
    own, wide = ([leaf.to(dtype).requires_grad_() for leaf in (hidden, weight)] for dtype in (torch.float32, torch.float64))
    log_probs, _ = logprobs.linear_log_probs(*own, None, targets, temperature=0.7, chunk_rows=4, with_entropy=True)
    wanted = torch.log_softmax(wide[0] @ wide[1].T / 0.7, dim=1)[torch.arange(9), targets]
    torch.testing.assert_close(log_probs.double(), wanted, rtol=0, atol=1e-5)
    toward = torch.linspace(-1, 2, 9)
    got, want = torch.autograd.grad((log_probs * toward).sum(), own), torch.autograd.grad((wanted * toward).sum(), wide)
    for a, b in zip(got, want):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-5)
print("right")
"""


def test_kernels_match_float64_in_the_triton_interpreter() -> None:
    assert run_interpreted(PROGRAM) == "right\n"
