"""Builds the model of a folder on the meta device, with a source to read each of its weights from.

Invariant: the numbers of the sources are, bit for bit, those that `load_causal_lm` would have loaded: transformers
itself loads the model, from lazy tensors, and so tells where each weight comes from, which a model made on the meta
device alone (such as by accelerate's `init_empty_weights`) does not. Buffers have their values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from slime.errors import UserError
from slime.models.dequantized import plain_sources
from slime.models.folder import block_size, quantization, read_config_json
from slime.models.heads import output_projection, put_value_head
from slime.models.lazy_tensor import LazyTensor
from slime.models.loading import check_complete, errors_of, load_causal_lm, load_tensors, load_weights_config
from slime.models.tensor_sources import Source, memory_source, read_whole, zero_source


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
