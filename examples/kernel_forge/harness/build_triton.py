"""Compiles kernel.py for a GPU, ahead of time and without one: kernel.cubin, and in kernel.json how to launch it.

    python -I -S build_triton.py '{"site": ..., "arch": 90, "sizes": [[n, m], ...]}'

It runs the text that a model wrote, so nothing that it leaves behind is believed: a cubin is a program for the GPU like
any other, and numbers are checked by who reads them. What is wrong with a text is the last line of the error stream.
"""

from __future__ import annotations

import importlib
import json
import sys

SIGNATURE = {"n": "i32", "m": "i32", "a": "fp32", "b": "fp32", "x": "*fp32", "w": "*fp32", "y": "*fp32"}


def main() -> None:
    asked = json.loads(sys.argv[1])
    sys.path[:0] = [".", asked["site"]]
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    text = importlib.import_module("kernel")
    built = triton.compile(ASTSource(text.kernel, SIGNATURE), target=GPUTarget("cuda", asked["arch"], 32))
    launch = {
        "name": built.metadata.name,
        "shared": built.metadata.shared,
        "threads": built.metadata.num_warps * 32,
        "scratch": built.metadata.global_scratch_size + built.metadata.profile_scratch_size,
        "grids": [[*text.GRID(n, m), 1, 1][:3] for n, m in asked["sizes"]],
    }
    with open("kernel.cubin", "wb") as file:
        file.write(built.asm["cubin"])
    with open("kernel.json", "w") as file:
        json.dump(launch, file)


if __name__ == "__main__":
    main()
