"""Runs programs with Triton's interpreter, which executes kernels in Python without a GPU.

The interpreter replaces the functions of `triton.language` at every call of a kernel, and of every function that a kernel
calls. It looks for them among all members of the module each time, which takes half of the time; here their names are
looked up once.
"""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
from typing import Any


def run_interpreted(program: str, *arguments: str, timeout: float = 300) -> str:
    """Run a program whose kernels are interpreted, in a process of its own; return its output."""
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            f"import {__name__} as t; t.speed_up_interpreter()\n{program}",
            *arguments,
        ],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def speed_up_interpreter() -> None:
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @functools.cache
    def builtins_of(module: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(module) if is_builtin(member)]

    def patch(module: Any, builder: Any, scope: Any) -> None:
        names = builtins_of(module)
        if names and is_builtin(getattr(module, names[0])):  # otherwise the calling kernel has replaced all of them
            for name in names:
                interpreter._patch_attr(module, name, getattr(module, name), builder, scope)

    assert interpreter._patch_builtin is not None
    interpreter._patch_builtin = patch
