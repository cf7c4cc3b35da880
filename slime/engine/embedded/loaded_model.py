"""A model as the engine holds it: weights under the folder's names, facts of its config, and what ends a response.

Two ways lead to one. A model that the fused kernels compute is read straight from its folder (`PlainFolder`), without
transformers, which takes longer to import than all the rest of a start takes. Every other one is transformers' own
(`through_transformers`), and so is every folder with something unusual or wrong about it: what is wrong is said there.
Invariant: both give the same weights, rounded alike, and the same facts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from slime.engine.embedded.bodies import fused_block
from slime.engine.embedded.fused.families import EMBEDDING, Block, block_of, tensor_shapes, together
from slime.engine.embedded.fused.plain import PlainModel
from slime.engine.embedded.fused.rope import NotFused
from slime.engine.embedded.fused.runner import FusedRunner
from slime.engine.embedded.memory import EngineMemory
from slime.engine.embedded.model.runner import ModelRunner
from slime.engine.embedded.weights.folder import Stored, read_into, stored_in
from slime.engine.embedded.weights.views import FolderViews, OwnNames
from slime.models.folder import SAME_CODE, check_tokenizer_fits, quantization, read_config_json

_END_UNLESS_SAID = {"llama": 2, "mistral": 2}
"""Token ids that transformers takes for a response's end where config.json names none."""


@dataclass(frozen=True)
class LoadedModel:
    weights: nn.Module
    facts: Mapping[str, Any]  # config.json, its part about text
    block: Block | None  # what the fused kernels compute; None: transformers' modules do
    views: FolderViews
    eos_ids: frozenset[int]
    logits: Callable[[torch.Tensor], torch.Tensor]  # `[B, T, V]` of tokens, in plain operations
    runner: Callable[[np.ndarray], ModelRunner]  # for a table of slots


class NamedWeights(nn.Module):
    """Parameters under the names of a model folder, and no code that computes with them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        made: dict[int, nn.Parameter] = {}
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            place: nn.Module = self
            for part in path:
                if part not in place._modules:
                    place.add_module(part, nn.Module())
                place = place.get_submodule(part)
            parameter = made.setdefault(id(tensor), nn.Parameter(tensor, requires_grad=False))
            place.register_parameter(last, parameter)


@dataclass(frozen=True)
class PlainFolder:
    """A folder with a model for the fused kernels, and nothing unusual about it."""

    path: str
    facts: Mapping[str, Any]
    block: Block
    stored: Mapping[str, Stored]

    @classmethod
    def at(cls, path: str, *, trust_remote_code: bool) -> PlainFolder | None:
        """None where transformers has to load the model."""
        facts = read_config_json(path)
        block, stored = _plain_block(facts, trust_remote_code), stored_in(Path(path))
        if block is None or stored is None:
            return None
        if any(name not in stored or stored[name].shape != shape for name, shape in tensor_shapes(block).items()):
            return None
        return cls(path, facts, block, stored)

    def read(self, dtype: torch.dtype, memory: EngineMemory) -> LoadedModel:
        """The model, in memory of the engine."""
        block = self.block
        check_tokenizer_fits(self.path, block.vocab)
        tensors = memory.place(tensor_shapes(block), dtype, together(block))
        read_into(tensors, self.stored)
        if block.tied:
            tensors["lm_head.weight"] = tensors[EMBEDDING]
        weights = NamedWeights(tensors)
        return LoadedModel(
            weights,
            self.facts,
            block,
            OwnNames(weights),
            _eos_ids(self.path, self.facts),
            lambda ids: PlainModel(block, weights.state_dict()).logits(ids),
            lambda table: FusedRunner(weights, block, table),
        )


def _plain_block(facts: Mapping[str, Any], trust_remote_code: bool) -> Block | None:
    """What the fused kernels compute, of a config with nothing else to it."""
    runs_own_code = trust_remote_code and "auto_map" in facts and facts.get("model_type") not in SAME_CODE
    if runs_own_code or quantization(dict(facts)) or "text_config" in facts:
        return None
    if not isinstance(facts.get("max_position_embeddings"), int):
        return None
    try:
        return block_of(facts)
    except (NotFused, KeyError, TypeError, ValueError):
        return None


def _eos_ids(folder: str, facts: Mapping[str, Any]) -> frozenset[int]:
    model_type = str(facts.get("model_type"))
    found = ids_in(facts.get("eos_token_id", _END_UNLESS_SAID.get(model_type)))
    file = Path(folder) / "generation_config.json"
    if file.is_file():
        given = json.loads(file.read_text())
        found |= ids_in(given.get("eos_token_id") if isinstance(given, dict) else None)
    return found


def ids_in(value: object) -> frozenset[int]:
    """Token ids that a config gives as one, as a list, or not at all."""
    if value is None:
        return frozenset()
    return frozenset(value) if isinstance(value, list | tuple) else frozenset({int(value)})  # type: ignore[call-overload]


def through_transformers(
    folder: str,
    *,
    dtype: torch.dtype,
    device: str,
    memory: EngineMemory | None,
    trust_remote_code: bool,
    fused_kernels: bool,
) -> LoadedModel:
    """Any model that transformers loads."""
    from transformers.utils.logging import disable_progress_bar

    from slime.models.loading import load_causal_lm

    disable_progress_bar()
    model = load_causal_lm(
        folder,
        dtype=dtype,
        device="cpu" if memory is not None else device,
        attn_implementation="eager",
        trust_remote_code=trust_remote_code,
    )
    facts = model.config.get_text_config().to_dict()
    block = fused_block(facts, model) if device == "cuda" and fused_kernels else None
    if memory is not None:
        memory.adopt(model, () if block is None else together(block))
        model.to(device)  # what is no parameter
    ends = ids_in(facts.get("eos_token_id")) | ids_in(getattr(model.generation_config, "eos_token_id", None))
    return LoadedModel(
        model,
        facts,
        block,
        FolderViews(model),
        ends,
        lambda ids: model(input_ids=ids, use_cache=False).logits,
        lambda table: ModelRunner(model, table),
    )
