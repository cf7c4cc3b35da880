"""Views of model parameters under the tensor names of the checkpoint folder."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.core_model_loading import revert_weight_conversion

from slime.engine.embedded.weights.parameter_views import FolderViews, NoLayout, _find_part, folder_layout
from tests.train.tiny_training import CONFIGS, SIZES, build_model


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_every_tensor_of_a_folder_is_a_view(kind: str) -> None:
    model = build_model(kind)
    folder = revert_weight_conversion(model, dict(model.state_dict()))
    targets = FolderViews(model).targets(folder.keys())
    assert set(folder_layout(model)) == set(folder)
    own = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    for name, tensor in folder.items():
        assert torch.equal(targets[name], tensor), name
        assert targets[name].untyped_storage().data_ptr() in own, name


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_shapes_are_computed_without_reading_weights(kind: str) -> None:
    """The weights may be released; on CUDA their addresses are then unmapped."""
    model = build_model(kind)
    with ElementCounter() as elements:
        shapes = FolderViews(model).shapes()
    assert elements.looked_at == 0
    assert shapes == {name: list(tensor.shape) for name, tensor in FolderViews(model).readable().items()}


def test_writing_to_an_expert_changes_only_that_expert() -> None:
    model = build_model("qwen3_moe")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    before = {key: tensor.clone() for key, tensor in FolderViews(model).readable().items()}
    FolderViews(model).targets([name])[name].fill_(7.0)
    after = FolderViews(model).readable()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {name, "model.layers.1.mlp.experts.gate_up_proj"}


def test_irregular_part_of_a_tensor_is_rejected() -> None:
    shuffled = torch.arange(6)[torch.tensor([0, 2, 1, 3, 4, 5])].view(2, 3)
    with pytest.raises(NoLayout, match="w is not a regular part of source"):
        _find_part("w", shuffled, "source", torch.arange(6))


class ElementCounter(TorchDispatchMode):
    """Counts the elements that operations read; tensors on the meta device count as zero."""

    looked_at = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            for value in (*args, made):
                self.looked_at += value.numel() if isinstance(value, torch.Tensor) and not value.is_meta else 0
        return made


def test_expert_layout_cost_is_linear_in_the_number_of_experts() -> None:
    costs = []
    for experts in (16, 64):
        model = AutoModelForCausalLM.from_config(
            Qwen3MoeConfig(
                **{**SIZES, "num_hidden_layers": 1}, head_dim=16, num_experts=experts, moe_intermediate_size=32
            )
        )
        with ElementCounter() as elements:
            layout = folder_layout(model)
        assert sum("experts." in name for name in layout) == 3 * experts
        costs.append(elements.looked_at)
    assert costs[1] < 5 * costs[0]
