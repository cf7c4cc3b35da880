"""Compiling the kernels of a model before its weights are there: a body of `meta` tensors goes through its steps.

Kernels of different steps are compiled in different threads. Triton keeps them in its cache folder, too, where the
next start finds them. Invariant: nothing here can fail a start; a kernel that is missing is compiled when it is used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from slime.cluster.garbage_collection import collector_at_rest
from slime.engine.embedded.fused.body import FusedBody
from slime.engine.embedded.fused.families import Block, tensor_shapes
from slime.engine.embedded.model.attention import AttentionContext
from slime.engine.embedded.model.body import DecodeBatch
from slime.engine.embedded.model.extend_attention import ExtendTiles

log = logging.getLogger(__name__)

_META = torch.device("meta")
_TOKENS = 128  # of a prompt; kernels are the same for any number, but that of attention
_TILES = (4, 512)  # few and many are shared out differently


@collector_at_rest()
def compile_kernels(block: Block, dtype: torch.dtype, *, most: int, positions: int) -> None:
    """Compile what decoding 1 and `most` sequences takes, and prompts; `positions`: columns of the table of slots."""
    began = time.perf_counter()
    body = meta_body(block, dtype, most=most, positions=positions)
    ids, positions_there, slots = torch.empty(3, _TOKENS, dtype=torch.int64, device=_META).unbind(0)
    tiles = [ExtendTiles(*torch.empty(4, count, dtype=torch.int32, device=_META).unbind(0)) for count in _TILES]
    steps: list[Callable[[], object]] = [
        partial(body.decode, _batch(size, most)) for size in sorted({1, min(2, most), most})
    ]
    steps.append(partial(_each, [partial(body.extend, ids, positions_there, slots, some) for some in tiles]))
    with ThreadPoolExecutor(len(steps)) as pool:
        for future in [pool.submit(torch.inference_mode()(step)) for step in steps]:
            future.result()
    log.info("compiled kernels in %.1f s", time.perf_counter() - began)


def _each(steps: list[partial[torch.Tensor]]) -> None:
    """One after the other: what they share is compiled once."""
    for step in steps:
        step()


def meta_body(block: Block, dtype: torch.dtype, *, most: int, positions: int) -> FusedBody:
    """A body without memory."""
    tensors = {name: torch.empty(shape, dtype=dtype, device=_META) for name, shape in tensor_shapes(block).items()}
    context = AttentionContext(_META)
    for layer in range(block.layers):
        kept = torch.empty(block.kv_heads, 16, block.head_dim, dtype=dtype, device=_META)
        context.keys[layer] = context.values[layer] = kept
    context.table = torch.empty(most + 1, positions, dtype=torch.int32, device=_META)
    return FusedBody(block, tensors, context, most=most, positions=positions)


def _batch(size: int, most: int) -> DecodeBatch:
    rows, lens, slots, known = torch.empty(4, size, dtype=torch.int64, device=_META).unbind(0)
    return DecodeBatch(rows, lens, slots, known, torch.empty(most + 1, dtype=torch.int64, device=_META))
