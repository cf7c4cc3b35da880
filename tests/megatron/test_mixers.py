"""Latent attention and gated delta nets match transformers' logits and gradients in layouts that shard them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from slime.errors import UserError
from slime.train.backends.megatron.layout import Layout
from tests.family_models import BASE, family_config, make_family_folder
from tests.megatron.ranks import model_parallel
from tests.megatron.small import LENGTHS, build, megatron_sizes, own_slices, tokens
from tests.megatron.test_logits import compare, packed_logits

ALONE = ("deepseek_v3", "moonlight", "glm4_moe_lite", "glm_moe_dsa", "qwen3_next", "qwen3_5", "qwen3_5_moe")
DELTA = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
SHARED = Layout(2, tensor=2, sequence_parallel=True)
LAYOUTS: dict[str, tuple[str, Layout]] = {
    "delta TP2": ("qwen3_5", Layout(2, tensor=2)),
    "delta TP2 SP EP2": ("qwen3_next", Layout(2, tensor=2, sequence_parallel=True, expert=2)),
    "delta CP2": ("qwen3_next", Layout(2, context=2)),
    "delta PP2 interleaved": ("qwen3_5", Layout(2, pipeline=2, virtual=2)),
    "latent TP2 SP EP2": ("deepseek_v3", Layout(2, tensor=2, sequence_parallel=True, expert=2)),
    "latent CP2": ("deepseek_v3", Layout(2, context=2)),
    "sparse TP2 SP": ("glm_moe_dsa", SHARED),
    "sparse PP2": ("glm_moe_dsa", Layout(2, pipeline=2)),
    "latent PP2 interleaved": ("moonlight", Layout(2, pipeline=2, virtual=2)),
}
GRADIENTS: dict[str, tuple[str, Layout]] = {
    "delta alone": ("qwen3_5", Layout()),
    "delta TP2": ("qwen3_5", Layout(2, tensor=2)),
    "delta TP2 SP": ("qwen3_5", SHARED),
    "delta CP2": ("qwen3_5", Layout(2, context=2)),
    "latent alone": ("deepseek_v3_dense", Layout()),
    "latent TP2": ("deepseek_v3_dense", Layout(2, tensor=2)),
    "latent TP2 SP": ("deepseek_v3_dense", SHARED),
    "latent CP2": ("deepseek_v3_dense", Layout(2, context=2)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Any:
    """Model folders by family name, created on first use."""
    made: dict[str, Path] = {}

    def of(case: str) -> Path:
        if case not in made:
            dense = {"first_k_dense_replace": 4} if case.endswith("_dense") else {}
            name, folder = case.removesuffix("_dense"), tmp_path_factory.mktemp("model")
            made[case] = make_family_folder(folder, name, spread=0.05 if case in DELTA else 0.1, **dense)
        return made[case]

    return of


@pytest.mark.parametrize("case", ALONE)
def test_packed_row_gives_the_logits_of_single_sequences(ranks, folders, case) -> None:
    folder = folders(case)
    compare(ranks(1).run(packed_logits, folder, Layout()), Layout(), folder)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_give_the_same_logits(ranks, folders, name) -> None:
    case, layout = LAYOUTS[name]
    folder = folders(case)
    compare(ranks(layout.world).run(packed_logits, folder, layout), layout, folder)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_match_transformers(ranks, folders, name) -> None:
    case, layout = GRADIENTS[name]
    folder = folders(case)
    wanted = expected_gradients(folder)
    for rank, found in enumerate(ranks(layout.world).run(packed_gradients, folder, layout)):
        for parameter, (gradient, exact) in own_gradients(folder, layout, rank, found, wanted).items():
            error = (gradient - exact).abs().max() / exact.abs().max()
            assert error < (5e-4 if case in DELTA else 2e-5), f"{parameter}: {error}"  # delta nets: cancellation


def test_rejects_a_requested_kernel_that_is_not_installed(ranks, folders) -> None:
    assert "needs the package fla" in ranks(1).run(missing_kernel_error, folders("qwen3_5"))[0]


def missing_kernel_error(folder: Path) -> str:
    from slime.config import Config
    from slime.models.families.family import family_of
    from slime.train.backends.megatron.builder import build_stages
    from slime.train.backends.megatron.config import transformer_config

    config = family_config(folder)
    fields = {**family_of(config).fields(config), "qwen_gdn_backend": "fla"}
    cpu = torch.device("cpu")
    with model_parallel(**megatron_sizes(Layout())):
        settings = transformer_config(fields, Config(), Layout(), compute_dtype=torch.float32, device=cpu)
        with pytest.raises(UserError) as raised:
            build_stages(settings, fields)
    return str(raised.value)


def weights_of_logits() -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(length, BASE["vocab_size"], generator=generator) for length in LENGTHS]


def expected_gradients(folder: Path) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for sequence, weights in zip(tokens(BASE["vocab_size"]), weights_of_logits(), strict=True):
        (model(sequence[None]).logits[0] * weights).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def packed_gradients(folder: Path, layout: Layout) -> dict[str, Tensor]:
    """This rank's gradients by global name, summed as Megatron sums them after a batch."""
    import torch.distributed as dist
    from megatron.core import parallel_state as groups
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from slime.train.backends.megatron.spec.attention import PackedRowParams
    from slime.train.backends.megatron.weights import global_names
    from slime.train.samples.packing import PackedLayout

    with model_parallel(**megatron_sizes(layout)):
        stages, fields = build(folder, layout)
        rank = groups.get_context_parallel_rank()
        own = torch.cat([own_slices(sequence, rank, layout.context) for sequence in tokens(fields["vocab_size"])])
        weights = torch.cat([own_slices(part, rank, layout.context) for part in weights_of_logits()])
        bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
        params = PackedRowParams.of(PackedLayout(LENGTHS, bounds, max(LENGTHS)))
        output = stages[0](input_ids=own[None], position_ids=None, attention_mask=None, packed_seq_params=params)
        whole = gather_from_tensor_model_parallel_region(output)[0, :, : fields["vocab_size"]]
        (whole * weights).sum().backward()
        found = {}
        for name, parameter in global_names(stages).items():
            gradient = parameter.grad
            by_sequence = layout.sequence_parallel and getattr(parameter, "sequence_parallel", False)
            if by_sequence or "q_layernorm" in name or "k_layernorm" in name:
                dist.all_reduce(gradient, group=groups.get_tensor_model_parallel_group())
            dist.all_reduce(gradient, group=groups.get_context_parallel_group())
            found[name] = gradient
        return found


def own_gradients(
    folder: Path, layout: Layout, rank: int, found: dict[str, Tensor], wanted: dict[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs of computed and expected gradient of a rank, by name."""
    from slime.models.families.family import family_of
    from slime.models.families.weight_map import entries_by_name

    config = family_config(folder)
    entries = entries_by_name(family_of(config).rules(config))
    pairs = {}
    for name, gradient in found.items():
        whole = [wanted[hf] for hf in entries[name].hf]
        shapes = [tuple(tensor.shape) for tensor in whole]
        shard = entries[name].form.shard(shapes, rank % layout.tensor, layout.tensor)
        pairs[name] = gradient, shard.join([whole[share.source][share.region] for share in shard.shares])
    return pairs
