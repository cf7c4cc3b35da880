"""Which experts the engine's routers chose, token by token: `[tokens - 1, layers, experts per token]`.

Invariant: row t is of token t, whose forward predicted token t + 1, so the last token has none. All layers have a
place; those without experts hold zeros there, as SGLang answers. Ids are kept in the narrowest type they fit in: they
are most of what a sample of a large model weighs.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_NARROW = (np.uint8, np.int16)


@dataclass(frozen=True)
class RoutedModel:
    """What a model's config says about its routers."""

    num_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    topk: int

    @classmethod
    def of(cls, folder: str | Path) -> RoutedModel | None:
        """Of the model in a folder; None where it has no experts, or does not say."""
        try:
            model = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return cls.from_config(model) if isinstance(model, dict) else None

    @classmethod
    def from_config(cls, model: Mapping[str, Any]) -> RoutedModel | None:
        """Of a config.json; of a multimodal model the part about text."""
        facts = {**model, **text} if isinstance(text := model.get("text_config"), dict) else model
        layers = _number(facts, "num_hidden_layers", "num_layers")
        experts = _number(facts, "num_experts", "n_routed_experts", "num_local_experts")
        topk = _number(facts, "num_experts_per_tok")
        if not (layers and experts and topk):
            return None
        return cls(layers, tuple(layer for layer in range(layers) if _has_experts(facts, layer)), experts, topk)

    def wrong_with(self, experts: np.ndarray) -> str | None:
        """What is wrong with the rows of a sample of this model, in half a sentence."""
        if experts.shape[1:] != (self.num_layers, self.topk):
            shape = " x ".join(map(str, experts.shape[1:]))
            return f"has {shape} entries a token, not {self.num_layers} layers x {self.topk} experts"
        if not len(experts):
            return None
        if experts.max() >= self.num_experts:
            return f"names expert {int(experts.max())}, and there are {self.num_experts}"
        if self.topk == 1:
            return None  # expert 0 is a choice then
        for layer in self.moe_layers:
            empty = ~experts[:, layer].any(axis=1)
            if empty.any():
                return f"has nothing but zeros for token {int(empty.argmax())} in layer {layer}: it was not recorded"
        return None


def flat_experts(value: Any) -> np.ndarray:
    """The ids of an answer, in the narrowest type; the wire form is base64 of int32 bytes. ValueError if it is not."""
    if isinstance(value, np.ndarray) and value.dtype in _NARROW:
        return value.reshape(-1)
    if isinstance(value, str):
        return narrowed(np.frombuffer(base64.b64decode(value, validate=True), dtype="<i4"))
    return narrowed(np.array(value, dtype=np.int64).reshape(-1))


def narrowed(ids: np.ndarray) -> np.ndarray:
    """The same ids in the narrowest type they fit in."""
    least, most = (int(ids.min()), int(ids.max())) if ids.size else (0, 0)
    for kind in _NARROW:
        if np.iinfo(kind).min <= least and most <= np.iinfo(kind).max:
            return ids.astype(kind, copy=False)
    return ids


def _number(facts: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        if isinstance(value := facts.get(name), int) and not isinstance(value, bool):
            return value
    return None


def _has_experts(facts: Mapping[str, Any], layer: int) -> bool:
    """Under the names that the families say it by."""
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
