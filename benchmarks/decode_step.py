"""GPU time of one decode step through the fused kernels, without sampling, and of a prompt pass.

python benchmarks/decode_step.py                          # both shapes, 1 to 256 sequences
python benchmarks/decode_step.py --shape 4B --batch 1 --context 32000 --profile
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from functools import partial

import torch
from gpu_checks.fused import fused_tensors, make_body

from slime.engine.embedded.fused.model import FusedModel, compile_kernels
from slime.engine.embedded.fused.supported_models import block_of
from slime.engine.embedded.model.interface import DecodeBatch
from slime.engine.embedded.model.prefill_kernels import ExtendTiles

_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8,
          "max_position_embeddings": 40960, "rope_theta": 1e6, "tie_word_embeddings": True}  # fmt: skip
SHAPES = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "30B-A3B": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },  # 8 of its 48 layers
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
_LOADS = [(1, 600), (2, 600), (4, 600), (16, 600), (64, 400), (256, 400)]


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def milliseconds(run: Callable[[], object], times: int = 20) -> float:
    """The median of several runs, on the device's clock."""
    run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in itertools.pairwise(marks))[times // 2]


def batch_of(count: int, context: int, table: torch.Tensor) -> DecodeBatch:
    """Sequences of the same length, at slots as the engine hands them out: one behind the other, row after row."""
    device = table.device
    lens = torch.full((count,), context, device=device)
    for row in range(count):
        first = row * context + 1
        table[row, :context] = torch.arange(first, first + context, dtype=torch.int32, device=device)
    rows = torch.arange(count, device=device)
    known = torch.full((count,), 7, device=device)
    return DecodeBatch(
        rows, lens, table[rows, lens - 1].long(), known, torch.zeros(len(table), dtype=torch.int64, device=device)
    )


def profile(graph: torch.cuda.CUDAGraph) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda row: -row.device_time_total)
    for row in rows[:20]:
        print(f"    {row.device_time_total / 3000:8.3f} ms {row.count // 3:5d} x {row.key[:90]}")


def time_prompts(body: FusedModel, table: torch.Tensor, tokens: int, each: int) -> float:
    count, device = tokens // each, table.device
    batch_of(count, each, table)
    tiles = ExtendTiles.build(list(range(count)), [each] * count, [each] * count, device)
    ids, positions = (
        torch.zeros(tokens, dtype=torch.int64, device=device),
        torch.arange(each, device=device).repeat(count),
    )
    slots = table[:count, :each].reshape(-1).long()
    return milliseconds(lambda: body.extend(ids, positions, slots, tiles), 5)


@torch.inference_mode()
def time_shape(shape: str, loads: list[tuple[int, int]], *, profiled: bool) -> None:
    block = block_of({**_QWEN3, **SHAPES[shape]})
    most, context = max(64, *(b for b, _ in loads)), max(1024, *(n for _, n in loads))
    slots = max(8192, *(b * n for b, n in loads))
    began = time.perf_counter()
    compile_kernels(block, torch.bfloat16, most=most, positions=context)
    print(f"{shape} kernels compiled in {time.perf_counter() - began:.1f} s", flush=True)
    body, own = make_body(block, fused_tensors(block, torch.bfloat16), most=most, context=context, slots=slots)
    for count, length in loads:
        began = time.perf_counter()
        graph = captured(partial(body.decode, batch_of(count, length, own.table)))
        ready = f"ready in {time.perf_counter() - began:.1f} s"
        print(f"{shape} {count:4d} x {length:5d}: {milliseconds(graph.replay):.3f} ms ({ready})", flush=True)
        if profiled:
            profile(graph)
    print(f"{shape} prompts, 8192 tokens of 128: {time_prompts(body, own.table, 8192, 128):.1f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--profile", action="store_true", help="where the time goes, by kernel")
    given = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for shape in given.shape or ["0.6B", "4B"]:
        time_shape(shape, [(given.batch, given.context)] if given.batch else _LOADS, profiled=given.profile)


if __name__ == "__main__":
    main()
