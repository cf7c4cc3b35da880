"""Address arithmetic of the attention kernels in Triton IR: offsets may exceed 32 bits."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slime.engine.embedded.model import decode_kernels, prefill_kernels

POINTERS = {
    "Q": "bf16",
    "K": "bf16",
    "V": "bf16",
    "O": "bf16",
    "SINKS": "bf16",
    "TABLE": "i32",
    "ROWS": "i64",
    "LENS": "i64",
}
POINTERS |= {f"TILE_{name}": "i32" for name in ("ROW", "QUERY", "COUNT", "POS")}
FLOATS = {"scale", "softcap"}
FIXED = {"G": 1, "GP": 16, "HEADS": 1, "TILE": 64, "D": 32, "DP": 32, "DV": 16, "DVP": 16, "N": 16, "PRECISION": "ieee"}
FIXED |= {"HAS_CAP": False, "HAS_WINDOW": False, "HAS_SINKS": False}


def compile_to_ttir(kernel: Any) -> str:
    """The kernel's TTIR with 32-bit strides, the type that Triton gives to strides below 2^31."""
    names = list(inspect.signature(kernel.fn).parameters)
    fixed = {name: value for name, value in FIXED.items() if name in names}
    kinds = {name: f"*{kind}" for name, kind in POINTERS.items()} | dict.fromkeys(FLOATS, "fp32")
    kinds |= dict.fromkeys(fixed, "constexpr")
    source = ASTSource(kernel, {name: kinds.get(name, "i32") for name in names}, constexprs=fixed)
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"])


@pytest.mark.parametrize("kernel", [decode_kernels._decode_kernel, prefill_kernels._extend_kernel])
def test_head_strides_are_widened_to_64_bits(kernel: Any) -> None:
    """Offsets exceed 2^31, e.g. with 128 heads of 192 for each of 100,000 slots."""
    code = compile_to_ttir(kernel)
    for stride in ("sk_h", "sv_h"):
        assert re.search(rf"extsi %{stride} : i32 to i64", code), f"{stride} is not widened before it is multiplied"
        assert not re.search(rf"muli .*%{stride}\b.* : i32", code)
