"""Tests `--fp8`: row quantization, FP8 layers, and the settings that are rejected.

Kernels run in Triton's interpreter; the scaled product, which needs a GPU, is replaced by plain torch code.
"""

import pytest
import torch

from slime.config import Config, derive
from slime.config.resolve import check_contradictions
from slime.errors import UserError
from slime.train.backends.fsdp.fused.layer import check_float8
from tests.train.tiny_training import build_model
from tests.triton_interpreter import run_interpreted

PROGRAM = r"""
import copy
import torch
from torch import nn
from slime.train.backends.fsdp.attention import ATTENTION_NAME, register_packed_attention
from slime.train.backends.fsdp.fused import matmul_kernels
from slime.train.backends.fsdp.fused.layer import fuse_layers
from slime.train.backends.fsdp.packed_model import PolicyModel
from slime.train.samples.packing import pack
from tests.train.tiny_training import build_model

torch.manual_seed(0)


def rounded(rows):
    scales = rows.float().abs().amax(1, keepdim=True).clamp(min=1e-30) / 448
    return (rows.float() / scales).to(torch.float8_e4m3fn).float(), scales


rows = torch.randn(5, 48) * torch.tensor([1.0, 1e-4, 300.0, 0.0, 1.0])[:, None]
for dtype in (torch.float32, torch.bfloat16):
    found, scales = matmul_kernels.quantize(rows.to(dtype))
    wanted, wanted_scales = rounded(rows.to(dtype))
    assert found.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(scales, wanted_scales[:, 0], rtol=1e-6, atol=0)
    assert (found.float() == wanted).float().mean() > 0.95  # the interpreter has a rounding of its own
    assert torch.equal(found.float().abs().amax(1), torch.tensor([448.0, 448, 448, 0, 448]))
print("rows right")

matmul_kernels.quantize = lambda rows: (rounded(rows)[0].to(torch.float8_e4m3fn), rounded(rows)[1][:, 0])
matmul_kernels.scaled_product = lambda a, of_a, b, of_b, dtype: (
    (a.float() @ b.float().t()) * of_a[:, None] * of_b[None, :]
).to(dtype)


class Rounded(nn.Linear):
    # the product of rounded factors, with the gradients of the exact one
    def forward(self, x):
        exact = nn.functional.linear(x, self.weight)
        (a, of_a), (b, of_b) = rounded(x.detach().flatten(0, 1)), rounded(self.weight.detach())
        product = ((a @ b.t()) * of_a * of_b.t()).view(exact.shape)
        product = exact + (product - exact).detach()
        return product if self.bias is None else product + self.bias


register_packed_attention()
generator = torch.Generator().manual_seed(0)
row = pack([torch.randint(0, 128, (n,), generator=generator).numpy() for n in (5, 6, 3)], [3, 4, 2])
for kind in ("qwen3", "qwen2"):
    exact = build_model(kind)
    exact.set_attn_implementation(ATTENTION_NAME)
    fused, spelled = copy.deepcopy(exact), copy.deepcopy(exact)
    fuse_layers(fused, in_float8=True)
    for layer in spelled.model.layers:
        for linear in (module for module in layer.modules() if isinstance(module, nn.Linear)):
            linear.__class__ = Rounded
    found = []
    for model in (spelled, fused, exact):
        log_probs, _ = PolicyModel(model)(row)
        (log_probs * torch.linspace(-1, 1, len(log_probs))).sum().backward()
        found.append((log_probs.detach(), {name: one.grad for name, one in model.named_parameters()}))
    (wanted, gradients), (got, own), (plain, _) = found
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-3)
    assert 1e-5 < (got - plain).abs().mean() < 0.05, (got - plain).abs().mean()
    for name, gradient in gradients.items():
        apart = (own[name] - gradient).norm() / gradient.norm()
        assert apart < 1e-2, (kind, name, apart)
    print(kind, "right")
"""


@pytest.mark.kernels
def test_fp8_layers_use_quantized_products_and_exact_gradients() -> None:
    assert run_interpreted(PROGRAM).splitlines() == ["rows right", "qwen3 right", "qwen2 right"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"device": "cpu"}, "--fp8 needs an NVIDIA GPU with units for 8-bit floats, but --device cpu is given"),
        ({"dtype": "float32"}, "--fp8 needs --dtype bfloat16, but --dtype float32 is given: drop one"),
        ({"lora_rank": 4}, "--fp8 is for training all weights, but --lora-rank 4 trains an adapter: drop one"),
    ],
)
def test_rejects_flags_incompatible_with_fp8(flags: dict[str, object], sentence: str) -> None:
    given = {"device": "cuda", "dtype": "bfloat16", **flags}
    valid = {"hf_checkpoint": "m", "prompt_data": "p", "rollout_batch_size": 1, "num_rollout": 1}
    config = derive(Config(**valid, **given))  # type: ignore[arg-type]
    check_contradictions(config)
    with pytest.raises(UserError, match=sentence):
        check_contradictions(config.replace(fp8=True))


@pytest.mark.parametrize(
    ("kind", "capability", "dtype", "sentence"),
    [
        ("qwen3", (8, 0), torch.bfloat16, "compute capability 8.9 or newer, and a card has 8.0: drop it"),
        ("qwen3", (9, 0), torch.float32, "goes with --dtype bfloat16, and this run computes in float32: change one"),
        ("gemma2", (9, 0), torch.bfloat16, "layers of Llama, Mistral, Qwen2, Qwen3, and this is a Gemma2ForCausalLM"),
        ("odd", (9, 0), torch.bfloat16, "multiples of 16, and mlp.gate_proj.weight is 120 x 64: drop it"),
        ("qwen3", (8, 9), torch.bfloat16, None),
    ],
)
def test_rejects_gpus_and_models_without_fp8_support(
    monkeypatch: pytest.MonkeyPatch, kind: str, capability: tuple[int, int], dtype: torch.dtype, sentence: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    model = build_model("qwen3" if kind == "odd" else kind)
    if kind == "odd":
        for layer in model.model.layers:
            layer.mlp.gate_proj = torch.nn.Linear(64, 120, bias=False)
    if sentence is None:
        check_float8(model, dtype, torch.device("cuda"))
        return
    with pytest.raises(UserError, match=sentence):
        check_float8(model, dtype, torch.device("cuda"))


def test_rejects_fp8_on_cpu() -> None:
    with pytest.raises(UserError, match="--fp8 needs an NVIDIA GPU with units for 8-bit floats, and this run trains"):
        check_float8(build_model("qwen3"), torch.bfloat16, torch.device("cpu"))
