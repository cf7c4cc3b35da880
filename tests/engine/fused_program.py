"""Compare bodies of fused kernels with transformers in fp32, in a separate process under Triton's interpreter.

Prints the worst error of each case named on the command line.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from triton.runtime.interpreter import InterpretedFunction

from slime.engine.embedded.fused.model import FusedModel, compile_kernels
from slime.engine.embedded.fused.supported_models import block_of, together
from slime.engine.embedded.model.attention import AttentionContext
from slime.engine.embedded.model.prefill_kernels import ExtendTiles

TINY: dict[str, Any] = {
    "vocab_size": 70, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.2,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"tie_word_embeddings": True, "num_hidden_layers": 1}),
    "qwen2": ("qwen2", {"head_dim": 24, "num_attention_heads": 6, "num_hidden_layers": 1}),
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4, "num_hidden_layers": 1}),
    "mistral": ("mistral", {"sliding_window": 9, "hidden_size": 520, "intermediate_size": 40, "num_hidden_layers": 1}),
    "long": ("qwen3", {"num_hidden_layers": 1}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
}
LENGTHS = {"long": (75, 2, 3)}
CONTEXT = 256


class Batch(NamedTuple):
    rows: torch.Tensor
    lens: torch.Tensor
    slots: torch.Tensor
    known: torch.Tensor
    tokens: torch.Tensor


def folder_tensors(model: PreTrainedModel, groups: list[list[str]]) -> dict[str, torch.Tensor]:
    """Tensors under their checkpoint names; those of one group are contiguous in memory."""
    tensors = dict(revert_weight_conversion(model, dict(model.state_dict())))
    for names in groups:
        whole = torch.cat([tensors[name] for name in names])
        tensors |= zip(names, whole.split([len(tensors[name]) for name in names]), strict=True)
    return tensors


def worst_error(case: str) -> float:
    torch.manual_seed(0)
    model_type, own = CASES[case]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**TINY, **own})).float().eval()
    block = block_of(model.config.to_dict())
    for parameter in model.parameters():
        centre = 1.0 if parameter.dim() == 1 else 0.0
        torch.nn.init.normal_(parameter, centre, 0.2 * (48 / block.hidden) ** 0.5)
    tensors = folder_tensors(model, together(block))
    context = AttentionContext(torch.device("cpu"))
    lengths = LENGTHS.get(case, (3, 12, 2))
    slots = sum(lengths) + 3 * len(lengths)
    for layer in range(block.layers):
        context.keys[layer], context.values[layer] = (
            torch.full((block.kv_heads, slots + 1, block.head_dim), float("nan")) for _ in range(2)
        )
    context.table = torch.zeros(5, CONTEXT, dtype=torch.int32)
    body = FusedModel(block, tensors, context, most=4, positions=CONTEXT)
    order = iter((torch.randperm(slots) + 1).tolist())
    ids = [torch.randint(0, block.vocab, (n + 2,)) for n in lengths]
    with torch.inference_mode():
        wanted = [model(one[None]).logits[0].float().log_softmax(-1) for one in ids]
        rows = [3, 0, 2]
        kept = [torch.tensor([next(order) for _ in range(n)]) for n in lengths]
        for row, where in zip(rows, kept, strict=True):
            context.table[row, : len(where)] = where.int()
        tiles = ExtendTiles.build(rows, list(lengths), list(lengths), torch.device("cpu"))
        hidden = body.extend(
            torch.cat([one[:n] for one, n in zip(ids, lengths, strict=True)]),
            torch.cat([torch.arange(n) for n in lengths]), torch.cat(kept), tiles,
        )  # fmt: skip
        found = body.logits(hidden).log_softmax(-1).split(list(lengths))
        worst = max((f - w[: len(f)]).abs().max().item() for f, w in zip(found, wanted, strict=True))
        tokens = torch.full((5,), -7, dtype=torch.int64)
        for members in ([0], [1, 2, 0]):  # products differ by batch size; the second batch has a device-only token
            step = 0 if members == [0] else 1
            at = [lengths[i] + (step if i == 0 else 0) for i in members]
            known = torch.tensor([ids[i][n] for i, n in zip(members, at, strict=True)])
            if step:  # the last token of the first sequence is known on the device only
                tokens[rows[members[0]]], known[0] = known[0].clone(), -1
            batch = Batch(
                torch.tensor([rows[i] for i in members]), torch.tensor(at) + 1,
                torch.tensor([next(order) for _ in members]), known, tokens,
            )  # fmt: skip
            logits = body.decode(batch).log_softmax(-1)
            assert context.table[batch.rows, batch.lens - 1].tolist() == batch.slots.tolist()
            for i, n, mine in zip(members, at, logits, strict=True):
                worst = max(worst, (mine - wanted[i][n]).abs().max().item())
        assert not body._scratch.counts.any()
    return worst


def compiled_only() -> set[str]:
    """Names of the kernels that `compile_kernels` compiles; no kernel runs."""
    asked: set[str] = set()

    def warmup(self: Any, *args: Any, grid: Any, **how: Any) -> None:
        asked.add(self.fn.__name__)
        if self.fn.__name__ == "_add_norm_kernel":  # dtype of the addend and of the residual stream
            assert args[1] == torch.float32, args

    InterpretedFunction.warmup = warmup
    facts = AutoConfig.for_model("qwen3", **TINY).to_dict()
    compile_kernels(block_of(facts), torch.bfloat16, most=4, positions=CONTEXT)
    return asked


def main() -> None:
    print("compiled", ",".join(sorted(compiled_only())), flush=True)
    for name in sys.argv[1:]:
        print(name, worst_error(name), flush=True)
