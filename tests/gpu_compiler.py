"""Triton's compiler for a GPU that need not be there.

The interpreter, with which tests compare numbers, is Python: what it takes a compiler may not, above all a branch that a
launch does not need.
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
    """Make launches compile and run nothing; the names of those that did are added to the list returned.

    What is compiled is kept for the other tests of the process.
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
