"""Expert ids chosen by the engine's routers for each token: `[tokens - 1, layers, experts per token]`.

Invariant: row t belongs to token t, whose forward predicted token t + 1, so the last token has no row. Every layer has
an entry; layers without experts hold zeros, as SGLang reports them. Ids are stored in the narrowest integer type they
fit in, because they are most of the memory of a large model's sample.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slime.storage.json_types import JsonMapping

_NARROW = (np.uint8, np.int16)


@dataclass(frozen=True)
class RouterDimensions:
    """The router dimensions of a model, from its config."""

    num_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    topk: int

    @classmethod
    def of(cls, folder: str | Path) -> RouterDimensions | None:
        """Read a model folder; None if the model has no experts or its config does not specify them."""
        try:
            model = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return cls.from_config(model) if isinstance(model, dict) else None

    @classmethod
    def from_config(cls, model: JsonMapping) -> RouterDimensions | None:
        """Build from a config.json; of a multimodal model the text part is used."""
        facts = {**model, **text} if isinstance(text := model.get("text_config"), dict) else model
        layers = _number(facts, "num_hidden_layers", "num_layers")
        experts = _number(facts, "num_experts", "n_routed_experts", "num_local_experts")
        topk = _number(facts, "num_experts_per_tok")
        if not (layers and experts and topk):
            return None
        return cls(layers, tuple(layer for layer in range(layers) if _has_experts(facts, layer)), experts, topk)

    def mismatch_with(self, experts: np.ndarray) -> str | None:
        """Return the mismatch between a sample's rows and this model as a predicate phrase; None if they match."""
        if experts.shape[1:] != (self.num_layers, self.topk):
            shape = " x ".join(map(str, experts.shape[1:]))
            return f"has {shape} entries per token, expected {self.num_layers} layers x {self.topk} experts"
        if not len(experts):
            return None
        if experts.max() >= self.num_experts:
            return f"contains expert {int(experts.max())}, but the model has {self.num_experts} experts"
        if self.topk == 1:
            return None  # a row of zeros is valid: it selects expert 0
        for layer in self.moe_layers:
            empty = ~experts[:, layer].any(axis=1)
            if empty.any():
                return f"has only zeros for token {int(empty.argmax())} in layer {layer}: it was not recorded"
        return None


def decode_expert_ids(value: object) -> np.ndarray:
    """Decode an engine's expert ids to a flat array of the narrowest type; ValueError for a malformed value.

    The wire form is base64 of int32 bytes.
    """
    if isinstance(value, np.ndarray) and value.dtype in _NARROW:
        return value.reshape(-1)
    if isinstance(value, str):
        return narrow_expert_ids(np.frombuffer(base64.b64decode(value, validate=True), dtype="<i4"))
    return narrow_expert_ids(np.array(value, dtype=np.int64).reshape(-1))


def narrow_expert_ids(ids: np.ndarray) -> np.ndarray:
    """Return the ids in the narrowest integer type they fit in."""
    least, most = (int(ids.min()), int(ids.max())) if ids.size else (0, 0)
    for kind in _NARROW:
        if np.iinfo(kind).min <= least and most <= np.iinfo(kind).max:
            return ids.astype(kind, copy=False)
    return ids


def _number(facts: JsonMapping, *names: str) -> int | None:
    for name in names:
        if isinstance(value := facts.get(name), int) and not isinstance(value, bool):
            return value
    return None


def _has_experts(facts: JsonMapping, layer: int) -> bool:
    """True if a layer has experts, by the config keys that the model families use."""
    kinds, each = facts.get("mlp_layer_types"), facts.get("moe_layer_freq")
    if isinstance(kinds, list) and layer < len(kinds):
        return kinds[layer] == "sparse"
    if isinstance(each, list) and layer < len(each):
        return bool(each[layer])
    if layer < (_number(facts, "first_k_dense_replace") or 0) or layer in (facts.get("mlp_only_layers") or ()):
        return False
    if isinstance(each, int) and each > 1 and layer % each:
        return False
    return (layer + 1) % (_number(facts, "decoder_sparse_step") or 1) == 0
