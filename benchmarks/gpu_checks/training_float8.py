"""`--fp8` in training: products against the same rounded rows in float32, layers against bfloat16 ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from slime.train.backends.fsdp.attention import ATTENTION_NAME, register_packed_attention
from slime.train.backends.fsdp.fused.layer import check_float8, fuse_layers
from slime.train.backends.fsdp.packed_model import PolicyModel
from slime.train.samples.packing import pack

_SIZES = {
    "vocab_size": 1000,
    "hidden_size": 384,
    "intermediate_size": 1104,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
_LENGTHS = (300, 7, 129)


def checks() -> Iterator[tuple[str, float, float]]:
    yield from _products()
    yield from _layers()


def _products() -> Iterator[tuple[str, float, float]]:
    from slime.train.backends.fsdp.fused import matmul_kernels

    torch.manual_seed(0)
    for rows, inner, columns in ((300, 384, 1104), (1, 1024, 4096), (4097, 3072, 1024)):
        left, right = (torch.randn(size, inner, device="cuda").bfloat16() for size in (rows, columns))
        left[0] *= 1e3
        for name, factor in (("left", left), ("right", right)):
            codes, _ = matmul_kernels.quantize(factor)
            wanted = (factor.float() / (factor.float().abs().amax(1, keepdim=True) / matmul_kernels.LARGEST)).to(
                codes.dtype
            )
            differing = (codes.float() != wanted.float()).float().mean().item()
            yield f"differing codes of the {name} factor, {rows} x {inner} x {columns}", differing, 1e-3
        wide = [codes.float() * scales[:, None] for codes, scales in map(matmul_kernels.quantize, (left, right))]
        wanted = wide[0] @ wide[1].t()
        found = matmul_kernels.fp8_product(left, right).float()
        apart = ((found - wanted).norm(dim=1) / wanted.norm(dim=1)).max().item()
        yield f"products, worst row, {rows} x {inner} x {columns}", apart, 1e-2


def _layers() -> Iterator[tuple[str, float, float]]:
    register_packed_attention()
    torch.manual_seed(0)
    device = torch.device("cuda")
    config = Qwen3Config(**_SIZES)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=ATTENTION_NAME)
    exact = made.to(device, torch.bfloat16)
    rounded = copy.deepcopy(exact)
    fuse_layers(exact)
    check_float8(rounded, torch.bfloat16, device)
    fuse_layers(rounded, in_float8=True)
    tokens = [torch.randint(0, 1000, (length,)).numpy() for length in _LENGTHS]
    row = pack(tokens, [length - 2 for length in _LENGTHS], device)
    found = []
    for model in (exact, rounded):
        log_probs, _ = PolicyModel(model)(row)
        (log_probs * torch.linspace(-1, 1, len(log_probs), device=device)).sum().backward()
        found.append((log_probs.detach(), {name: one.grad.float() for name, one in model.named_parameters()}))
    (wanted, gradients), (values, own) = found
    yield "log-probs against bfloat16, mean", (values - wanted).abs().mean().item(), 0.05
    worst = max(((own[name] - one).norm() / one.norm()).item() for name, one in gradients.items())
    yield "gradients against bfloat16, worst", worst, 0.3
