"""Computes a model's steps with a few large kernels and cuBLAS, and compiles these kernels ahead of time.

Up to two sequences decode with our own products, which read each weight once and include the norm, the gate and the
residual sum. More sequences use cuBLAS. Prompt tokens use cuBLAS and the prefill attention kernel.
Invariant: `decode` reads and writes fixed addresses only, so it can be captured. The result of a sequence does not
depend on the others in the batch, beyond floating-point rounding.

`compile_kernels` runs the steps on `meta` tensors before the weights are loaded. It compiles the kernels of different
steps in different threads. Triton also keeps them in its cache folder for the next start. Invariant: a failure there
never fails a start; a missing kernel is compiled at its first use.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import torch

from slime.cluster.garbage_collection import gc_disabled_in_all_threads
from slime.engine.embedded.fused import attention_kernels, mlp_kernels
from slime.engine.embedded.fused.attention_kernels import AttentionShape, DecodeScratch
from slime.engine.embedded.fused.expert_kernels import combine, route
from slime.engine.embedded.fused.mlp_kernels import add_norm, embed_decode_tokens, swiglu
from slime.engine.embedded.fused.runner import (
    DenseMlp,
    FusedWeights,
    LinearProduct,
    MoeMlp,
)
from slime.engine.embedded.fused.supported_models import FusedModelSpec, tensor_shapes
from slime.engine.embedded.model.attention import AttentionContext
from slime.engine.embedded.model.expert_kernels import experts_product
from slime.engine.embedded.model.interface import DecodeBatch
from slime.engine.embedded.model.prefill_kernels import ExtendTiles, extend_attention

if TYPE_CHECKING:
    from slime.engine.embedded.model.experts import RoutedExperts


class FusedModel:
    """A fused model as a CUDA decoder runs it.

    `context` has the KV slots and the table. At most `most` sequences of up to `positions` tokens decode at once.
    `routed` records the experts of each token.
    """

    fewest_rows = 1
    extends_in_graphs = True

    def __init__(
        self,
        block: FusedModelSpec,
        tensors: Mapping[str, torch.Tensor],
        context: AttentionContext,
        *,
        most: int,
        positions: int,
        routed: RoutedExperts | None = None,
    ) -> None:
        self._weights = FusedWeights(block, tensors)
        self._block, self._context = block, context
        self._shape = AttentionShape(block.heads, block.kv_heads, block.head_dim, block.eps)
        device, dtype = self._weights.embedding.device, self._weights.embedding.dtype
        self._angles = block.rope.tables(block.head_dim, positions, dtype, device)
        self._scratch = DecodeScratch(self._shape, most, positions, device)
        self._positions = positions
        self._few = 0 if block.experts is not None else mlp_kernels.max_gemv_tokens(block.hidden, block.intermediate)
        self._routed = routed if block.experts is not None else None
        if block.experts is not None:
            self._counts = torch.zeros(block.experts.count, dtype=torch.int32, device=device)

        def room(width: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(most, width, dtype=kind, device=device)

        self._stream = room(block.hidden, torch.float32)
        self._normed, self._delta = room(block.hidden), room(block.hidden)
        self._qkv, self._mixed = room(block.qkv_rows), room(block.heads * block.head_dim)
        self._gate_up, self._inner = room(2 * block.intermediate), room(block.intermediate)
        self._logits = room(block.vocab, torch.float32)

    def decode(self, batch: DecodeBatch) -> torch.Tensor:
        """Return fp32 logits `[b, V]`, valid until the next call."""
        b, eps, weights, context = batch.rows.shape[0], self._block.eps, self._weights, self._context
        few = b <= self._few
        pdl = b == 1 and few
        stream, normed, delta = self._stream[:b], self._normed[:b], self._delta[:b]
        qkv, mixed, inner, logits = self._qkv[:b], self._mixed[:b], self._inner[:b], self._logits[:b]

        def product(
            x: torch.Tensor,
            by: LinearProduct,
            out: torch.Tensor,
            *,
            norm: torch.Tensor | None = None,
            gate: bool = False,
            add: bool = False,
        ) -> None:
            mlp_kernels.gemv(x, by.weight, out, bias=by.bias, norm=norm, eps=eps, gate=gate, add=add, pdl=pdl)

        context.slots = batch.slots
        embed_decode_tokens(
            batch.known, batch.tokens, batch.rows, batch.lens, batch.slots, context.table, weights.embedding,
            weights.layers[0].norm, stream, None if few else normed, eps, pdl=pdl,
        )  # fmt: skip
        for index, layer in enumerate(weights.layers):
            if few:
                product(stream, layer.qkv, qkv, norm=layer.norm)
            else:
                layer.qkv(normed, qkv)
            attention_kernels.decode(
                qkv, context.keys[index], context.values[index], mixed, context.table, batch.rows, batch.lens,
                layer.q_norm, layer.k_norm, self._angles, self._scratch, self._shape, window=layer.window,
                parts=attention_kernels.max_parts(b, self._shape, self._positions), pdl=pdl,
            )  # fmt: skip
            if few:
                product(mixed, layer.out, stream, add=True)
                assert isinstance(layer.mlp, DenseMlp)
                product(stream, layer.mlp.gate_up, inner, norm=layer.mlp_norm, gate=True)
                product(inner, layer.mlp.down, stream, add=True)
                continue
            layer.out(mixed, delta)
            add_norm(delta, stream, layer.mlp_norm, normed, eps)
            if isinstance(layer.mlp, MoeMlp):
                self._experts(index, layer.mlp, stream, normed)
                continue
            swiglu(layer.mlp.gate_up(normed, self._gate_up[:b]), inner)
            layer.mlp.down(inner, delta)
            add_norm(delta, stream, self._next_norm(index), normed, eps)
        if few:
            mlp_kernels.gemv(stream, weights.head, logits, norm=weights.norm, eps=eps, pdl=pdl)
        else:
            _project(normed, weights.head, logits)
        return logits

    def _experts(self, index: int, mlp: MoeMlp, stream: torch.Tensor, normed: torch.Tensor) -> None:
        """Add the experts' output for `normed` to `stream`, then write the next norm of `stream` into `normed`."""
        facts = self._block.experts
        assert facts is not None
        found = route(mlp.router(normed), self._counts, facts.topk, normalised=facts.normalised)
        if self._routed is not None:
            self._routed.note(index, found.index, facts.count)
        tiles = (found.order, found.ends, found.tile_ends, found.tile_expert, found.rows, facts.topk)
        gate_up = experts_product(normed, mlp.gate_up, None, *tiles, True, False)
        inner = gate_up.new_empty(len(gate_up), facts.width)
        swiglu(gate_up, inner)
        products = experts_product(inner, mlp.down, None, *tiles, False, False)
        combine(products, found.weights, stream, self._next_norm(index), normed, self._counts, self._block.eps)

    def _next_norm(self, index: int) -> torch.Tensor:
        """Weight of the norm that follows a layer."""
        layers = self._weights.layers
        return layers[index + 1].norm if index + 1 < len(layers) else self._weights.norm

    def extend(
        self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, tiles: ExtendTiles
    ) -> torch.Tensor:
        """Return the last hidden states `[T, H]`, after the final norm.

        The table must have the slots of all visible tokens.
        """
        context, eps, shape = self._context, self._block.eps, self._shape
        context.slots = slots
        normed, tokens = self._weights.embedding.index_select(0, ids), len(ids)
        stream = normed.to(torch.float32, copy=True)
        queries = normed.new_empty(tokens, shape.heads, shape.dim)
        inner = normed.new_empty(tokens, self._block.intermediate)
        add_norm(None, stream, self._weights.layers[0].norm, normed, eps)
        for index, layer in enumerate(self._weights.layers):
            keys, values = context.keys[index], context.values[index]
            attention_kernels.keep(
                layer.qkv(normed), queries, keys, values, slots, positions, layer.q_norm, layer.k_norm, self._angles,
                shape,
            )  # fmt: skip
            mixed = extend_attention(queries, keys, values, context.table, tiles, None, shape.scale, 0.0, layer.window)
            add_norm(layer.out(mixed.view(tokens, -1)), stream, layer.mlp_norm, normed, eps)
            if isinstance(layer.mlp, MoeMlp):
                self._experts(index, layer.mlp, stream, normed)
                continue
            swiglu(layer.mlp.gate_up(normed), inner)
            add_norm(layer.mlp.down(inner), stream, self._next_norm(index), normed, eps)
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits `[T, V]` of last hidden states."""
        out = torch.empty(len(hidden), self._block.vocab, dtype=torch.float32, device=hidden.device)
        return _project(hidden, self._weights.head, out)


def _project(hidden: torch.Tensor, head: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write fp32 logits into `out`; CUDA accumulates half-precision products in fp32 and returns them unrounded."""
    if hidden.dtype == torch.float32 or hidden.is_meta:
        return LinearProduct(head)(hidden, out)
    if hidden.is_cuda:
        return torch.mm(hidden, head.t(), out_dtype=torch.float32, out=out)
    return out.copy_(hidden @ head.t())


