"""Builds the model of a folder on the meta device, with a source to read each of its weights from.

Invariant: the numbers of the sources are, bit for bit, those that `load_causal_lm` would have loaded: transformers
itself loads the model, from lazy tensors, and so tells where each weight comes from, which a model made on the meta
device alone (such as by accelerate's `init_empty_weights`) does not. Buffers have their values.

A lazy tensor has a shape, a type and a source, and its numbers are not read yet. Invariant: a torch function applied to
lazy tensors returns a lazy tensor, whose source reads what the function would have computed from the numbers. So code
that fills a model from tensors (transformers' loading, which renames, fuses, transposes and casts them) runs without
reading any of them, and the resulting parameters have the sources of their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from slime.errors import UserError
from slime.models.dequantized import plain_sources
from slime.models.folder import block_size, quantization, read_config_json
from slime.models.heads import output_projection, put_value_head
from slime.models.loading import check_complete, errors_of, load_causal_lm, load_tensors, load_weights_config
from slime.models.tensor_sources import (
    Source,
    cast_source,
    computed_source,
    concatenated_source,
    memory_source,
    narrowed_source,
    read_whole,
    sources_equal,
    stacked_source,
    transposed_source,
    zero_source,
)


@dataclass(frozen=True)
class MetaModel:
    """A model without weights; `sources` has its parameters under the names of `named_parameters`, a tied one once."""

    model: PreTrainedModel
    sources: dict[str, Source]

    def put_value_head(self) -> None:
        """Turn it into a value model, whose new output layer is zero."""
        put_value_head(self.model)
        head = output_projection(self.model).weight
        for name, parameter in self.model.named_parameters():
            if parameter is head:
                self.sources[name] = zero_source(tuple(head.shape), head.dtype)


def load_meta_model(
    folder: str | Path,
    *,
    dtype: torch.dtype,
    attn_implementation: str,
    trust_remote_code: bool = False,
    weights: Mapping[str, Source] | None = None,
) -> MetaModel:
    """Build the model of `folder` in `dtype` and eval mode, without reading its weights.

    `weights` replace the folder's own tensors of the same names.
    """
    how: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn_implementation}
    raw_config = read_config_json(folder)
    if quantization(raw_config) and block_size(raw_config) is None:  # only transformers can read this quantisation
        if weights:
            raise UserError(
                f"the weights in {folder} are quantised and cannot be replaced: use a folder with plain ones"
            )
        whole = load_causal_lm(folder, device="cpu", trust_remote_code=trust_remote_code, **how)
        return _to_meta_model(whole)
    config = load_weights_config(folder, trust_remote_code=trust_remote_code)
    with errors_of(folder):
        unread = {
            name: LazyTensor.of(source) for name, source in {**plain_sources(Path(folder)), **(weights or {})}.items()
        }
        model, report = load_tensors(folder, unread, config=config, trust_remote_code=trust_remote_code, **how)
    check_complete(folder, report)
    return _to_meta_model(model.eval())


def _to_meta_model(model: PreTrainedModel) -> MetaModel:
    """Move the parameters to the meta device and collect their sources; buffers get their numbers."""
    sources: dict[str, Source] = {}
    empty: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        sources[name] = parameter.source if isinstance(parameter, LazyTensor) else memory_source(parameter.detach())
        outline = torch.empty(sources[name].shape, dtype=sources[name].dtype, device="meta")
        empty[parameter] = nn.Parameter(outline, requires_grad=parameter.requires_grad)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, empty[parameter])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if isinstance(buffer, LazyTensor):
                setattr(module, name, read_whole(buffer.source))
    return MetaModel(model, sources)


class LazyTensor(Tensor):
    """A lazy tensor. It reports the host as its device, where its numbers will be."""

    source: Source

    @classmethod
    def of(cls, source: Source) -> LazyTensor:
        made: LazyTensor = _meta_tensor(source).as_subclass(cls)
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
        known = _HANDLERS.get(function)
        result = NotImplemented if known is None else known(*args, **(kwargs or {}))
        return _record_call(function, args, kwargs or {}) if result is NotImplemented else result


def _record_call(function: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Call a function on shapes alone; its result is computed from whole inputs when it is read."""
    with torch._C.DisableTorchFunctionSubclass():
        shapes = tree_map_only(LazyTensor, lambda lazy: _meta_tensor(lazy.source), (args, kwargs))
        result = function(*shapes[0], **shapes[1])
    # copies with the present sources: functions that work in place give the tensors new ones
    inputs = tree_map_only(LazyTensor, lambda lazy: LazyTensor.of(lazy.source), (args, kwargs))

    def compute(index: int | None) -> Tensor:
        inner_args, inner_kwargs = tree_map_only(LazyTensor, lambda lazy: read_whole(lazy.source), inputs)
        with torch.no_grad():
            made = function(*inner_args, **inner_kwargs)
        return made if index is None else made[index]

    if isinstance(result, Tensor):
        made = computed_source(partial(compute, None), tuple(result.shape), result.dtype)
        name = getattr(function, "__name__", "")
        if name.endswith("_") and not name.endswith("__") and isinstance(args[0], LazyTensor):
            args[0].source = made
            return args[0]
        return LazyTensor.of(made)
    if isinstance(result, (tuple, list)) and any(isinstance(part, Tensor) for part in result):
        parts = (
            computed_source(partial(compute, index), tuple(part.shape), part.dtype) for index, part in enumerate(result)
        )
        return type(result)(map(LazyTensor.of, parts))
    return result


