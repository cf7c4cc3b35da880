"""Lazy tensors: operations are applied when a region is read, to that region only where possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slime.models.families.tp_sharding import Region, whole_region
from slime.models.meta_model import LazyTensor
from slime.models.tensor_sources import DerivedSource, Source, memory_source, read_whole

ONE, TWO = torch.arange(24.0).reshape(4, 6), torch.arange(24.0, 48.0).reshape(4, 6)

Operation = Callable[[Any, Any], Any]
IN_PARTS: dict[str, Operation] = {
    "itself": lambda a, b: a[...].detach().contiguous().clone().cpu(),
    "cast": lambda a, b: a.to(device="cpu", dtype=torch.bfloat16),
    "cast by place": lambda a, b: a.to(torch.int64).to("cpu"),
    "as another": lambda a, b: a.to(b.to(torch.float16)),
    "stacked": lambda a, b: torch.stack([a, b], dim=0),
    "stacked within": lambda a, b: torch.stack((a, b), dim=-1),
    "joined": lambda a, b: torch.cat([a, b]),
    "experts": lambda a, b: torch.cat([torch.stack([a, b]), torch.stack([b, a])], dim=1),
    "transposed": lambda a, b: torch.transpose(a, dim0=0, dim1=1).contiguous(),
    "transposed within": lambda a, b: torch.stack([a, b]).transpose(-1, -2),
    "third chunk": lambda a, b: torch.chunk(a, 3, dim=1)[2],
    "chunk of few": lambda a, b: a.chunk(3)[1],  # 4 rows in three chunks give two chunks
    "split": lambda a, b: torch.split(a, [1, 3], dim=0)[1],
    "split evenly": lambda a, b: a.split(4, dim=-1)[1],
}
AS_A_WHOLE: dict[str, Operation] = {
    "reshaped": lambda a, b: a.reshape(2, 12).transpose(0, 1).reshape(24),
    "computed": lambda a, b: torch.nn.functional.pad(a * 2 + b, (0, 1)),
    "one of several": lambda a, b: torch.unbind(a, dim=1)[3],
    "changed in place": lambda a, b: a.clone().mul_(3).add_(b),
    "stacked of two types": lambda a, b: torch.cat([a, b.to(torch.float64)]),
}


def unread(tensor: Tensor, counts: list[int] | None = None) -> LazyTensor:
    """Make a lazy tensor; `counts` gets the number of elements of each read."""
    plain = memory_source(tensor)

    def read(region: Region) -> Tensor:
        found = plain.read(region)
        if counts is not None:
            counts.append(found.numel())
        return found

    return LazyTensor.of(DerivedSource(plain.shape, plain.dtype, read))


def assert_reads(source: Source, expected: Tensor) -> None:
    assert (source.shape, source.dtype) == (tuple(expected.shape), expected.dtype)
    assert torch.equal(read_whole(source), expected)
    for size in range(expected.shape[0] + 1):
        part = (slice(size // 2, size), *whole_region(expected.shape)[1:])
        assert torch.equal(source.read(part), expected[part])
    inner = tuple(slice(side // 2, side) for side in expected.shape)
    assert torch.equal(source.read(inner), expected[inner])


@pytest.mark.parametrize("name", [*IN_PARTS, *AS_A_WHOLE])
def test_every_region_of_a_lazy_result_matches_eager_torch(name: str) -> None:
    operation = (IN_PARTS | AS_A_WHOLE)[name]
    before = ONE.clone()
    counts: list[int] = []
    result = operation(unread(ONE, counts), unread(TWO, counts))
    expected = operation(ONE, TWO)
    one_element = result.source.read(tuple(slice(0, 1) for _ in expected.shape))
    assert sum(counts) == (1 if name in IN_PARTS else max(sum(counts), ONE.numel()))
    assert one_element.flatten().tolist() == [expected.flatten()[0].item()]
    assert (type(result), result.shape, result.device) == (LazyTensor, expected.shape, torch.device("cpu"))
    assert_reads(result.source, expected)
    assert torch.equal(ONE, before)


def test_lazy_parameter_stays_a_parameter_and_can_be_modified() -> None:
    layer = nn.Linear(6, 4)
    layer.weight = nn.Parameter(unread(ONE), requires_grad=True)
    layer.bias = nn.Parameter(unread(torch.ones(3)), requires_grad=False)
    assert [(name, type(p), p.requires_grad) for name, p in layer.named_parameters()] == [
        ("weight", LazyTensor, True),
        ("bias", LazyTensor, False),
    ]
    layer.bias.data = nn.functional.pad(layer.bias.data, (0, 1))
    layer.weight.data.mul_(2)
    assert_reads(layer.bias.source, torch.tensor([1.0, 1.0, 1.0, 0.0]))
    assert layer.bias.shape == (4,)
    assert_reads(layer.weight.source, ONE * 2)


def test_torch_equal_compares_lazy_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.models.tensor_sources.CHUNK_NUMBERS", 6)
    other = ONE.clone()
    assert torch.equal(unread(ONE), unread(other))
    other[3, 5] += 1
    assert not torch.equal(unread(ONE), unread(other))
    assert not torch.equal(unread(ONE), unread(ONE[:2]))
    assert torch.equal(unread(torch.tensor(1.0)), unread(torch.tensor(1.0)))
