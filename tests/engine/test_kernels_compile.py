"""The kernels compiled ahead at start-up go through Triton's compiler, for every kind of block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from slime.engine.embedded.fused.model import compile_kernels
from slime.engine.embedded.fused.supported_models import block_of
from slime.engine.embedded.sampling.sampler import KernelDraw
from tests.gpu_compiler import compile_launches
from tests.rows import some

pytestmark = pytest.mark.kernels

SMALL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024,
}  # fmt: skip
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 100},
    "qwen3_moe": MOE,
}


@pytest.mark.parametrize("kind", some(["mistral", "qwen3_moe"], of=KINDS))
def test_compiles_fused_body_kernels(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    compiled = compile_launches(monkeypatch, tmp_path_factory)
    block = block_of(AutoConfig.for_model(kind, **SMALL, **KINDS[kind]).to_dict())
    assert block is not None
    compile_kernels(block, torch.bfloat16, most=64, positions=1024)
    assert {"_decode_kernel", "_extend_kernel"} <= set(compiled), sorted(set(compiled))


def test_compiles_sampling_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    compiled = compile_launches(monkeypatch, tmp_path_factory)
    KernelDraw.compile_plain(64, 5000)
    assert set(compiled) == {"mass_kernel", "pick_kernel"}
    KernelDraw(64, 5000, torch.device("cpu")).prepare()
    assert set(compiled) == {
        *("mass_kernel", "pick_kernel", "edit_kernel", "note_kernel", "probe_kernel", "gather_kernel", "settle_kernel")
    }
