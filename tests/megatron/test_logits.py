"""Megatron's models give the logits that transformers' give, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.megatron.ranks import model_parallel
from tests.megatron.small import FAMILIES, LENGTHS, Sizes, build, own_slices, tokens, whole_sequence
from tests.tiny_models import VOCAB, make_model_folder

LAYOUTS: dict[str, tuple[int, Sizes]] = {
    "TP2": (2, Sizes(tensor=2)),
    "TP2 SP": (2, Sizes(tensor=2, sequence_parallel=True)),
    "CP2": (2, Sizes(context=2)),
    "PP2": (2, Sizes(pipeline=2)),
    "PP2 interleaved": (2, Sizes(pipeline=2, virtual=2)),
}
EXPERT_LAYOUTS: dict[str, tuple[int, Sizes]] = {
    "EP2": (2, Sizes(expert=2)),
    "CP2": (2, Sizes(context=2)),
    "PP2 interleaved": (2, Sizes(pipeline=2, virtual=2)),
    "TP2 SP EP2": (2, Sizes(tensor=2, sequence_parallel=True, expert=2)),
    "TP2 SP ETP2": (2, Sizes(tensor=2, sequence_parallel=True, expert_tensor=2)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Any:
    """Model folders by the name of their family, made when first asked for."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            model_type, own = FAMILIES[name]
            made[name] = make_model_folder(tmp_path_factory.mktemp("model"), model_type, **own)
            shake(made[name])
        return made[name]

    return of


def shake(folder: Path) -> None:
    """Give norms and biases, which transformers makes one and zero, numbers of their own."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.dim() == 1 and "inv_freq" not in name:
                tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))
    model.save_pretrained(folder)


@torch.no_grad()
def expected(folder: Path) -> list[Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return [model(sequence[None]).logits[0] for sequence in tokens(VOCAB)]


@torch.no_grad()
def packed_logits(folder: Path, sizes: Sizes) -> list[Tensor]:
    """The logits of this rank's tokens of every sequence of a packed row; empty where there is no last stage."""
    from megatron.core import parallel_state as groups
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from slime.train.backends.megatron.spec.attention import RowParams
    from slime.train.samples.packing import PackedLayout

    with model_parallel(**sizes.groups()):
        stages, fields = build(folder, sizes)
        rank = groups.get_context_parallel_rank()
        own = [own_slices(sequence, rank, sizes.context) for sequence in tokens(fields["vocab_size"])]
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


def compare(found: list[list[Tensor]], sizes: Sizes, folder: Path) -> None:
    """Ranks in Megatron's order: tensor innermost, then context, data and pipeline."""
    last = [parts for parts in found if parts]
    assert last, "no rank has the last stage"
    for number, logits in enumerate(expected(folder)):
        by_context = [last[rank * sizes.tensor][number] for rank in range(sizes.context)]
        torch.testing.assert_close(whole_sequence(by_context), logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_packed_row_gives_the_logits_of_each_sequence_alone(ranks, folders, name) -> None:
    folder = folders(name)
    compare(ranks(1).run(packed_logits, folder, Sizes()), Sizes(), folder)


@pytest.mark.parametrize("name", ["qwen2", "qwen3 tied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_give_the_same_logits(ranks, folders, layout, name) -> None:
    size, sizes = LAYOUTS[layout]
    folder = folders(name)
    compare(ranks(size).run(packed_logits, folder, sizes), sizes, folder)


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_layouts_of_experts_give_the_same_logits(ranks, folders, layout) -> None:
    size, sizes = EXPERT_LAYOUTS[layout]
    folder = folders("qwen3_moe")
    compare(ranks(size).run(packed_logits, folder, sizes), sizes, folder)