def _meta_tensor(source: Source) -> Tensor:
    return torch.empty(source.shape, dtype=source.dtype, device="meta")


def _same_source(tensor: LazyTensor, *_args: object, **_kwargs: object) -> LazyTensor:
    return LazyTensor.of(tensor.source)


def _requires_grad(tensor: LazyTensor, requires_grad: bool = True) -> LazyTensor:
    with torch._C.DisableTorchFunctionSubclass():
        Tensor.requires_grad_(tensor, requires_grad)
    return tensor


def _get_requires_grad(tensor: LazyTensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return bool(tensor.requires_grad)


def _to(tensor: LazyTensor, *args: object, **kwargs: object) -> LazyTensor:
    """Cast to another dtype; a device is ignored, because readers choose it."""
    others = [other for other in (*args, *kwargs.values()) if isinstance(other, Tensor)]
    kinds = [kind for kind in (*args, *kwargs.values()) if isinstance(kind, torch.dtype)]
    kinds += [other.dtype for other in others]
    if not kinds or kinds[0] == tensor.source.dtype:
        return _same_source(tensor)
    return LazyTensor.of(cast_source(tensor.source, kinds[0]))


def _stack(tensors: Sequence[Tensor], dim: int = 0, **kwargs: object) -> object:
    sources = _sources(tensors)
    if kwargs or sources is None or len({(source.shape, source.dtype) for source in sources}) > 1:
        return NotImplemented
    return LazyTensor.of(stacked_source(sources, dim % (len(sources[0].shape) + 1)))


def _cat(tensors: Sequence[Tensor], dim: int = 0, **kwargs: object) -> object:
    sources = _sources(tensors)
    if kwargs or sources is None or len({source.dtype for source in sources}) > 1:
        return NotImplemented
    dim %= len(sources[0].shape)
    if len({source.shape[:dim] + source.shape[dim + 1 :] for source in sources}) > 1:
        return NotImplemented
    return LazyTensor.of(concatenated_source(sources, dim))


def _sources(tensors: Sequence[Tensor]) -> list[Source] | None:
    found = [tensor.source for tensor in tensors if isinstance(tensor, LazyTensor)]
    return found if found and len(found) == len(tensors) else None


def _transpose(tensor: LazyTensor, dim0: int, dim1: int) -> LazyTensor:
    count = len(tensor.source.shape)
    return LazyTensor.of(transposed_source(tensor.source, dim0 % count, dim1 % count))


def _chunk(tensor: LazyTensor, chunks: int, dim: int = 0) -> object:
    size = tensor.source.shape[dim]
    return _split(tensor, -(-size // chunks), dim) if size else NotImplemented


def _split(tensor: LazyTensor, split_size: int | Sequence[int], dim: int = 0) -> object:
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
        parts.append(LazyTensor.of(narrowed_source(tensor.source, dim, begin, length)))
        begin += length
    return tuple(parts)


def _equal(one: Tensor, other: Tensor) -> object:
    if not (isinstance(one, LazyTensor) and isinstance(other, LazyTensor)):
        return NotImplemented
    return sources_equal(one.source, other.source)


def _set_data(tensor: LazyTensor, value: object) -> object:
    if not isinstance(value, LazyTensor):
        return NotImplemented
    tensor.source = value.source
    return None


_HANDLERS: dict[object, Callable[..., object]] = {
    Tensor.__getitem__: lambda tensor, index: _same_source(tensor) if index is Ellipsis else NotImplemented,
    Tensor.to: _to,
    Tensor.detach: _same_source,
    Tensor.requires_grad_: _requires_grad,
    Tensor.requires_grad.__get__: _get_requires_grad,  # type: ignore[attr-defined]
    Tensor.contiguous: _same_source,
    Tensor.clone: _same_source,
    Tensor.cpu: _same_source,
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
