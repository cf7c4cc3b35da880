"""The fused path: config parsing, its plain reference and its kernels in Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from slime.engine.embedded.fused.reference import ReferenceModel
from slime.engine.embedded.fused.rope import NotFused
from slime.engine.embedded.fused.runner import contiguous_view
from slime.engine.embedded.fused.supported_models import block_of, tensor_shapes, together
from slime.engine.embedded.memory import make_contiguous
from slime.engine.embedded.model.self_test import PlainForward
from slime.engine.embedded.weights.parameter_views import FolderViews
from tests.rows import long
from tests.tiny_models import SMALL
from tests.triton_interpreter import run_interpreted

_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_MODELS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"tie_word_embeddings": True}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "attention_bias": True}),
    ("qwen3", {"rope_parameters": _YARN}),
    ("qwen2", {}),
    ("llama", {"rope_parameters": _LLAMA3, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}),
    ("mistral", {"sliding_window": 5}),
    ("qwen3_moe", {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0]}),
    (
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 9,
        },
    ),
    ("mistral", {"sliding_window": None, "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}),
]


def config_of(model_type: str, own: dict[str, Any]) -> Any:
    return AutoConfig.for_model(model_type, **{**SMALL, **own})


@pytest.mark.parametrize(("model_type", "own"), _MODELS)
def test_plain_reference_matches_transformers(model_type: str, own: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = config_of(model_type, own)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    block = block_of(config.to_dict())
    tensors = FolderViews(model).readable()
    tensors = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    }
    assert tensor_shapes(block).keys() | {"lm_head.weight"} == tensors.keys()
    assert all(tuple(tensors[name].shape) == shape for name, shape in tensor_shapes(block).items())
    ids = torch.randint(0, config.vocab_size, (2, 90))
    with torch.inference_mode():
        wanted = model(ids).logits.log_softmax(-1)
    assert (ReferenceModel(block, tensors).logits(ids).log_softmax(-1) - wanted).abs().max() < 5e-4


@pytest.mark.parametrize("own", [own for _, own in _MODELS if "rope_parameters" in own])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_tables_match_transformers(own: dict[str, Any], dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = config_of("llama", own)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=dtype), torch.arange(400)[None])
    mine = block_of(config.to_dict()).rope.tables(16, 400, dtype, torch.device("cpu"))
    for table, wanted in zip(mine, (cos, sin), strict=True):
        torch.testing.assert_close(table, wanted[0, :, :8], rtol=0, atol=0 if dtype == torch.bfloat16 else 1e-6)


def test_older_config_format_gives_the_same_block() -> None:
    newer = {**config_of("llama", {"rope_parameters": _LLAMA3}).to_dict()}
    older = {name: value for name, value in newer.items() if name not in ("rope_parameters", "head_dim")}
    older |= {"rope_theta": 500000.0, "rope_scaling": {**_LLAMA3, "type": "llama3"}}
    assert block_of(older) == block_of(newer)
    assert block_of({**older, "model_type": "mistral"}).windows == (4096, 4096)


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        ({"model_type": "gemma2"}, "no fused kernels for gemma2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"partial_rotary_factor": 0.5}, "only a part"),
        ({"num_key_value_heads": 3}, "are not supported"),
    ],
)
def test_unsupported_configs_raise_not_fused(own: dict[str, Any], reason: str) -> None:
    facts = {**config_of("llama", {}).to_dict(), "rope_parameters": None, "rope_theta": 10000.0}
    block_of(facts)
    with pytest.raises(NotFused, match=reason):
        block_of({**facts, **own})


def test_fused_weights_are_a_view_that_updates_reach() -> None:
    model = AutoModelForCausalLM.from_config(config_of("qwen2", {}))
    block = block_of(model.config.to_dict())
    own = dict(model.named_parameters())
    names = together(block)[0]
    with pytest.raises(ValueError, match="not contiguous in memory"):
        contiguous_view([own[name] for name in reversed(names)])
    before = torch.cat([own[name].detach().clone() for name in names])
    make_contiguous(model, together(block))
    whole = contiguous_view([own[name] for name in names])
    assert torch.equal(whole, before)
    assert whole.shape == (block.qkv_rows, block.hidden)
    with torch.no_grad():
        own[names[1]].fill_(3.0)
    q, k = block.heads * block.head_dim, block.kv_heads * block.head_dim
    assert bool((whole[q : q + k] == 3.0).all())
    assert torch.equal(whole[:q], before[:q])
    assert torch.equal(whole[q + k :], before[q + k :])


@pytest.mark.kernels
@pytest.mark.parametrize("cases", [("qwen2", "qwen3_moe"), long(("qwen3", "llama", "mistral", "long"))])
def test_fused_kernels_match_transformers(cases: tuple[str, ...]) -> None:
    lines = run_interpreted("from tests.engine import fused_program; fused_program.main()", *cases).splitlines()
    found = dict(line.split() for line in lines)
    kernels = {"_begin_kernel", "_gemv_kernel", "_decode_kernel", "_add_norm_kernel", "_swiglu_kernel", "_keep_kernel"}
    assert set(found.pop("compiled").split(",")) == kernels | {"_extend_kernel"}
    assert found.keys() == set(cases)
    assert max(float(error) for error in found.values()) < 1e-4, found


ADDS = """\
import torch
from slime.engine.embedded.fused.expert_kernels import combine
from slime.engine.embedded.fused.mlp_kernels import gemv
from slime.engine.embedded.fused.mlp_kernels import add_norm

