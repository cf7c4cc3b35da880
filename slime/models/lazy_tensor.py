"""Lazy tensors: they have a shape, a type and a source, and their numbers are not read yet.

Invariant: a torch function applied to lazy tensors returns a lazy tensor, whose source reads what the function would
have computed from the numbers. So code that fills a model from tensors (transformers' loading, which renames, fuses,
transposes and casts them) runs without reading any of them, and the resulting parameters have the sources of their
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """A lazy tensor. It reports the host as its device, where its numbers will be."""

    source: Source

    @classmethod
    def of(cls, source: Source) -> Unread:
        made: Unread = torch.empty(source.shape, dtype=source.dtype, device="meta").as_subclass(cls)
        made.source = source
        return made

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        known = _KNOWN.get(function)
        result = NotImplemented if known is None else known(*args, **(kwargs or {}))
        return _record(function, args, kwargs or {}) if result is NotImplemented else result


def _record(function: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Call a function on shapes alone; its result is computed from whole inputs when it is read."""
    with torch._C.DisableTorchFunctionSubclass():
        result = function(*_replaced(args, _empty), **_replaced(kwargs, _empty))
    inputs = _replaced((args, kwargs), lambda unread: unread.source)  # the present sources: in-place functions set new

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


def _replaced(value: Any, replace: Callable[[Unread], object]) -> Any:
    """Replace the lazy tensors in nested arguments."""
    match value:
        case Unread():
            return replace(value)
        case list() | tuple():
            return type(value)([_replaced(part, replace) for part in value])
        case dict():
            return {key: _replaced(part, replace) for key, part in value.items()}
    return value


def _read_inputs(value: Any) -> Any:
    """Read the sources in nested arguments."""
    match value:
        case list() | tuple():
            return type(value)([_read_inputs(part) for part in value])
        case dict():
            return {key: _read_inputs(part) for key, part in value.items()}
        case Tensor() | str() | int() | float() | None:
            return value
    return read_whole(value) if hasattr(value, "read") else value


def _same(tensor: Unread, *_args: object, **_kwargs: object) -> Unread:
    return Unread.of(tensor.source)


def _requires_grad(tensor: Unread, requires_grad: bool = True) -> Unread:
    with torch._C.DisableTorchFunctionSubclass():
        Tensor.requires_grad_(tensor, requires_grad)
    return tensor


def _is_trained(tensor: Unread) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return bool(tensor.requires_grad)


def _to(tensor: Unread, *args: object, **kwargs: object) -> Unread:
    """Cast to another dtype; a device is ignored, because readers choose it."""
    others = [other for other in (*args, *kwargs.values()) if isinstance(other, Tensor)]
    kinds = [kind for kind in (*args, *kwargs.values()) if isinstance(kind, torch.dtype)]
    kinds += [other.dtype for other in others]
    if not kinds or kinds[0] == tensor.source.dtype:
        return _same(tensor)
    return Unread.of(Cast(tensor.source, kinds[0]))


def _stack(tensors: Sequence[Tensor], dim: int = 0, **kwargs: object) -> object:
    sources = _sources(tensors)
    if kwargs or sources is None or len({(source.shape, source.dtype) for source in sources}) > 1:
        return NotImplemented
    return Unread.of(Stacked(sources, dim % (len(sources[0].shape) + 1)))


def _cat(tensors: Sequence[Tensor], dim: int = 0, **kwargs: object) -> object:
    sources = _sources(tensors)
    if kwargs or sources is None or len({source.dtype for source in sources}) > 1:
        return NotImplemented
    dim %= len(sources[0].shape)
    if len({source.shape[:dim] + source.shape[dim + 1 :] for source in sources}) > 1:
        return NotImplemented
    return Unread.of(Joined(sources, dim))


def _sources(tensors: Sequence[Tensor]) -> list[Source] | None:
    """The sources of tensors that are all lazy; else None."""
    found = [tensor.source for tensor in tensors if isinstance(tensor, Unread)]
    return found if found and len(found) == len(tensors) else None


def _transpose(tensor: Unread, dim0: int, dim1: int) -> Unread:
    count = len(tensor.source.shape)
    return Unread.of(Swapped(tensor.source, dim0 % count, dim1 % count))


def _chunk(tensor: Unread, chunks: int, dim: int = 0) -> object:
    size = tensor.source.shape[dim]
    return _split(tensor, -(-size // chunks), dim) if size else NotImplemented


def _split(tensor: Unread, split_size: int | Sequence[int], dim: int = 0) -> object:
    """Split along `dim`; `split_size` is the size of each part, or the sizes of all parts."""
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


def _equal(one: Tensor, other: Tensor) -> object:
    if not (isinstance(one, Unread) and isinstance(other, Unread)):
        return NotImplemented
    return same_numbers(one.source, other.source)


def _set_data(tensor: Unread, value: object) -> object:
    if not isinstance(value, Unread):
        return NotImplemented
    tensor.source = value.source
    return None


_KNOWN: dict[object, Callable[..., object]] = {
    Tensor.__getitem__: lambda tensor, index: _same(tensor) if index is Ellipsis else NotImplemented,
    Tensor.to: _to,
    Tensor.detach: _same,
    Tensor.requires_grad_: _requires_grad,
    Tensor.requires_grad.__get__: _is_trained,  # type: ignore[attr-defined]
    Tensor.contiguous: _same,
    Tensor.clone: _same,
    Tensor.cpu: _same,
    Tensor.data.__get__: lambda tensor, *_args, **_kwargs: tensor,  # type: ignore[attr-defined]
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