log = logging.getLogger(__name__)

_META = torch.device("meta")
_TOKENS = 128  # prompt tokens; only the attention kernel depends on their number
_TILES = (4, 512)  # attention tiles: few and many are distributed differently


@gc_disabled_in_all_threads()
def compile_kernels(block: FusedModelSpec, dtype: torch.dtype, *, most: int, positions: int) -> None:
    """Compile the kernels of decode steps of 1, 2 and `most` sequences and of extend steps.

    `positions` is the number of columns of the slot table.
    """
    began = time.perf_counter()
    tensors = {name: torch.empty(shape, dtype=dtype, device=_META) for name, shape in tensor_shapes(block).items()}
    context = AttentionContext(_META)
    for layer in range(block.layers):
        cache = torch.empty(block.kv_heads, 16, block.head_dim, dtype=dtype, device=_META)
        context.keys[layer] = context.values[layer] = cache
    context.table = torch.empty(most + 1, positions, dtype=torch.int32, device=_META)
    body = FusedModel(block, tensors, context, most=most, positions=positions)
    ids, positions_there, slots = torch.empty(3, _TOKENS, dtype=torch.int64, device=_META).unbind(0)
    tiles = [ExtendTiles(*torch.empty(4, count, dtype=torch.int32, device=_META).unbind(0)) for count in _TILES]

    def decode_batch(size: int) -> DecodeBatch:
        rows, lens, slots, known = torch.empty(4, size, dtype=torch.int64, device=_META).unbind(0)
        return DecodeBatch(rows, lens, slots, known, torch.empty(most + 1, dtype=torch.int64, device=_META))

    def extends() -> None:  # in one thread: kernels that both share are compiled once
        for some in tiles:
            body.extend(ids, positions_there, slots, some)

    steps: list[Callable[[], object]] = [
        partial(body.decode, decode_batch(size)) for size in sorted({1, min(2, most), most})
    ]
    steps.append(extends)
    with ThreadPoolExecutor(len(steps)) as pool:
        for future in [pool.submit(torch.inference_mode()(step)) for step in steps]:
            future.result()
    log.info("compiled kernels in %.1f s", time.perf_counter() - began)
