"""The CUDA kernels, run by Triton's interpreter: attention over slots against attention spelled out."""

import os
import subprocess
import sys

import pytest

PROGRAM = r"""
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
import numpy as np, torch
from slime.engine.embedded.model import kernels
from slime.engine.embedded.model.attention import Rules, _attention_spelled_out

torch.manual_seed(int(sys.argv[1]))
HEADS, KV, DIM, VDIM, SLOTS = 6, 2, int(sys.argv[2]), int(sys.argv[3]), 400
window, softcap, with_sinks = int(sys.argv[4]), float(sys.argv[5]), sys.argv[6] == "sinks"
sinks = torch.randn(HEADS) if with_sinks else None
rules = Rules(0.3, window or None, softcap or None, sinks)

def reference(q, keys, values, slots):  # q [m, H, D] are the last m positions of the sequence kept at `slots`
    m, n = len(q), len(slots)
    key, query = torch.arange(n), torch.arange(n - m, n)
    seen = key <= query[:, None]
    if window:
        seen &= key > query[:, None] - window
    out = _attention_spelled_out(q.transpose(0, 1)[None], keys[:, slots][None], values[:, slots][None], seen[None, None], rules)
    return out[0].transpose(0, 1)

lens, queries = [70, 5, 130], [70, 2, 67]
table = torch.zeros(4, 256, dtype=torch.int32)
order = torch.randperm(SLOTS - 1) + 1
rows, at = [2, 0, 3], 0
for row, n in zip(rows, lens):
    table[row, :n] = order[at : at + n].int(); at += n
keys, values = torch.randn(KV, SLOTS, DIM), torch.randn(KV, SLOTS, VDIM)
total = sum(queries)
q, k, v = torch.randn(total, HEADS, DIM), torch.randn(total, KV, DIM), torch.randn(total, KV, VDIM)
slots = torch.cat([table[r, n - m : n].long() for r, n, m in zip(rows, lens, queries)])
tiles = kernels.ExtendTiles.build(rows, queries, lens, torch.device("cpu"))
out = kernels.paged_extend(q, k, v, slots, keys, values, table, tiles, sinks, rules.scale, softcap, window)
first, worst = 0, 0.0
for row, n, m in zip(rows, lens, queries):
    want = reference(q[first : first + m], keys, values, table[row, :n].long())
    worst = max(worst, (out[first : first + m] - want).abs().max().item()); first += m

q, k, v = torch.randn(3, HEADS, DIM), torch.randn(3, KV, DIM), torch.randn(3, KV, VDIM)
slots = torch.stack([table[r, n - 1].long() for r, n in zip(rows, lens)])
out = kernels.paged_decode(
    q, k, v, slots, keys, values, table, torch.tensor(rows), torch.tensor(lens, dtype=torch.int32), sinks, rules.scale,
    softcap, window)
assert torch.equal(keys[:, slots], k.transpose(0, 1))
for i, (row, n) in enumerate(zip(rows, lens)):
    want = reference(q[i : i + 1], keys, values, table[row, :n].long())
    worst = max(worst, (out[i : i + 1] - want).abs().max().item())
print("worst", worst)
assert worst < 1e-4, worst
"""


@pytest.mark.parametrize(
    ("dim", "value_dim", "window", "softcap", "sinks"),
    [(16, 16, 0, 0.0, "none"), (24, 16, 40, 0.0, "none"), (16, 32, 0, 5.0, "sinks"), (80, 80, 33, 2.0, "sinks")],
)
def test_kernels_match_attention_spelled_out(dim: int, value_dim: int, window: int, softcap: float, sinks: str) -> None:
    arguments = [str(x) for x in (1, dim, value_dim, window, softcap, sinks)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("worst")
