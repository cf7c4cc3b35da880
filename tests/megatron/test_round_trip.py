"""Weights read from a folder into Megatron come back bit for bit: a tiny model of every family, several layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slime.errors import UserError
from slime.models.families.family import family_of
from slime.models.families.minimax_m2 import MINIMAX_M2
from slime.train.backends.megatron.layout import Layout
from tests.family_models import BASE, FAMILY_MODELS, make_family_folder

LAYOUTS: dict[str, Layout] = {
    "TP2": Layout(2, tensor=2),
    "PP2 interleaved": Layout(2, pipeline=2, virtual=2),
}
EXPERT_LAYOUTS: dict[str, Layout] = {
    "EP2": Layout(2, expert=2),
    "TP2 ETP2": Layout(2, tensor=2, expert_tensor=2),
}
NO_LAYERS = ("minimax_m2",)
FAMILIES = [case for case in FAMILY_MODELS if case not in NO_LAYERS]
Found = list[tuple[str, tuple[slice, ...], Tensor]]


def expert_cases() -> list[tuple[str, str]]:
    """Families with experts and the layouts that shard them; Megatron cannot shard a single expert with biases."""
    found = []
    for case in FAMILIES:
        model_type, own = FAMILY_MODELS[case]
        config = {"model_type": model_type, **BASE, **own}
        fields = family_of(config).fields(config)
        if "num_moe_experts" in fields:
            cut = [
                name for name, one in EXPERT_LAYOUTS.items() if one.expert_tensor == 1 or not fields["add_bias_linear"]
            ]
            found += [(case, name) for name in cut]
    return found


def round_trip(folder: Path, layout: Layout, *, value_head: bool = False) -> Found:
    """Read the folder into this rank's stages; return their weights as parts of the folder's tensors."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from slime.config import Config
    from slime.train.backends.megatron.builder import build_stages
    from slime.train.backends.megatron.config import transformer_config
    from slime.train.backends.megatron.cpu_runtime import prepare
    from slime.train.backends.megatron.process_groups import form_groups
    from slime.train.backends.megatron.weights import ModelFolder, global_buffers, global_names, read_weights
    from slime.train.timers import RankProgress
    from slime.train.topology import Ranks

    prepare()
    assert dist.group.WORLD is not None
    groups = form_groups(layout, Ranks.of(dist.group.WORLD, torch.device("cpu")))
    try:
        model = ModelFolder.read(folder, vocab_multiple=128)
        config = transformer_config(
            model.fields, Config(), layout, compute_dtype=torch.float32, device=torch.device("cpu")
        )
        stages = build_stages(config, model.fields, value_head=value_head)
        without = ("output_layer.weight",) if value_head else ()
        read_weights(stages, model, groups, RankProgress(), without=without)
        found: Found = []
        for name, tensor in {**global_names(stages), **global_buffers(stages)}.items():
            if name in without:
                found.append(("value head", (), tensor.detach().clone()))
                continue
            entry = model.entries[name]
            shard = model.shard(entry, groups)
            if entry.is_copy or shard.is_copy:
                continue
            for share, part in zip(shard.shares, shard.split(tensor.detach()), strict=True):
                found.append((entry.hf[share.source], share.region, part.clone()))
        return found
    finally:
        parallel_state.destroy_model_parallel()


def compare(answers: list[Found], folder: Path) -> None:
    saved = load_file(folder / "model.safetensors")
    made = {name: torch.full_like(tensor, float("nan")) for name, tensor in saved.items()}
    for found in answers:
        for name, region, part in found:
            made[name][region] = part
    for name, tensor in saved.items():
        assert torch.equal(made[name], tensor), name


def read_error(folder: Path) -> str:
    from slime.train.backends.megatron.weights import ModelFolder

    with pytest.raises(UserError) as caught:
        ModelFolder.read(folder, vocab_multiple=128)
    return str(caught.value)


def test_rejects_a_family_without_megatron_layers(ranks: Any, tmp_path: Path) -> None:
    (sentence,) = ranks(1).run(read_error, make_family_folder(tmp_path, "minimax_m2"))
    assert MINIMAX_M2.support.megatron is not None
    assert sentence.endswith(MINIMAX_M2.support.megatron)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", FAMILIES)
def test_weights_round_trip_bit_for_bit(ranks: Any, family_folder: Any, case: str, layout: str) -> None:
    compare(ranks(2).run(round_trip, family_folder(case), LAYOUTS[layout]), family_folder(case))


@pytest.mark.parametrize(("case", "layout"), expert_cases())
def test_expert_weights_round_trip_bit_for_bit(ranks: Any, family_folder: Any, case: str, layout: str) -> None:
    compare(ranks(2).run(round_trip, family_folder(case), EXPERT_LAYOUTS[layout]), family_folder(case))


def test_critic_reads_all_weights_except_its_zero_head(ranks: Any, tmp_path: Path) -> None:
    folder = make_family_folder(tmp_path, "qwen3_tied")
    (found,) = ranks(1).run(round_trip, folder, Layout(), value_head=True)
    (head,) = [part for name, _, part in found if name == "value head"]
    assert head.shape == (1, 64)
    assert not head.any()
    compare([[one for one in found if one[0] != "value head"]], folder)
