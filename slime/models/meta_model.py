"""A model folder as a model without weights, and where each of its weights is to be read from.

Invariant: what the sources give is, bit for bit, what `load_causal_lm` would have loaded: transformers itself loads
the model, from tensors that are not read. What is no weight (buffers) has its values; weights are on the meta device.
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
from slime.models.lazy_tensor import Unread
from slime.models.loading import check_complete, config_of_weights, errors_of, load_causal_lm, load_tensors
from slime.models.tensor_sources import Held, Source, Zeros, read_whole


@dataclass(frozen=True)
class ModelOutline:
    """`sources` has every parameter of the model, a tied one once, under the names of `named_parameters`."""

    model: PreTrainedModel
    sources: dict[str, Source]

    def put_value_head(self) -> None:
        """Make it a value model, whose new output layer is zero."""
        put_value_head(self.model)
        head = output_projection(self.model).weight
        for name, parameter in self.model.named_parameters():
            if parameter is head:
                self.sources[name] = Zeros(tuple(head.shape), head.dtype)


def outline_causal_lm(
    folder: str | Path,
    *,
    dtype: torch.dtype,
    attn_implementation: str,
    trust_remote_code: bool = False,
    weights: Mapping[str, Source] | None = None,
) -> ModelOutline:
    """The model of `folder` as it would be in `dtype`, in eval mode; its weights are not read.

    `weights` are read in the place of the folder's own of the same names.
    """
    how: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn_implementation}
    if _read_by_transformers_alone(folder):
        if weights:
            raise UserError(
                f"the weights in {folder} are quantised, so others cannot take their place: give plain ones"
            )
        whole = load_causal_lm(folder, device="cpu", trust_remote_code=trust_remote_code, **how)
        return _emptied(whole)
    config = config_of_weights(folder, trust_remote_code=trust_remote_code)
    with errors_of(folder):
        unread = {
            name: Unread.of(source) for name, source in {**plain_sources(Path(folder)), **(weights or {})}.items()
        }
        model, report = load_tensors(folder, unread, config=config, trust_remote_code=trust_remote_code, **how)
    check_complete(folder, report)
    return _emptied(model.eval())


def _read_by_transformers_alone(folder: str | Path) -> bool:
    """Quantised in a way that only its own reader knows: every rank reads all of it."""
    config = read_config_json(folder)
    return bool(quantization(config)) and block_size(config) is None


def _emptied(model: PreTrainedModel) -> ModelOutline:
    """Take the numbers out of the parameters; buffers get theirs."""
    sources: dict[str, Source] = {}
    empty: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        sources[name] = parameter.source if isinstance(parameter, Unread) else Held(parameter.detach())
        outline = torch.empty(sources[name].shape, dtype=sources[name].dtype, device="meta")
        empty[parameter] = nn.Parameter(outline, requires_grad=parameter.requires_grad)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, empty[parameter])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if isinstance(buffer, Unread):
                setattr(module, name, read_whole(buffer.source))
    return ModelOutline(model, sources)
