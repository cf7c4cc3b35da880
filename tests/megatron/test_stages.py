"""Stages of a model: parameter names, tensor-parallel marks, the value head, and the CPU stand-in for CUDA."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

from slime.train.backends.megatron.layout import Layout
from tests.family_models import make_family_folder
from tests.megatron.ranks import model_parallel
from tests.megatron.small import build, megatron_sizes


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_family_folder(tmp_path_factory.mktemp("model"), "qwen3_moe_mixed")


def shapes_and_marks(folder: Path, layout: Layout, **keywords: Any) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Shape and tensor-parallel mark of every parameter of this rank."""
    from slime.train.backends.megatron.weights import global_names

    with model_parallel(**megatron_sizes(layout)):
        stages, _ = build(folder, layout, **keywords)
        return {
            name: (tuple(parameter.shape), bool(getattr(parameter, "tensor_model_parallel", False)))
            for name, parameter in global_names(stages).items()
        }


def test_parameter_names_match_the_whole_model_in_every_layout(ranks, folder) -> None:
    (whole,) = ranks(1).run(shapes_and_marks, folder, Layout())
    for layout in (
        Layout(2, pipeline=2),
        Layout(2, pipeline=2, virtual=2),
        Layout(2, expert=2),
        Layout(2, tensor=2, sequence_parallel=True, expert=2),
    ):
        found = ranks(2).run(shapes_and_marks, folder, layout)
        assert set().union(*found) == set(whole), layout
        overlap = set(found[0]) & set(found[1])
        experts = {name for name in whole if ".experts." in name}
        assert not overlap if layout.pipeline == 2 else overlap == set(whole) - experts, layout


def test_only_sharded_matrices_are_marked_tensor_parallel(ranks, folder) -> None:
    """Unmarked parameters count once in the gradient norm, on the first rank only."""
    (whole,) = ranks(1).run(shapes_and_marks, folder, Layout())
    found = ranks(2).run(shapes_and_marks, folder, Layout(2, tensor=2, sequence_parallel=True, expert_tensor=2))
    for part in found:
        assert set(part) == set(whole)
        for name, (shape, is_marked) in part.items():
            is_replicated = name.endswith(("layer_norm_weight", "layernorm.weight", "router.weight"))
            assert (shape == whole[name][0]) == is_replicated, name
            assert is_marked is not is_replicated, name


def value_head_facts(folder: Path) -> tuple[tuple[int, ...], float, bool, list[str]]:
    from slime.config import Config
    from slime.models.families.family import family_of
    from slime.train.backends.megatron.builder import build_stages
    from slime.train.backends.megatron.config import transformer_config
    from tests.family_models import family_config

    hf_config = {**family_config(folder), "tie_word_embeddings": True}
    fields = family_of(hf_config).fields(hf_config)
    with model_parallel():
        config = transformer_config(fields, Config(), Layout(), compute_dtype=torch.float32, device=torch.device("cpu"))
        (stage,) = build_stages(config, fields, value_head=True)
        head = stage.output_layer.weight
        names = [name for name, _ in stage.named_parameters() if name.startswith("output")]
        return tuple(head.shape), float(head.abs().max()), stage.share_embeddings_and_output_weights, names


def test_value_head_replaces_the_output_layer(ranks, folder) -> None:
    ((shape, largest, is_shared, names),) = ranks(1).run(value_head_facts, folder)
    assert (shape, largest, is_shared, names) == ((1, 64), 0.0, False, ["output_layer.weight"])


def unchanged_torch_attributes() -> dict[str, bool]:
    """Compare torch before and after `prepare`, which must not change it."""
    before = {
        "cuda": torch.Tensor.cuda,
        "type": torch.Tensor.type,
        "tensor": torch.tensor,
        "current_device": torch.cuda.current_device,
        "rng": torch.cuda.get_rng_state,
    }
    from slime.train.backends.megatron.cpu_runtime import prepare

    prepare()
    prepare()
    after = {
        "cuda": torch.Tensor.cuda,
        "type": torch.Tensor.type,
        "tensor": torch.tensor,
        "current_device": torch.cuda.current_device,
        "rng": torch.cuda.get_rng_state,
    }
    others = [
        name
        for name, module in list(sys.modules.items())
        if not name.startswith("megatron") and getattr(module, "torch", torch) is not torch
        if type(getattr(module, "torch", None)).__name__ == "_StandIn"
    ]
    return {**{name: after[name] is before[name] for name in before}, "no other module": not others}


def test_prepare_changes_nothing_outside_megatron(ranks) -> None:
    (same,) = ranks(1).run(unchanged_torch_attributes)
    assert all(same.values()), same


def compiled_functions() -> list[str]:
    """Names of Megatron functions that torch.compile would compile on their first call."""
    from slime.train.backends.megatron.cpu_runtime import prepare

    prepare()
    found = []
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("megatron."):
            for name, value in vars(module).items():
                members = vars(value).items() if isinstance(value, type) else [(name, value)]
                found += [
                    f"{module_name}.{one}"
                    for one, member in members
                    if isinstance(member, FunctionType) and member.__module__.startswith("megatron.")
                    if "_torchdynamo_orig_callable" in vars(member)
                ]
    return found


def test_no_megatron_function_is_compiled(ranks) -> None:
    (found,) = ranks(1).run(compiled_functions)
    assert found == []
