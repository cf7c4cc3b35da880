"""Runs at the start of every interpreter of the test environment that has SGLang on a CPU build of torch.

torchvision's released wheel is built for CUDA: on a CPU build of torch its compiled operators do not load, and its
import ends at the first of them that torch has never heard of. Declaring those operators without an implementation lets
the import through. torch itself is imported only when torchvision is.
"""

import importlib.abc
import sys

DECLARED = ("nms", "qnms")


class DeclareOperators(importlib.abc.MetaPathFinder):
    """Finds no module; takes the search for torchvision as the moment to declare its operators, once."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for name in DECLARED:
                torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")
        return None


sys.meta_path.insert(0, DeclareOperators())
