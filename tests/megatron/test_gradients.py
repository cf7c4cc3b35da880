"""Gradients of all parameters match transformers, for every family and in several layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from slime.train.backends.megatron.layout import Layout
from tests.family_models import BASE, family_config
from tests.megatron.ranks import model_parallel
from tests.megatron.small import build, local_tensors, megatron_sizes, through, tokens
from tests.megatron.test_logits import FAMILIES

LAYOUTS = {
    "one": Layout(),
    "TP2 SP": Layout(2, tensor=2, sequence_parallel=True),
    "EP2": Layout(2, expert=2),
    "CP2": Layout(2, context=2),
}
MIXERS = ("qwen3_next", "qwen3_5", "glm4_moe_lite", "deepseek_v3", "moonlight")
EXPERTS = ("qwen3_moe", "qwen3_moe_mixed", "glm4_moe", "gpt_oss", "qwen3_next", "deepseek_v3")
NO_CONTEXT = ("gpt_oss", "qwen2_windows", "qwen2_moe_windows", "qwen3_windows", "qwen3_moe_windows")
CASES = [
    (case, name)
    for case in (*FAMILIES, *MIXERS)
    for name in LAYOUTS
    if (name != "EP2" or case in EXPERTS) and (name != "CP2" or case not in NO_CONTEXT)
]


def weights_of(sequence: Tensor) -> Tensor:
    """Weight of each logit of a sequence in the loss [L, V]."""
    generator = torch.Generator().manual_seed(len(sequence))
    return torch.randn(len(sequence), BASE["vocab_size"], generator=generator)


@pytest.fixture(scope="module")
def gradient_folder(family_folder, tmp_path_factory) -> Callable[[str], Path]:
    """Gradients computed by transformers, saved in the folder format of the weights."""
    made: dict[str, Path] = {}

    def folder(case: str) -> Path:
        if case not in made:
            made[case] = tmp_path_factory.mktemp("gradients")
            model = AutoModelForCausalLM.from_pretrained(
                family_folder(case), dtype=torch.float32, attn_implementation="eager"
            ).eval()
            for sequence in tokens(BASE["vocab_size"]):
                (model(sequence[None]).logits[0] * weights_of(sequence)).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(parameter.grad)
            model.save_pretrained(made[case])
        return made[case]

    return folder


def differences(folder: Path, gradients: Path, layout: Layout) -> dict[str, float]:
    """Largest gradient error of each parameter, relative to its largest expected gradient."""
    from megatron.core import parallel_state as groups
    from megatron.core.distributed import finalize_model_grads

    from slime.config import Config
    from slime.models.families.family import family_of
    from slime.train.backends.megatron.backend import wrap_with_ddp
    from slime.train.backends.megatron.config import ddp_config
    from slime.train.backends.megatron.weights import global_names
    from tests.megatron.small import own_slices

    with model_parallel(**megatron_sizes(layout)):
        stages, fields = build(folder, layout)
        wrapped = wrap_with_ddp(stages, ddp_config(Config(use_distributed_optimizer=False), layout))
        sequences = tokens(fields["vocab_size"])
        logits = through(wrapped, sequences, layout)
        assert logits is not None
        context = groups.get_context_parallel_rank()
        counted = torch.cat([own_slices(weights_of(one), context, layout.context) for one in sequences])
        first = groups.get_tensor_model_parallel_rank() * logits.shape[-1]
        counted = counted[:, first : first + logits.shape[-1]]
        (logits[0, :, : counted.shape[1]] * counted).sum().backward()
        finalize_model_grads(wrapped)
        hf_config = family_config(folder)
        sums = {name: parameter.main_grad for name, parameter in global_names(stages).items()}
        wanted = local_tensors(gradients, family_of(hf_config).rules(hf_config), sums)
        copies = layout.data  # data-parallel ranks, which all have the same samples here
        return {
            name: float((found / copies - expected).abs().max() / expected.abs().max().clamp(min=1e-3))
            for name, (found, expected) in wanted.items()
        }


@pytest.mark.parametrize(("case", "name"), CASES)
def test_gradients_match_transformers(ranks, family_folder, gradient_folder, case, name) -> None:
    layout = LAYOUTS[name]
    for found in ranks(layout.world).run(differences, family_folder(case), gradient_folder(case), layout):
        off = {name: by for name, by in found.items() if by > 1e-4}
        assert not off
        assert found
