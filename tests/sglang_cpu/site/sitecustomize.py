"""Runs at the start of every interpreter of the test environment that has SGLang on a CPU build of torch.

Two released wheels expect compiled operators that a CPU build of torch does not load:

- torchvision's wheel is built for CUDA, and its import fails at the first operator that torch does not know. Declaring
  those operators without an implementation lets the import succeed.
- SGLang's server calls two operators of sgl_kernel when it starts on aarch64 (and on x86 with AMX, if it finds the rest
  of that package): one binds OpenMP threads to cores, one prepares an all-reduce between ranks. For one rank without
  thread binding, both can be no-ops.

torch itself is imported only when the module that needs the operators is.
"""

import importlib.abc
import sys


def declare_vision() -> None:
    import torch

    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")


def declare_threads() -> None:
    import torch

    torch.library.define("sgl_kernel::init_cpu_threads_env", "(str cores) -> str")
    torch.library.impl("sgl_kernel::init_cpu_threads_env", "default", lambda cores: "")
    torch.library.define("sgl_kernel::initialize", "(int size, int rank) -> ()")
    torch.library.impl("sgl_kernel::initialize", "default", lambda size, rank: None)


NEEDED_BY = {"torchvision": declare_vision, "sglang.srt.distributed.bootstrap": declare_threads}


class DeclareOperators(importlib.abc.MetaPathFinder):
    """Import hook that finds no module but declares operators, once, before a module that needs them is imported."""

    def find_spec(self, fullname, path=None, target=None):
        declare = NEEDED_BY.pop(fullname, None)
        if declare is not None:
            declare()
        return None


sys.meta_path.insert(0, DeclareOperators())
