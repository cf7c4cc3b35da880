"""Tests the memory plan against the bytes that a training step allocates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.algorithms import logprobs
from slime.data.sample import Sample
from slime.driver.plan.memory import (
    CHUNK_LOGITS,
    COMPILE_MIN_PARAMETERS,
    FUSED_TYPES,
    KEPT_BYTES,
    STREAMED_ELEMENTS,
    trainer_memory,
)
from slime.models.shape import ModelShape
from slime.train.backends.fsdp import optimizer, sharding
from slime.train.backends.fsdp.fused.layer import is_plain
from tests.rows import long
from tests.tiny_models import make_model_folder
from tests.train.counted_memory import most_bytes
from tests.train.in_process import InProcess, config_for
from tests.train.tiny_training import build_model

TOKENS = 256
AT_REST = ("weights", "Adam moments", "reference", "frozen weights")
SHAPE = {"vocab_size": 2048, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 48}


def samples() -> list[list[Sample]]:
    response = TOKENS - 64
    return [
        [
            Sample(
                group_index=index,
                index=index,
                tokens=[2 + (7 * at + index) % 300 for at in range(TOKENS)],
                response_length=response,
                loss_mask=[1] * response,
                reward=float(index % 2),
                rollout_log_probs=[-5.0] * response,
                status=Sample.Status.COMPLETED,
            )
        ]
        for index in range(2)
    ]


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ({"model_type": "qwen3"}, {}),
        long({"model_type": "llama", "tie_word_embeddings": True}, {"num_steps_per_rollout": 2}),
        long({"model_type": "qwen3"}, {"recompute_activations": True, "use_kl_loss": True}),
        ({"model_type": "qwen3"}, {"fsdp_cpu_offload": True}),
        long({"model_type": "qwen3"}, {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}),
        long({"model_type": "qwen3"}, {"lora_rank": 8, "use_kl_loss": True}),
        ({"model_type": "qwen3"}, {"lora_rank": 128}),
        long({"model_type": "qwen3"}, {"lora_rank": 8, "recompute_activations": True}),
        ({"model_type": "llama"}, {"loss_type": "sft_loss", "log_probs_chunk_size": 16}),
    ],
)
def test_memory_plan_matches_bytes_allocated_by_a_step(
    tmp_path: Path, model: dict[str, Any], flags: dict[str, Any]
) -> None:
    folder = make_model_folder(tmp_path / "model", **(SHAPE | model))
    run = InProcess(
        config_for(
            folder,
            tmp_path / "out",
            **({"rollout_batch_size": 2, "n_samples_per_prompt": 1, "micro_batch_size": 1} | flags),
            rollout_max_context_len=TOKENS,
            rollout_max_response_len=TOKENS - 64,
        )
    )
    run.train(0, samples())
    plan = trainer_memory(run.config, ModelShape.from_folder(folder), device="cpu", trainers=1)
    there = sum(size for name, size in plan.parts.items() if name in AT_REST)
    taken = there + most_bytes(lambda: run.train(1, samples()))
    assert plan.total == pytest.approx(taken, rel=0.05), (plan, taken)


def test_memory_plan_constants_match_training() -> None:
    assert CHUNK_LOGITS == {"cpu": logprobs.CHUNK_LOGITS_CPU, "cuda": logprobs.CHUNK_LOGITS_CUDA}
    assert KEPT_BYTES == logprobs.KEPT_BYTES
    assert COMPILE_MIN_PARAMETERS == sharding.COMPILE_MIN_PARAMETERS
    fused = {f"transformers.models.{kind}.modeling_{kind}" for kind in FUSED_TYPES}
    models = (build_model(kind) for kind in ("llama", "mistral_window", "qwen2", "qwen3", "gemma2", "qwen3_moe"))
    found = {type(layer).__module__ for model in models for layer in model.modules() if is_plain(layer)}
    assert found == fused
    assert STREAMED_ELEMENTS == optimizer._PART
