"""Patches for Megatron-Core that replace its calls of CUDA, so that it runs on a CPU.

Invariant: only names inside megatron's modules are changed; torch and all other libraries stay as they are. `prepare`
is called before a model is built on a CPU. Another call patches the modules imported since and changes nothing else.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Mapping

import torch

CPU = torch.device("cpu")
_FACTORY_FUNCTIONS = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn")
_CPU_TENSOR_TYPES = {f"torch.cuda.{kind}Tensor": f"torch.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")}


def prepare() -> None:
    """Patch all imported modules of megatron to run without CUDA."""
    from megatron.core import parallel_state  # noqa: F401  (imported for the patches below)
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.models.gpt import gpt_model  # noqa: F401
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    random._set_cuda_rng_state = lambda state, *_args, **_keywords: torch.set_rng_state(state)
    token_dispatcher.maybe_move_tensor_to_cpu = _to_host
    for owner, name in (
        (clip_grads, "clip_grad_by_total_norm_fp32"),
        (optimizer.Float16OptimizerWithFloat16Params, "__init__"),
        (distrib_optimizer.DistributedOptimizer, "__init__"),
        (distrib_optimizer.DistributedOptimizer, "_build_model_and_main_param_groups"),
    ):
        _patch_code(owner, name, constants=_CPU_TENSOR_TYPES)
    _patch_code(LanguageModule, "setup_embeddings_and_output_layer", names={"cuda": "detach"})
    _patch_code(rope_utils, "get_pos_emb_on_this_cp_rank", names={"cuda": "to"})
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron."):
            _patch_module(module)


def _patch_module(module: types.ModuleType) -> None:
    """Replace torch in one module by `_TORCH`, and compiled functions by the originals from before torch.compile."""
    if vars(module).get("torch") is torch:
        module.__dict__["torch"] = _TORCH
    for name, value in list(vars(module).items()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            for attribute, member in list(vars(value).items()):
                if (plain := _original_function(member)) is not None:
                    setattr(value, attribute, plain)
        elif (plain := _original_function(value)) is not None:
            module.__dict__[name] = plain


def _original_function(value: object) -> Callable[..., object] | None:
    """Return the original of a function that torch.compile wrapped, or None for anything else."""
    return vars(value).get("_torchdynamo_orig_callable") if isinstance(value, types.FunctionType) else None


def _patch_code(
    owner: type | types.ModuleType,
    name: str,
    *,
    constants: Mapping[str, str] | None = None,
    names: Mapping[str, str] | None = None,
) -> None:
    """Replace string constants and attribute names in the code of one function of megatron."""
    found = vars(owner)[name]
    function = found.__func__ if isinstance(found, classmethod | staticmethod) else found
    code = function.__code__
    spelled, called = constants or {}, names or {}

    def constant(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(constant(item) for item in value)
        if isinstance(value, types.CodeType):
            return value.replace(co_consts=tuple(constant(item) for item in value.co_consts))
        return spelled.get(value, value) if isinstance(value, str) else value

    function.__code__ = code.replace(
        co_consts=tuple(constant(value) for value in code.co_consts),
        co_names=tuple(called.get(value, value) for value in code.co_names),
    )


def _to_host(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


class _StandIn(types.ModuleType):
    """A module that overrides some names of another module and forwards all others to it."""

    def __init__(self, original: types.ModuleType, **own: object) -> None:
        super().__init__(original.__name__)
        self.__dict__.update(own)
        self.__dict__["_original"] = original

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["_original"], name)


class _CpuStream:
    """A stream of the CPU, where every operation is complete when its call returns; its methods do nothing."""

    def __init__(self, *_args: object, **_keywords: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _CpuStream]:
        return lambda *_args, **_keywords: self


def _create_on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap one of torch's factory functions to create tensors on the CPU instead of CUDA."""

    def made(*args: object, device: object = None, pin_memory: bool = False, **keywords: object) -> torch.Tensor:
        return make(*args, device=CPU if str(device).startswith("cuda") else device, **keywords)

    return made


def _no_op(*_args: object, **_keywords: object) -> None:
    return None


def _rng_state(*_args: object, **_keywords: object) -> torch.Tensor:
    return torch.get_rng_state()


_CUDA = _StandIn(
    torch.cuda,
    current_device=lambda: CPU,
    synchronize=_no_op,
    empty_cache=_no_op,
    manual_seed=torch.manual_seed,
    get_rng_state=_rng_state,
    Stream=_CpuStream,
    current_stream=_CpuStream,
    default_stream=_CpuStream,
    stream=lambda _stream: contextlib.nullcontext(),
    random=_StandIn(torch.cuda.random, get_rng_state=_rng_state),
    nvtx=_StandIn(torch.cuda.nvtx, range_push=_no_op, range_pop=_no_op),
)
_TORCH = _StandIn(torch, cuda=_CUDA, **{name: _create_on_cpu(getattr(torch, name)) for name in _FACTORY_FUNCTIONS})
