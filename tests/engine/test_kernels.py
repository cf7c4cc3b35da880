"""The CUDA kernels in Triton's interpreter against plain reference implementations."""

import pytest

from tests.rows import long
from tests.triton_interpreter import run_interpreted

pytestmark = pytest.mark.kernels

PROGRAM = r"""
import sys
import numpy as np, torch
from slime.engine.embedded.model import decode_kernels
from slime.engine.embedded.model.prefill_kernels import ExtendTiles, ExtendTuning, extend_attention
from slime.engine.embedded.model.attention import Rules, _attention_spelled_out

torch.manual_seed(int(sys.argv[1]))
HEADS, KV, DIM, VDIM, SLOTS = int(sys.argv[7]), 2, int(sys.argv[2]), int(sys.argv[3]), 400
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
tiles = ExtendTiles.build(rows, queries, lens, torch.device("cpu"))
out = decode_kernels.paged_extend(q, k, v, slots, keys, values, table, tiles, sinks, rules.scale, softcap, window)
together = ExtendTuning(1 + (HEADS // KV + 1) % 2, keys=16, warps=4, stages=1)  # two heads in a program if they pair
again = extend_attention(q, keys, values, table, tiles, sinks, rules.scale, softcap, window, together)
first, worst = 0, 0.0
for row, n, m in zip(rows, lens, queries):
    want = reference(q[first : first + m], keys, values, table[row, :n].long())
    for found in (out, again):
        worst = max(worst, (found[first : first + m] - want).abs().max().item())
    first += m

q, k, v = torch.randn(3, HEADS, DIM), torch.randn(3, KV, DIM), torch.randn(3, KV, VDIM)
slots = torch.stack([table[r, n - 1].long() for r, n in zip(rows, lens)])
out = decode_kernels.paged_decode(
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
    ("dim", "value_dim", "window", "softcap", "sinks", "heads"),
    [
        (16, 16, 0, 0.0, "none", 6),
        (24, 16, 33, 5.0, "sinks", 4),
        long(24, 16, 40, 0.0, "none", 8),
        long(16, 32, 0, 5.0, "sinks", 4),
        long(80, 80, 33, 2.0, "sinks", 8),
    ],
)
def test_attention_kernels_match_the_reference(
    dim: int, value_dim: int, window: int, softcap: float, sinks: str, heads: int
) -> None:
    arguments = (str(x) for x in (1, dim, value_dim, window, softcap, sinks, heads))
    assert run_interpreted(PROGRAM, *arguments).startswith("worst")


EXPERTS = r"""
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from slime.engine.embedded.model import delta_net_kernels, expert_kernels, gated_delta_net
from tests.tiny_models import SMALL

torch.manual_seed(0)
worst, rows, slots = 0.0, torch.zeros(9, 3, 2, dtype=torch.uint8), torch.tensor([4, 2, 8])
shapes = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
    "gpt_oss": {"num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 72},
}
for model_type, shape in shapes.items():
    config = AutoConfig.for_model(model_type, **{**SMALL, **shape}, experts_implementation="eager")
    model = AutoModelForCausalLM.from_config(config)
    experts = next(m for m in model.modules() if hasattr(m, "is_concatenated"))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.2)

    def multiplied(hidden, index, weights):
        expert_kernels.note_experts(rows, slots, 1, index[:3])
        return expert_kernels.multiply_experts(experts, hidden, index, weights)

    compiled = torch.compile(multiplied, backend="aot_eager")
    for tokens, function in ((3, multiplied), (7, compiled if model_type == "gpt_oss" else multiplied), (30, multiplied)):
        hidden = torch.randn(tokens, 64)
        weights, index = torch.randn(tokens, experts.num_experts).softmax(-1).topk(2, -1)
        if tokens == 7:
            index[:] = torch.tensor([1, 2])  # some experts get all, others nothing
        if tokens == 30:
            del experts.has_post_expert_norm  # as in older versions of transformers
        with torch.no_grad():
            worst = max(worst, (function(hidden, index, weights) - experts(hidden, index, weights)).abs().max().item())
        assert torch.equal(rows[slots, 1].long(), index[:3]) and not rows[:, 0].any(), rows

picked = torch.tensor([3, 0])
token = [torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(2, 3, 40), -torch.rand(2, 3), torch.rand(2, 3)]
states, inputs = torch.randn(5, 3, 8, 40), torch.randn(5, 3, 24)
plain_states, plain_inputs = states.clone(), inputs.clone()
worst = max(worst, (delta_net_kernels.step(states, picked, *token) - gated_delta_net.step(plain_states, picked, *token)).abs().max().item())
fresh, weight = torch.randn(2, 24), torch.randn(24, 4)
found = delta_net_kernels.convolve(inputs, picked, fresh, weight)
worst = max(worst, (found - gated_delta_net.convolve(plain_inputs, picked, fresh, weight)).abs().max().item())
worst = max(worst, (states - plain_states).abs().max().item(), (inputs - plain_inputs).abs().max().item())
print("worst", worst)
assert worst < 1e-4, worst
"""


def test_expert_and_delta_net_kernels_match_the_reference() -> None:
    assert run_interpreted(EXPERTS).startswith("worst")
