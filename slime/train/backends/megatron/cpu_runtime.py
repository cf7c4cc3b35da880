"""What Megatron-Core asks of CUDA, answered on a CPU.

Invariant: only names inside megatron's modules are touched; torch and all other libraries stay as they are. `prepare`
is called before a model is built on a CPU; calling it again prepares what was imported since and changes nothing else.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

CPU = torch.device("cpu")
_MAKERS = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn")
_TYPE_NAMES = {f"torch.cuda.{kind}Tensor": f"torch.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")}


def prepare() -> None:
    """Make the modules of megatron that are imported by now run where there is no CUDA."""
    from megatron.core import parallel_state  # noqa: F401  (what follows is imported by it or beside it)
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.models.gpt import gpt_model  # noqa: F401
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    random._set_cuda_rng_state = _set_rng_state
    token_dispatcher.maybe_move_tensor_to_cpu = _on_host
    for owner, name in (
        (clip_grads, "clip_grad_by_total_norm_fp32"),
        (optimizer.Float16OptimizerWithFloat16Params, "__init__"),
        (distrib_optimizer.DistributedOptimizer, "__init__"),
        (distrib_optimizer.DistributedOptimizer, "_build_model_and_main_param_groups"),
    ):
        _respell(owner, name, constants=_TYPE_NAMES)
    _respell(LanguageModule, "setup_embeddings_and_output_layer", names={"cuda": "detach"})
    _respell(rope_utils, "get_pos_emb_on_this_cp_rank", names={"cuda": "to"})
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron."):
            _sweep(module)


def _sweep(module: types.ModuleType) -> None:
    """Give one module the stand-in for torch, and its functions back as they were before torch.compile."""
    if vars(module).get("torch") is torch:
        module.__dict__["torch"] = _TORCH
    for name, value in list(vars(module).items()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            for attribute, member in list(vars(value).items()):
                if (plain := _uncompiled(member)) is not None:
                    setattr(value, attribute, plain)
        elif (plain := _uncompiled(value)) is not None:
            module.__dict__[name] = plain


def _uncompiled(value: Any) -> Callable[..., Any] | None:
    """The function that torch.compile was given; None where it was not."""
    return vars(value).get("_torchdynamo_orig_callable") if isinstance(value, types.FunctionType) else None


def _respell(
    owner: Any, name: str, *, constants: Mapping[str, str] | None = None, names: Mapping[str, str] | None = None
) -> None:
    """Let one function of megatron use other constants and other attribute names."""
    found = vars(owner)[name]
    function = found.__func__ if isinstance(found, classmethod | staticmethod) else found
    code = function.__code__
    spelled, called = constants or {}, names or {}

    def constant(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(constant(item) for item in value)
        if isinstance(value, types.CodeType):
            return value.replace(co_consts=tuple(constant(item) for item in value.co_consts))
        return spelled.get(value, value) if isinstance(value, str) else value

    function.__code__ = code.replace(
        co_consts=tuple(constant(value) for value in code.co_consts),
        co_names=tuple(called.get(value, value) for value in code.co_names),
    )


def _set_rng_state(state: torch.Tensor, *_args: Any, **_keywords: Any) -> None:
    torch.set_rng_state(state)


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


class _StandIn(types.ModuleType):
    """A module with some names of its own; all others are those of the module it stands for."""

    def __init__(self, original: types.ModuleType, **own: Any) -> None:
        super().__init__(original.__name__)
        self.__dict__.update(own)
        self.__dict__["_original"] = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


class _Stream:
    """Of a CPU there is one, and everything on it is done when the call returns."""

    def __init__(self, *_args: Any, **_keywords: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _Stream]:
        return lambda *_args, **_keywords: self


def _made_on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, device: Any = None, pin_memory: bool = False, **keywords: Any) -> torch.Tensor:
        return make(*args, device=CPU if str(device).startswith("cuda") else device, **keywords)

    return made


def _nothing(*_args: Any, **_keywords: Any) -> None:
    return None


def _rng_state(*_args: Any, **_keywords: Any) -> torch.Tensor:
    return torch.get_rng_state()


_CUDA = _StandIn(
    torch.cuda,
    current_device=lambda: CPU,
    synchronize=_nothing,
    empty_cache=_nothing,
    manual_seed=torch.manual_seed,
    get_rng_state=_rng_state,
    Stream=_Stream,
    current_stream=_Stream,
    default_stream=_Stream,
    stream=lambda _stream: contextlib.nullcontext(),
    random=_StandIn(torch.cuda.random, get_rng_state=_rng_state),
    nvtx=_StandIn(torch.cuda.nvtx, range_push=_nothing, range_pop=_nothing),
)
_TORCH = _StandIn(torch, cuda=_CUDA, **{name: _made_on_cpu(getattr(torch, name)) for name in _MAKERS})
