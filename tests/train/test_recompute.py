"""Tests `--recompute-activations`: equal gradients, one more run per layer, only layer inputs stored."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, MixtralConfig, PretrainedConfig, Qwen3Config

from slime.config.initial_weights import InitialWeights
from slime.errors import UserError
from slime.train.backends.fsdp.backend import recompute_layers
from slime.train.backends.fsdp.builder import FSDPBuilder
from slime.train.backends.fsdp.sharding import local_part
from slime.train.samples.micro_batch import LossOutcome, MicroBatch
from slime.train.samples.packing import pack
from slime.train.timers import RankProgress
from tests.train.in_process import config_for, one_rank
from tests.train.tiny_training import CONFIGS, SIZES, build_model

Folder = Callable[[str], Path]


def make_folder(config: PretrainedConfig, path: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").save_pretrained(path)
    return path


def make_backend(folder: Path, out: Path, *, recompute: bool, critic: bool = False) -> Any:
    config = config_for(folder, out, recompute_activations=recompute)
    builder = FSDPBuilder(config, one_rank(), compute_dtype=torch.float32, progress=RankProgress())
    return (builder.critic if critic else builder.policy)(config, InitialWeights())


def micro_batch(*lengths: int) -> MicroBatch:
    generator = np.random.default_rng(0)
    row = pack([generator.integers(0, 128, length) for length in lengths], [length // 2 for length in lengths])
    ones = torch.ones(len(row.targets))
    return MicroBatch(row, list(range(len(lengths))), ones, ones, ones, 1.0)


def likelihood(micro: MicroBatch, values: Tensor, _entropy: Tensor) -> LossOutcome:
    return LossOutcome((values * micro.weights).sum())


def gradients(backend: Any, *micro_batches: MicroBatch) -> list[Tensor]:
    parameters = list(backend.module.parameters())
    backend.forward_backward(micro_batches, likelihood)
    return [local_part(parameter.grad) for parameter in parameters]


@pytest.mark.parametrize("kind", [*CONFIGS, "critic", "noisy router"])
def test_recompute_gradients_are_bitwise_equal(kind: str, model_folder: Folder, tmp_path: Path) -> None:
    if kind == "noisy router":  # the noise applies only in training mode, which no part of a layer is in
        noisy = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.5)
        folder = make_folder(noisy, tmp_path / "noisy")
    else:
        folder = model_folder("qwen3" if kind == "critic" else kind)
    found = []
    for recompute in (False, True):
        backend = make_backend(folder, tmp_path, recompute=recompute, critic=kind == "critic")
        found.append(gradients(backend, micro_batch(9, 14, 7), micro_batch(12)))
    assert any(bool(gradient.any()) for gradient in found[0])
    assert all(torch.equal(plain, again) for plain, again in zip(*found, strict=True))


def test_recompute_runs_each_layer_once_more(model_folder: Folder, tmp_path: Path) -> None:
    backend = make_backend(model_folder("qwen3"), tmp_path, recompute=True)
    body, runs = backend.module.model.model, Counter[str]()

    def count(name: str) -> Callable[..., None]:
        return lambda *_: runs.update([name])

    for index, layer in enumerate(body.layers):
        layer.mlp.register_forward_pre_hook(count(f"layer {index}"))
    body.norm.register_forward_pre_hook(count("norm"))
    body.embed_tokens.register_forward_pre_hook(count("embedding"))
    gradients(backend, micro_batch(9, 14), micro_batch(5))
    assert runs == {"layer 0": 4, "layer 1": 4, "norm": 2, "embedding": 2}
    assert not any(part.training for layer in body.layers for part in layer.modules() if part is not layer)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors created inside the context that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self._known:
                self._known.add(storage)
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._gone, storage.nbytes())
        return made

    def _gone(self, size: int) -> None:
        self.bytes -= size


def kept_per_token(folder: Path, out: Path, *, recompute: bool) -> float:
    """Return the bytes per token of a row stored between forward and backward."""
    backend = make_backend(folder, out, recompute=recompute)
    backend.forward_backward([micro_batch(8)], likelihood)  # allocates one-time tensors
    found = []
    for length in (16, 48):
        with LiveBytes() as living:

            def objective(
                micro: MicroBatch, values: Tensor, entropy: Tensor, living: LiveBytes = living
            ) -> LossOutcome:
                found.append(living.bytes)
                return likelihood(micro, values, entropy)

            backend.forward_backward([micro_batch(length)], objective)
    return (found[1] - found[0]) / 32


def test_recomputed_layer_stores_only_its_input(tmp_path: Path) -> None:
    kept = {}
    for layers in (2, 6):
        sizes = {**SIZES, "num_hidden_layers": layers}
        folder = make_folder(Qwen3Config(**sizes, head_dim=16), tmp_path / str(layers))
        for recompute in (False, True):
            kept[layers, recompute] = kept_per_token(folder, tmp_path, recompute=recompute)
    of_a_layer = {again: (kept[6, again] - kept[2, again]) / 4 for again in (False, True)}
    assert of_a_layer[True] == SIZES["hidden_size"] * 4
    assert of_a_layer[False] > 10 * of_a_layer[True]


def test_rejects_recompute_without_checkpointing_support() -> None:
    model = build_model("llama")
    model.supports_gradient_checkpointing = False
    with pytest.raises(UserError, match="LlamaForCausalLM cannot recompute activations: leave out --recompute-act"):
        recompute_layers(model)
