"""Compiles Triton kernels for a GPU that need not be present.

Tests compare numbers with Triton's interpreter, which is Python. It accepts code that the compiler rejects, above all
in branches that a launch does not take.
"""

from __future__ import annotations

from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

HOPPER = GPUTarget("cuda", 90, 32)


def compile_launches(monkeypatch: pytest.MonkeyPatch, folders: pytest.TempPathFactory) -> list[str]:
    """Makes kernel launches compile without running. Returns a list that collects the names of compiled kernels.

    Compiled kernels are cached for the other tests of the process.
    """
    names: list[str] = []

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False))
        given |= {name: keywords.pop(name) for name in kernel.arg_names if name in keywords}
        fixed = {p.name: given[p.name] for p in kernel.params if p.is_constexpr or given[p.name] is None}
        signature = {n: "constexpr" if n in fixed else mangle_type(given[n]) for n in kernel.arg_names}
        places = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
        triton.compile(ASTSource(kernel, signature, places), target=HOPPER, options=keywords)
        names.append(kernel.fn.__name__)

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folders.getbasetemp() / "triton"))
    return names
