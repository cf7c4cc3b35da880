"""Bodies from the fused kernels against the same block in plain float32, in the shapes of real models.

Every check is a whole small body: prompts through `extend`, then decode steps at several batch sizes over contexts of
many lengths. The error is that of the log-probs, as a share of what plain half precision is off by.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from slime.engine.embedded.fused.model import FusedModel
from slime.engine.embedded.fused.reference import ReferenceModel
from slime.engine.embedded.fused.supported_models import FusedModelSpec, block_of, tensor_shapes, together
from slime.engine.embedded.model.attention import AttentionContext
from slime.engine.embedded.model.interface import DecodeBatch
from slime.engine.embedded.model.prefill_kernels import ExtendTiles

_DEVICE = torch.device("cuda")
_BASE: dict[str, Any] = {
    "model_type": "qwen3", "num_hidden_layers": 2, "vocab_size": 4096, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip


def _facts(hidden: int, inner: int, heads: int, kv: int, dim: int, **more: Any) -> dict[str, Any]:
    shape = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads}
    return {**_BASE, **shape, "num_key_value_heads": kv, "head_dim": dim, **more}


_SHAPES = {
    "0.6B": _facts(1024, 3072, 16, 8, 128),
    "4B": _facts(2560, 9728, 32, 8, 128),
    "qwen2 0.5B": _facts(896, 4864, 14, 2, 64, model_type="qwen2"),
    "llama 96": _facts(3072, 8192, 32, 8, 96, model_type="llama", tie_word_embeddings=False),
    "30B-A3B": _facts(
        2048,
        6144,
        32,
        4,
        128,
        model_type="qwen3_moe",
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    "mistral window": _facts(4096, 14336, 32, 8, 128, model_type="mistral", sliding_window=300),
}


def checks() -> Iterator[tuple[str, float, float]]:
    for name, facts in _SHAPES.items():
        for lengths in _lengths(name):
            yield from _one(name, block_of(facts), torch.bfloat16, lengths)
    for lengths in ([90], [1, 70, 64]):
        yield from _one("0.6B", block_of(_SHAPES["0.6B"]), torch.float32, lengths)


def _lengths(name: str) -> list[list[int]]:
    """Contexts of the sequences that decode together."""
    few = [[600], [300, 17], [1, 700, 64]]
    if name == "30B-A3B":
        return [[600], [1, 700, 64], [1 + 11 * i % 500 for i in range(256)]]
    if name == "0.6B":
        return [*few, [4000], [32000], [1 + 37 * i % 900 for i in range(16)], [1 + 11 * i % 500 for i in range(256)]]
    return few


def fused_tensors(block: FusedModelSpec, dtype: torch.dtype, spread: float = 0.03) -> dict[str, torch.Tensor]:
    """Random weights under the names of a folder, laid out as a body needs them."""
    sizes = _sizes(block)
    tensors: dict[str, torch.Tensor] = {}
    for names in [*together(block), *([name] for name in sizes)]:
        if names[0] in tensors:
            continue
        flat = torch.randn(sum(sizes[n].numel() for n in names), device=_DEVICE) * spread
        if names[0].endswith("mlp.gate.weight"):
            flat *= 10  # routers that know what they want: rounding changes no choice that matters
        flat = (flat + (1.0 if "norm" in names[0] else 0.0)).to(dtype)
        for name, part in zip(names, flat.split([sizes[n].numel() for n in names]), strict=True):
            tensors[name] = part.view(sizes[name])
    return tensors


def _sizes(block: FusedModelSpec) -> dict[str, torch.Size]:
    return {name: torch.Size(shape) for name, shape in tensor_shapes(block).items()}


def make_body(
    block: FusedModelSpec, tensors: dict[str, torch.Tensor], *, most: int, context: int, slots: int
) -> tuple[FusedModel, AttentionContext]:
    own = AttentionContext(_DEVICE)
    dtype = next(iter(tensors.values())).dtype
    for layer in range(block.layers):
        own.keys[layer], own.values[layer] = (
            torch.zeros(block.kv_heads, slots + 1, block.head_dim, dtype=dtype, device=_DEVICE) for _ in range(2)
        )
    own.table = torch.zeros(most + 1, context, dtype=torch.int32, device=_DEVICE)
    return FusedModel(block, tensors, own, most=most, positions=context), own


@torch.inference_mode()
def _one(
    name: str, block: FusedModelSpec, dtype: torch.dtype, lengths: list[int]
) -> Iterator[tuple[str, float, float]]:
    torch.manual_seed(len(lengths))
    b, longest = len(lengths), max(lengths)
    tensors = fused_tensors(block, dtype)
    body, context = make_body(block, tensors, most=b, context=longest + 8, slots=sum(lengths) + b)
    order = torch.randperm(sum(lengths) + b, device=_DEVICE) + 1
    kept = list(order[: sum(lengths)].split(lengths))
    for row, where in enumerate(kept):
        context.table[row, : len(where)] = where.int()
    ids = [torch.randint(0, block.vocab, (n + 1,), device=_DEVICE) for n in lengths]
    chosen = sorted(range(b), key=lambda i: lengths[i])[:: max(1, b // 6)] if b > 6 else list(range(b))
    tiles = ExtendTiles.build(list(range(b)), lengths, lengths, _DEVICE)
    hidden = body.extend(
        torch.cat([one[:-1] for one in ids]), torch.cat([torch.arange(n, device=_DEVICE) for n in lengths]),
        torch.cat(kept), tiles,
    )  # fmt: skip
    ends = torch.tensor(lengths).cumsum(0).to(_DEVICE) - 1
    first = body.logits(hidden[ends]).log_softmax(-1)
    batch = DecodeBatch(
        torch.arange(b, device=_DEVICE), torch.tensor(lengths, device=_DEVICE) + 1, order[sum(lengths) :],
        torch.full((b,), -1, device=_DEVICE), torch.stack([one[-1] for one in ids]),
    )  # fmt: skip
    second = body.decode(batch).log_softmax(-1)
    again = body.decode(batch).log_softmax(-1)
    what = f"{name}, {str(dtype).removeprefix('torch.')}, batch {b}, up to {longest}"
    if longest > 8000:  # too long for plain attention: two ways to the same number
        return_to = _extended_by_one(body, batch, ids[0], longest, order)
        yield f"{what}: decode against extend", _gap(second[0], return_to), 0.06
        return
    full = ReferenceModel(block, {key: tensor.float() for key, tensor in tensors.items()})
    half = ReferenceModel(block, tensors)
    errors, noise = torch.zeros(2), 1e-4
    for i in chosen:
        wanted = full.logits(ids[i][None])[0, -2:].log_softmax(-1)
        rough = half.logits(ids[i][None])[0, -2:].log_softmax(-1)
        noise = max(noise, _gap(rough, wanted))
        gaps = [_gap(first[i], wanted[0]), _gap(second[i], wanted[1])]
        errors = torch.maximum(errors, torch.tensor(gaps))
    yield f"{what}: extend", errors[0].item() / noise, 2.0
    yield f"{what}: decode", errors[1].item() / noise, 2.0
    yield f"{what}: a step done twice", _gap(again, second), 0.0


def _extended_by_one(
    body: FusedModel, batch: DecodeBatch, ids: torch.Tensor, length: int, order: torch.Tensor
) -> torch.Tensor:
    tiles = ExtendTiles.build([0], [1], [length + 1], _DEVICE)
    hidden = body.extend(ids[-1:], torch.tensor([length], device=_DEVICE), batch.slots[:1], tiles)
    return body.logits(hidden).log_softmax(-1)[0]


def _gap(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return (found - wanted).abs().max().item()
