"""What passes without a backward do otherwise than training: gate and up in one kernel, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import silu

from slime.train.backends.fsdp.fused import kernels, matmul_kernels

_NO_WORSE = 1.01  # times the error of two products and a kernel behind them, which round at the same places


def checks() -> Iterator[tuple[str, float, float]]:
    for rows, width, inner in ((3000, 1024, 3072), (4097, 2048, 6144), (1, 896, 4864), (129, 200, 64)):
        for dtype in (torch.bfloat16, torch.float16):
            yield from _one(rows, width, inner, dtype)


def _one(rows: int, width: int, inner: int, dtype: torch.dtype) -> Iterator[tuple[str, float, float]]:
    torch.manual_seed(0)
    x = torch.randn(rows, width, device="cuda").to(dtype)
    gate, up = (torch.randn(inner, width, device="cuda").mul(width**-0.5).to(dtype) for _ in range(2))
    name = f"{rows} x {width} x {inner}, {str(dtype).removeprefix('torch.')}"
    if not matmul_kernels.takes(x, gate):
        yield f"{name}: this GPU computes them apart", 0.0, 0.0
        return
    wanted = silu(x.double() @ gate.double().T) * (x.double() @ up.double().T)
    ways = (matmul_kernels.product(x, gate, up), kernels.gate(x @ torch.cat((gate, up)).T))
    together, apart = ((found.double() - wanted).abs().max().item() for found in ways)
    yield f"{name}, beside two kernels", together, _NO_WORSE * apart
