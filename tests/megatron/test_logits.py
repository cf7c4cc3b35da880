"""Megatron's models give the logits that transformers' give, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from slime.train.backends.megatron.layout import Layout
from tests.family_models import BASE, make_family_folder
from tests.megatron.ranks import model_parallel
from tests.megatron.small import LENGTHS, build, megatron_sizes, own_slices, tokens, whole_sequence

FAMILIES = (
    "qwen2",
    "qwen3",
    "qwen3_tied",
    "qwen3_moe",
    "qwen3_moe_mixed",
    "llama",
    "llama_scaled",
    "llama_biases",
    "glm4",
    "glm4_moe",
    "gpt_oss",
)

LAYOUTS: dict[str, Layout] = {
    "TP2": Layout(2, tensor=2),
    "TP2 SP": Layout(2, tensor=2, sequence_parallel=True),
    "CP2": Layout(2, context=2),
    "PP2": Layout(2, pipeline=2),
    "PP2 interleaved": Layout(2, pipeline=2, virtual=2),
}
EXPERT_LAYOUTS: dict[str, Layout] = {
    "EP2": Layout(2, expert=2),
    "CP2": Layout(2, context=2),
    "PP2 interleaved": Layout(2, pipeline=2, virtual=2),
    "TP2 SP EP2": Layout(2, tensor=2, sequence_parallel=True, expert=2),
    "TP2 SP ETP2": Layout(2, tensor=2, sequence_parallel=True, expert_tensor=2),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Any:
    """Model folders by the name of their family, made when first asked for."""
    made: dict[str, Path] = {}

    def of(case: str) -> Path:
        if case not in made:
            made[case] = make_family_folder(tmp_path_factory.mktemp("model"), case)
        return made[case]

    return of


@torch.no_grad()
def expected(folder: Path) -> list[Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return [model(sequence[None]).logits[0] for sequence in tokens(BASE["vocab_size"])]


@torch.no_grad()
def packed_logits(folder: Path, layout: Layout) -> list[Tensor]:
    """The logits of this rank's tokens of every sequence of a packed row; empty where there is no last stage."""
    from megatron.core import parallel_state as groups
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from slime.train.backends.megatron.spec.attention import RowParams
    from slime.train.samples.packing import PackedLayout

    with model_parallel(**megatron_sizes(layout)):
        stages, fields = build(folder, layout)
        rank = groups.get_context_parallel_rank()
        own = [own_slices(sequence, rank, layout.context) for sequence in tokens(fields["vocab_size"])]
        bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
        params = RowParams.of(PackedLayout(LENGTHS, bounds, max(LENGTHS)))
        output = through(stages, torch.cat(own)[None], params)
        if output is None:
            return []
        whole = gather_from_tensor_model_parallel_region(output)[0, :, : fields["vocab_size"]]
        return list(whole.split([len(part) for part in own]))


def through(stages: list[Any], ids: Tensor, params: Any) -> Tensor | None:
    """Pass a row through all stages of all processes; the logits where the last stage is."""
    import torch.distributed as dist
    from megatron.core import parallel_state as groups

    config = stages[0].config
    rank, size = groups.get_pipeline_model_parallel_rank(), groups.get_pipeline_model_parallel_world_size()
    group = groups.get_pipeline_model_parallel_group()
    shared = config.tensor_model_parallel_size if config.sequence_parallel else 1
    states = torch.empty(ids.shape[1] // shared, 1, config.hidden_size)
    output = None
    for number in range(len(stages) * size):
        stage = stages[number // size]
        if number % size == rank:
            stage.set_input_tensor(states)
            output = stage(input_ids=ids, position_ids=None, attention_mask=None, packed_seq_params=params)
            if not stage.post_process:
                states = output.contiguous()
        if number + 1 < len(stages) * size:
            dist.broadcast(states, group=group, group_src=number % size)
    return output if stages[-1].post_process else None


def compare(found: list[list[Tensor]], layout: Layout, folder: Path) -> None:
    """Ranks in Megatron's order: tensor innermost, then context, data and pipeline."""
    last = [parts for parts in found if parts]
    assert last, "no rank has the last stage"
    for number, logits in enumerate(expected(folder)):
        by_context = [last[rank * layout.tensor][number] for rank in range(layout.context)]
        torch.testing.assert_close(whole_sequence(by_context), logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", FAMILIES)
def test_a_packed_row_gives_the_logits_of_each_sequence_alone(ranks, folders, case) -> None:
    folder = folders(case)
    compare(ranks(1).run(packed_logits, folder, Layout()), Layout(), folder)


@pytest.mark.parametrize("case", ["qwen2", "qwen3_tied", "glm4"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_give_the_same_logits(ranks, folders, name, case) -> None:
    layout, folder = LAYOUTS[name], folders(case)
    compare(ranks(layout.world).run(packed_logits, folder, layout), layout, folder)


@pytest.mark.parametrize("name", EXPERT_LAYOUTS)
def test_layouts_of_experts_give_the_same_logits(ranks, folders, name) -> None:
    layout, folder = EXPERT_LAYOUTS[name], folders("qwen3_moe_mixed")
    compare(ranks(layout.world).run(packed_logits, folder, layout), layout, folder)
