"""Tensors that nobody has read yet: they have a shape and a type, and know where their numbers are to come from.

Invariant: whatever torch function is applied to them gives another such tensor, whose source reads what the function
would have made of the numbers. So code that fills a model from tensors (transformers' loading, with all it renames,
fuses, transposes and casts on the way) can be run without reading one of them, and says afterwards where each weight of
the model comes from.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slime.models.tensor_sources import (
    Cast,
    Computed,
    Cut,
    Joined,
    Source,
    Stacked,
    Swapped,
    read_whole,
    same_numbers,
)


class Unread(Tensor):
    """Says that it is on the host, where its numbers will be."""

    source: Source

    @classmethod
    def of(cls, source: Source) -> Unread:
        made: Unread = torch.empty(source.shape, dtype=source.dtype, device="meta").as_subclass(cls)
        made.source = source
        return made

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = _KNOWN.get(function)
        result = NotImplemented if known is None else known(*args, **(kwargs or {}))
        return _record(function, args, kwargs or {}) if result is NotImplemented else result


def _record(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call it on shapes alone; tensors that come out are computed from whole inputs when they are read."""
    with torch._C.DisableTorchFunctionSubclass():
        result = function(*_replaced(args, _empty), **_replaced(kwargs, _empty))
    inputs = _replaced((args, kwargs), lambda unread: unread.source)  # as they are now: some functions change one

    def compute(index: int | None) -> Tensor:
        inner_args, inner_kwargs = _read_inputs(inputs)
        with torch.no_grad():
            made = function(*inner_args, **inner_kwargs)
        return made if index is None else made[index]

    if isinstance(result, Tensor):
        made = Computed(partial(compute, None), tuple(result.shape), result.dtype)
        name = getattr(function, "__name__", "")
        if name.endswith("_") and not name.endswith("__") and isinstance(args[0], Unread):
            args[0].source = made
            return args[0]
        return Unread.of(made)
    if isinstance(result, (tuple, list)) and any(isinstance(part, Tensor) for part in result):
        parts = (Computed(partial(compute, index), tuple(part.shape), part.dtype) for index, part in enumerate(result))
        return type(result)(map(Unread.of, parts))
    return result


def _empty(unread: Unread) -> Tensor:
    return torch.empty(tuple(unread.source.shape), dtype=unread.source.dtype, device="meta")


def _replaced(value: Any, replace: Callable[[Unread], Any]) -> Any:
    match value:
        case Unread():
            return replace(value)
        case list() | tuple():
            return type(value)([_replaced(part, replace) for part in value])
        case dict():
            return {key: _replaced(part, replace) for key, part in value.items()}
    return value


def _read_inputs(value: Any) -> Any:
    match value:
        case list() | tuple():
            return type(value)([_read_inputs(part) for part in value])
        case dict():
            return {key: _read_inputs(part) for key, part in value.items()}
        case Tensor() | str() | int() | float() | None:
            return value
    return read_whole(value) if hasattr(value, "read") else value


def _same(tensor: Unread, *_args: Any, **_kwargs: Any) -> Unread:
    return Unread.of(tensor.source)


def _itself(tensor: Unread, *_args: Any, **_kwargs: Any) -> Unread:
    return tensor


def _requires_grad(tensor: Unread, requires_grad: bool = True) -> Unread:
    with torch._C.DisableTorchFunctionSubclass():
        Tensor.requires_grad_(tensor, requires_grad)
    return tensor


def _is_trained(tensor: Unread) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return bool(tensor.requires_grad)


def _getitem(tensor: Unread, index: Any) -> Any:
    return _same(tensor) if index is Ellipsis else NotImplemented


def _to(tensor: Unread, *args: Any, **kwargs: Any) -> Any:
    """Another type; the device is that of whoever reads."""
    others = [other for other in (*args, *kwargs.values()) if isinstance(other, Tensor)]
    kinds = [kind for kind in (*args, *kwargs.values()) if isinstance(kind, torch.dtype)]
    kinds += [other.dtype for other in others]
    if not kinds or kinds[0] == tensor.source.dtype:
        return _same(tensor)
    return Unread.of(Cast(tensor.source, kinds[0]))


def _stack(tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    sources = _sources(tensors)
    if kwargs or sources is None or len({(source.shape, source.dtype) for source in sources}) > 1:
        return NotImplemented
    return Unread.of(Stacked(sources, dim % (len(sources[0].shape) + 1)))


def _cat(tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    sources = _sources(tensors)
    if kwargs or sources is None or len({source.dtype for source in sources}) > 1:
        return NotImplemented
    dim %= len(sources[0].shape)
    if len({source.shape[:dim] + source.shape[dim + 1 :] for source in sources}) > 1:
        return NotImplemented
    return Unread.of(Joined(sources, dim))


def _sources(tensors: Any) -> list[Source] | None:
    found = [tensor.source for tensor in tensors if isinstance(tensor, Unread)]
    return found if found and len(found) == len(tensors) else None


def _transpose(tensor: Unread, dim0: int, dim1: int) -> Unread:
    count = len(tensor.source.shape)
    return Unread.of(Swapped(tensor.source, dim0 % count, dim1 % count))


def _chunk(tensor: Unread, chunks: int, dim: int = 0) -> Any:
    size = tensor.source.shape[dim]
    return _split(tensor, -(-size // chunks), dim) if size else NotImplemented


def _split(tensor: Unread, split_size: Any, dim: int = 0) -> Any:
    """`split_size`: of each part, or the sizes of all."""
    dim %= len(tensor.source.shape)
    size, parts, begin = tensor.source.shape[dim], [], 0
    if isinstance(split_size, int):
        if split_size <= 0:
            return NotImplemented
        split_size = [min(split_size, size - start) for start in range(0, size, split_size)]
    if sum(split_size) != size:
        return NotImplemented
    for length in split_size:
        parts.append(Unread.of(Cut(tensor.source, dim, begin, length)))
        begin += length
    return tuple(parts)


def _equal(one: Tensor, other: Tensor) -> Any:
    if not (isinstance(one, Unread) and isinstance(other, Unread)):
        return NotImplemented
    return same_numbers(one.source, other.source)


def _set_data(tensor: Unread, value: Any) -> Any:
    if not isinstance(value, Unread):
        return NotImplemented
    tensor.source = value.source
    return None


_KNOWN: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _getitem,
    Tensor.to: _to,
    Tensor.detach: _same,
    Tensor.requires_grad_: _requires_grad,
    Tensor.requires_grad.__get__: _is_trained,  # type: ignore[attr-defined]
    Tensor.contiguous: _same,
    Tensor.clone: _same,
    Tensor.cpu: _same,
    Tensor.data.__get__: _itself,  # type: ignore[attr-defined]
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.device.__get__: lambda _tensor: torch.device("cpu"),
    Tensor.is_meta.__get__: lambda _tensor: False,  # type: ignore[attr-defined]
    torch.stack: _stack,
    torch.cat: _cat,
    torch.concat: _cat,
    torch.transpose: _transpose,
    Tensor.transpose: _transpose,
    torch.chunk: _chunk,
    Tensor.chunk: _chunk,
    torch.split: _split,
    Tensor.split: _split,
    torch.equal: _equal,
    Tensor.equal: _equal,
}