half = {"dtype": torch.float16}
stream, out, ones = torch.full((3, 16), 2048.0), torch.empty(3, 16, **half), torch.ones(16, **half)
quarter = torch.full((3, 16), 0.25, **half)
for _ in range(4):
    add_norm(quarter, stream, ones, out, 0.0)
print("norm", stream.unique().item(), out.unique().item())
gemv(torch.full((1, 16), 0.5, **half), torch.full((16, 16), 1 / 32, **half), stream[:1], add=True)
print("gemv", stream[0].unique().item())
combine(quarter.repeat(2, 1), torch.full((3, 2), 0.5, **half), stream, ones, out, torch.zeros(4, dtype=torch.int32), 0.0)
print("combine", stream[1:].unique().item(), out.unique().item())
"""


@pytest.mark.kernels
def test_residual_stream_keeps_small_additions() -> None:
    assert run_interpreted(ADDS).split() == ["norm", "2049.0", "1.0", "gemv", "2049.25", "combine", "2049.25", "1.0"]


COMPILES = """\
import sys, torch
from triton.runtime.jit import JITFunction
from slime.engine.embedded.fused.model import compile_kernels
from slime.engine.embedded.fused.supported_models import block_of
from slime.engine.embedded.sampling.sampler import KernelDraw
from slime.models.catalog import published_models

asked = set()
JITFunction.warmup = lambda kernel, *types, **how: asked.add(kernel.fn.__name__)
for name in sys.argv[1:]:
    compile_kernels(block_of(published_models()[name].config), torch.bfloat16, most=4, positions=64)
KernelDraw.compile_plain(4, 1000)
KernelDraw(4, 1000, torch.device("cpu")).prepare()
print(*asked)
print(*sorted({"sympy", "transformers", "torch._dynamo"} & sys.modules.keys()))
"""


@pytest.mark.kernels
def test_compiling_ahead_imports_no_slow_packages() -> None:
    command = [sys.executable, "-c", COMPILES, "qwen3-0.6B", "qwen3-30B-A3B", "qwen2.5-0.5B"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    asked, slow = done.stdout.splitlines()
    assert {"_decode_kernel", "_route_kernel", "_extend_kernel", "mass_kernel", "probe_kernel"} <= set(asked.split())
    assert slow == ""


@pytest.mark.parametrize(
    ("rows", "cuda", "batches"),
    [
        (8, False, [[0, 1, 2]]),
        (8, True, [[0, 1, 2], [0, 1], [0]]),
        (2, True, [[0, 1], [2], [0]]),
        (1, True, [[0], [1], [2]]),
    ],
)
def test_load_check_covers_batches_of_few_sequences(rows: int, cuda: bool, batches: list[list[int]]) -> None:
    plain = PlainForward(
        lambda ids: torch.zeros(*ids.shape, 7),
        {"model_type": "qwen3", "vocab_size": 7},
        torch.empty(0),
        context_len=64,
    )
    assert plain.batches(rows, cuda) == batches
