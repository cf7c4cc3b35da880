"""Whole engines on tiny models, captured graphs and all: log-probs of what they sampled, against transformers.

Models with fused kernels, models through transformers' modules (plain, compiled, with experts, with delta nets), and
one whose memory is released, resumed and given other weights.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from slime.engine.embedded.engine import EngineCore
from slime.engine.embedded.options import parse_options
from slime.engine.embedded.sampling_params import SamplingParams
from slime.engine.embedded.scheduler import Sequence
from tests.tiny_models import make_model_folder

_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    "head_dim": 8, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3,
}  # fmt: skip
_CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "qwen3": ("qwen3", {"tie_word_embeddings": True}, []),
    "qwen2": ("qwen2", {}, []),
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}, []),
    "mistral": ("mistral", {"sliding_window": 8, "head_dim": 24}, []),
    "qwen3 without fused kernels": ("qwen3", {}, ["--no-fused-kernels", "--no-compile"]),
    "gemma2": (
        "gemma2",
        {"sliding_window": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
         "query_pre_attn_scalar": 16},
        ["--no-compile"],
    ),
    "qwen3_moe": ("qwen3_moe", _EXPERTS, ["--no-compile"]),
    "qwen3_moe without fused kernels": ("qwen3_moe", _EXPERTS, ["--no-fused-kernels", "--no-compile"]),
    "gpt_oss": ("gpt_oss", {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}, ["--no-compile"]),
    "deepseek_v3": ("deepseek_v3", _LATENT, ["--no-compile"]),
    "qwen3_next": (
        "qwen3_next", {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 32}, ["--no-compile"],
    ),
    "qwen3, compiled layers": ("qwen3", {"num_hidden_layers": 12}, ["--no-fused-kernels"]),
    "deepseek_v3, compiled layers": ("deepseek_v3", {**_LATENT, "num_hidden_layers": 12}, []),
    "qwen3_moe, compiled layers": ("qwen3_moe", {**_EXPERTS, "num_hidden_layers": 12}, ["--no-fused-kernels"]),
}  # fmt: skip
_BOUND = 2e-3


def checks() -> Iterator[tuple[str, float, float]]:
    logging.basicConfig(level=logging.WARNING)
    for name, (model_type, own, options) in _CASES.items():
        with tempfile.TemporaryDirectory() as place:
            folder = make_model_folder(Path(place) / "model", model_type, **own)
            core = _started(folder, options)
            for what, error in _compared(core, folder, folder):
                yield f"{name}: {what}", error, _BOUND
            if name == "qwen3":
                yield from _released(core, folder, make_model_folder(Path(place) / "other", model_type, seed=1, **own))
            core.stop()


def _started(folder: Path, options: list[str]) -> EngineCore:
    argv = ["--model-path", str(folder), "--dtype", "float32", "--max-running-requests", "8"]
    core = EngineCore(parse_options([*argv, "--max-total-tokens", "4096", *options]), on_death=print)
    core.load("cuda")
    core.start()
    return core


def _compared(core: EngineCore, folder: Path, weights: Path) -> Iterator[tuple[str, float]]:
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32, attn_implementation="eager").cuda()
    for count in (1, 2, 7):
        sequences = _generated(core, count)
        yield f"{count} together", max(_error(model.eval(), seq) for seq in sequences)


def _generated(core: EngineCore, count: int) -> list[Sequence]:
    left, done = threading.Semaphore(0), []

    def notify(seq: Sequence) -> None:
        if seq.finish is not None:
            done.append(seq)
            left.release()

    sequences = [
        Sequence(
            f"r{i}", np.random.default_rng(i).integers(3, 300, 5 + 17 * i).tolist(), SamplingParams(temperature=0.8),
            frozenset(), 24, notify, seed=i,
        )
        for i in range(count)
    ]  # fmt: skip
    core.submit(sequences)
    for _ in sequences:
        if not left.acquire(timeout=60):
            raise TimeoutError("the engine answered nothing for a minute")
    if any(len(seq.output_ids) != 24 for seq in sequences):
        raise RuntimeError(f"a sequence ended early: {[seq.finish for seq in sequences]}")
    return sequences


@torch.inference_mode()
def _error(model: torch.nn.Module, seq: Sequence) -> float:
    ids = torch.tensor([seq.tokens], device="cuda")
    logits = model(input_ids=ids).logits[0, len(seq.prompt_ids) - 1 : -1] / 0.8
    wanted = logits.log_softmax(-1).gather(1, ids[0, len(seq.prompt_ids) :, None])[:, 0]
    return (torch.tensor(seq.logprobs, device="cuda") - wanted).abs().max().item()


def _released(core: EngineCore, folder: Path, other: Path) -> Iterator[tuple[str, float, float]]:
    tags = ["weights", "kv_cache"]
    core.call(lambda: core.release_memory(tags)).result()
    core.call(lambda: core.resume_memory(tags)).result()
    for what, error in _compared(core, folder, folder):
        yield f"released and resumed: {what}", error, _BOUND
    core.call(lambda: core.weights.update_from_folder(str(other), "1", flush=True)).result()
    for what, error in _compared(core, folder, other):
        yield f"other weights: {what}", error, _BOUND
