"""Conversion of parameters to tensors of a model folder in pieces: complete, with stacked experts split by rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slime.models import hf_tensor_plan as module
from slime.models.hf_tensor_plan import ConversionPiece, group_by_layer, plan_pieces

EXPERTS = 5


def unstack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Splits a mixture of experts as transformers does: `experts.gate_up` is a stack of gates above ups."""
    found = {}
    for name, tensor in tensors.items():
        prefix, _, kind = name.rpartition(".")
        if kind != "gate_up":
            found[name] = tensor
            continue
        for number, row in enumerate(tensor):
            gate, up = row.chunk(2)
            found |= {f"{prefix}.{number}.gate.weight": gate, f"{prefix}.{number}.up.weight": up}
    return found


def model() -> dict[str, Tensor]:
    layers = {}
    for number in range(2):
        layers[f"layers.{number}.norm"] = torch.randn(4)
        layers[f"layers.{number}.experts.gate_up"] = torch.randn(EXPERTS, 6, 4)
    return {"embed": torch.randn(8, 4), **layers, "head": torch.randn(8, 4)}


def shapes_and_dtypes(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def convert_pieces(pieces: list[ConversionPiece], tensors: dict[str, Tensor], convert: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for piece in pieces:
        own = convert(
            {name: tensors[name][slice(*piece.rows)] if piece.rows else tensors[name] for name in piece.sources}
        )
        for made in piece.makes:
            assert made.name not in found
            assert own[made.made_as].shape == made.shape
            found[made.name] = own[made.made_as]
    return found


@pytest.mark.parametrize(
    ("at_once", "rows"), [(1, [(n, n + 1) for n in range(EXPERTS)]), (2, [(0, 2), (2, 4), (4, 5)])]
)
def test_stacked_experts_are_converted_a_few_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch, at_once: int, rows: list[tuple[int, int]]
) -> None:
    tensors = model()
    monkeypatch.setattr(module, "ROWS_BYTES", at_once * 6 * 4 * 4)
    pieces = plan_pieces(shapes_and_dtypes(tensors), unstack)
    assert [piece.rows for piece in pieces if piece.rows] == rows * 2
    wanted = unstack(tensors)
    found = convert_pieces(pieces, tensors, unstack)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert sum(piece.nbytes for piece in pieces) == sum(tensor.nbytes for tensor in tensors.values())


def test_parameters_fused_into_one_tensor_share_a_piece() -> None:
    def fuse(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {name.replace("old.", ""): t for name, t in tensors.items() if not name.endswith((".q", ".k"))}
        for layer in {name.rpartition(".")[0] for name in tensors if name.endswith((".q", ".k"))}:
            found[f"{layer}.qk"] = torch.cat([tensors[f"{layer}.q"], tensors[f"{layer}.k"]])
        return found

    tensors = {"old.a": torch.randn(3), "layers.0.q": torch.randn(2, 3), "layers.0.k": torch.randn(4, 3)}
    tensors["layers.0.norm"] = torch.randn(3)
    pieces = plan_pieces(shapes_and_dtypes(tensors), fuse)
    assert [piece.sources for piece in pieces] == [("old.a",), ("layers.0.norm",), ("layers.0.q", "layers.0.k")]
    found = convert_pieces(pieces, tensors, fuse)
    assert found.keys() == {"a", "layers.0.norm", "layers.0.qk"}
    assert torch.equal(found["layers.0.qk"], torch.cat([tensors["layers.0.q"], tensors["layers.0.k"]]))


def test_tensors_are_grouped_by_layer_number() -> None:
    names = ["model.embed", "model.layers.1.a", "model.layers.1.b.3.c", "model.layers.2.a", "norm"]
    groups = [list(members) for members in group_by_layer((name, torch.empty(0)) for name in names)]
    assert groups == [names[:1], names[1:3], names[3:4], names[4:]]
