"""Megatron models give the logits of transformers in several layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from slime.train.backends.megatron.layout import Layout
from tests.family_models import BASE, make_family_folder
from tests.megatron.ranks import model_parallel
from tests.megatron.small import LENGTHS, build, megatron_sizes, through, tokens, whole_sequence

FAMILIES = (
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "qwen3_tied",
    "qwen3_moe",
    "qwen3_moe_mixed",
    "llama",
    "llama_scaled",
    "llama_biases",
    "glm4",
    "glm4_moe",
    "gpt_oss",
    "qwen2_windows",
    "qwen2_moe_windows",
    "qwen3_windows",
    "qwen3_moe_windows",
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


@torch.no_grad()
def expected(folder: Path) -> list[Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return [model(sequence[None]).logits[0] for sequence in tokens(BASE["vocab_size"])]


@torch.no_grad()
def packed_logits(folder: Path, layout: Layout) -> list[Tensor]:
    """Logits of this rank's tokens, per sequence of a packed row; empty on ranks without the last stage."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    with model_parallel(**megatron_sizes(layout)):
        stages, fields = build(folder, layout)
        output = through(stages, tokens(fields["vocab_size"]), layout)
        if output is None:
            return []
        whole = gather_from_tensor_model_parallel_region(output)[0, :, : fields["vocab_size"]]
        return list(whole.split([length // layout.context for length in LENGTHS]))


def compare(found: list[list[Tensor]], layout: Layout, folder: Path) -> None:
    """Compare with transformers; ranks are in Megatron's order: tensor innermost, then context, data and pipeline."""
    last = [parts for parts in found if parts]
    assert last, "no rank has the last stage"
    for number, logits in enumerate(expected(folder)):
        by_context = [last[rank * layout.tensor][number] for rank in range(layout.context)]
        torch.testing.assert_close(whole_sequence(by_context), logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", FAMILIES)
def test_packed_row_gives_the_logits_of_single_sequences(ranks, family_folder, case) -> None:
    folder = family_folder(case)
    compare(ranks(1).run(packed_logits, folder, Layout()), Layout(), folder)


@pytest.mark.parametrize("case", ["qwen2", "qwen3_tied", "glm4"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_give_the_same_logits(ranks, family_folder, name, case) -> None:
    layout, folder = LAYOUTS[name], family_folder(case)
    compare(ranks(layout.world).run(packed_logits, folder, layout), layout, folder)


@pytest.mark.parametrize("name", EXPERT_LAYOUTS)
def test_expert_layouts_give_the_same_logits(ranks, family_folder, name) -> None:
    layout, folder = EXPERT_LAYOUTS[name], family_folder("qwen3_moe_mixed")
    compare(ranks(layout.world).run(packed_logits, folder, layout), layout, folder)


@pytest.mark.parametrize("case", ["qwen2", "qwen3_5"])
def test_logits_match_with_more_ranks_than_key_value_heads(ranks, tmp_path, case) -> None:
    layout = Layout(4, tensor=4, sequence_parallel=True)
    folder = make_family_folder(tmp_path, case, spread=0.05, num_key_value_heads=2)
    compare(ranks(4).run(packed_logits, folder, layout), layout, folder)
