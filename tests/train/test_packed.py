"""Tests that packed rows match separate sequences, also with recompute and batched attention."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from slime.algorithms.logprobs import linear_log_probs
from slime.errors import UserError
from slime.models.heads import OutputHead
from slime.train.backends import attention as causal
from slime.train.backends.attention import _batched_gpu_attention, causal_attention
from slime.train.backends.fsdp.attention import ATTENTION_NAME, attach_context, register_packed_attention
from slime.train.backends.fsdp.packed_model import PolicyModel
from slime.train.samples.packing import PackedLayout, pack
from slime.train.topology import Ranks
from tests.rows import long
from tests.train.tiny_training import CONFIGS, SPARSE_CONFIGS, WINDOWED_CONFIGS, build_model

IMPORTED = """
import sys, torch
from slime.train.backends.attention import prepare_attention
prepare_attention(torch.device(sys.argv[1]), torch.bfloat16)
print("torch.nn.attention.varlen" in sys.modules)
"""
LENGTHS = [(9, 4), (9, 3), (5, 1), (20, 12), (2, 1)]


def sequences() -> list[np.ndarray]:
    generator = np.random.default_rng(3)
    return [generator.integers(0, 128, length) for length, _ in LENGTHS]


def packed_policy(kind: str, **keywords) -> PolicyModel:
    register_packed_attention()
    model = build_model(kind)
    model.set_attn_implementation(ATTENTION_NAME)
    return PolicyModel(model, **keywords)


@pytest.mark.parametrize("kind", [*CONFIGS, *SPARSE_CONFIGS, *WINDOWED_CONFIGS])
def test_packed_row_matches_separate_sequences(kind) -> None:
    temperature = 0.8
    policy = packed_policy(kind, temperature=temperature)
    row = pack(sequences(), [response for _, response in LENGTHS])
    log_probs, entropy = policy(row)
    expected_log_probs, expected_entropy = [], []
    with torch.no_grad():
        for sequence, (_, response) in zip(sequences(), LENGTHS, strict=True):
            alone = build_model(kind)  # a new model each time: dynamic rope keeps the longest length seen
            tokens = torch.from_numpy(sequence)[None]
            log_p = torch.log_softmax(alone(input_ids=tokens).logits[0, -response - 1 : -1].double() / temperature, -1)
            expected_log_probs.append(log_p.gather(1, tokens[0, -response:, None])[:, 0])
            expected_entropy.append(-(log_p.exp() * log_p).sum(-1))
    torch.testing.assert_close(log_probs.double(), torch.cat(expected_log_probs), rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.double(), torch.cat(expected_entropy), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [*CONFIGS, *SPARSE_CONFIGS, *WINDOWED_CONFIGS])
def test_packed_gradients_match_sum_over_sequences(kind) -> None:
    responses = [response for _, response in LENGTHS]
    packed, single = packed_policy(kind), build_model(kind)
    packed(pack(sequences(), responses))[0].sum().backward()
    for sequence, response in zip(sequences(), responses, strict=True):
        alone, tokens = build_model(kind), torch.from_numpy(sequence)[None]
        log_p = torch.log_softmax(alone(input_ids=tokens).logits[0, -response - 1 : -1], -1)
        log_p.gather(1, tokens[0, -response:, None]).sum().backward()
        for parameter, more in zip(single.parameters(), alone.parameters(), strict=True):
            parameter.grad = more.grad if parameter.grad is None else parameter.grad + more.grad
    for (name, one), (_, other) in zip(packed.model.named_parameters(), single.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_bfloat16_on_cpu_keeps_dtype_and_is_close_to_float32() -> None:
    row = pack(sequences(), [response for _, response in LENGTHS])
    exact, rounded = packed_policy("llama"), packed_policy("llama").bfloat16()
    expected, got = exact(row)[0], rounded(row)[0]
    expected.sum().backward()
    got.sum().backward()
    torch.testing.assert_close(got, expected, rtol=0, atol=0.02)
    for (name, one), (_, other) in zip(rounded.named_parameters(), exact.named_parameters(), strict=True):
        assert one.grad.dtype == torch.bfloat16
        error = (one.grad.float() - other.grad).norm() / other.grad.norm()
        assert error < 0.03, f"{name}: {error}"


def test_batched_equal_lengths_match_causal_attention() -> None:
    torch.manual_seed(0)
    layout = pack([np.arange(6)] * 3, [2] * 3).layout
    rows = torch.randn(18, 8 * 16, requires_grad=True)
    query, key, value = (part.unflatten(1, (-1, 16)) for part in rows.split([4 * 16, 2 * 16, 2 * 16], dim=1))
    found, wanted = _batched_gpu_attention(query, key, value, 6, 0.3), causal_attention(query, key, value, layout, 0.3)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    ours, theirs = (torch.autograd.grad(out.square().sum(), rows, retain_graph=True)[0] for out in (found, wanted))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "count"),
    [
        ([6] * 3, 3),
        ([4] + [6] * 8, 8),
        ([4] + [6] * 31, 28),  # the other three go with the rest, which saves a plan
        ([4] + [6] * 3, 0),
        ([4] * 3 + [6] * 8, 0),  # fewer than seven eighths of the tokens
        ([6] * 9 + [4], 0),
        ([9], 0),
    ],
)
def test_equal_at_end_counts_batched_sequences(lengths: list[int], count: int) -> None:
    assert causal.equal_length_tail(lengths) == count


def test_gpu_attention_with_batched_tail_matches_causal_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layout = pack([np.arange(n) for n in (2, 3, *[6] * 22)], [1] * 24).layout
    asked = []

    def by_bounds(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float, _: None) -> Tensor:
        assert layout.cu_seqlens.tolist() == [0, *np.cumsum(layout.lengths)]
        assert layout.max_length == max(layout.lengths)
        asked.append(layout.lengths)
        return causal_attention(query, key, value, layout, scale)

    monkeypatch.setattr(causal, "_varlen_attention", by_bounds)
    rows = torch.randn(137, 8 * 16, requires_grad=True)
    heads = [part.unflatten(1, (-1, 16)) for part in rows.split([4 * 16, 2 * 16, 2 * 16], dim=1)]
    found = causal._gpu_attention(*heads, layout, 0.3, None, causal.equal_length_tail(layout.lengths))
    assert asked == [(2, 3, 6, 6)]
    wanted = causal_attention(*heads, layout, 0.3)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    ours, theirs = (torch.autograd.grad(out.square().sum(), rows, retain_graph=True)[0] for out in (found, wanted))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


class DeviceReads(TorchDispatchMode):
    """Counts scalar reads from the device and gradient copies made by indexing in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = self.filled = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.numbers += func is torch.ops.aten._local_scalar_dense.default
        self.filled += func is torch.ops.aten.select_backward.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2", "mistral_window"])
def test_pass_does_not_sync_with_device_or_copy_gradients(kind) -> None:
    policy, row = packed_policy(kind), pack(sequences(), [response for _, response in LENGTHS])
    with DeviceReads() as asked:
        policy(row)[0].sum().backward()
    assert (asked.numbers, asked.filled) == (0, 0)


def test_recompute_gives_identical_gradients() -> None:
    row = pack(sequences(), [response for _, response in LENGTHS])
    plain, again = packed_policy("qwen3"), packed_policy("qwen3")
    again.model.gradient_checkpointing_enable({"use_reentrant": False})
    again.model.train()
    for policy in (plain, again):
        policy(row)[0].sum().backward()
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_rejects_context_parallelism_with_sparse_attention() -> None:
    with pytest.raises(UserError, match="--context-parallel-size 2 needs full attention"):
        packed_policy("glm_moe_dsa").set_context_ranks(Ranks(0, 2, torch.device("cpu")))


def test_pack_sets_positions_bounds_and_targets() -> None:
    row = pack([np.array([5, 6, 7]), np.array([8, 9])], [2, 1])
    assert row.tokens.tolist() == [[5, 6, 7, 8, 9]]
    assert row.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert row.layout.cu_seqlens.tolist() == [0, 3, 5]
    assert row.predict_index.tolist() == [0, 1, 3]
    assert row.targets.tolist() == [6, 7, 9]


@pytest.mark.parametrize("response", [0, 3])
def test_pack_rejects_invalid_response_lengths(response) -> None:
    with pytest.raises(ValueError, match="cannot have"):
        pack([np.array([1, 2, 3])], [response])


def test_rejects_models_without_attention() -> None:
    from transformers import MambaConfig

    model = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(UserError, match="cannot train"):
        attach_context(model)


def test_output_head_from_config_per_family() -> None:
    from transformers import CohereConfig, GraniteConfig

    assert OutputHead.from_config(CONFIGS["qwen3"]()) == OutputHead(1.0, None)
    assert OutputHead.from_config(CONFIGS["gemma2"]()) == OutputHead(1.0, 30.0)
    assert OutputHead.from_config(CohereConfig(logit_scale=0.25)).scale == 0.25
    assert OutputHead.from_config(GraniteConfig(logits_scaling=8.0)).scale == 0.125


@pytest.mark.parametrize("kind", ["cohere", "granite"])
def test_output_head_reproduces_model_log_probs(kind) -> None:
    from transformers import CohereConfig, GraniteConfig

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = CohereConfig(**sizes, **heads) if kind == "cohere" else GraniteConfig(**sizes, **heads, logits_scaling=4.0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tokens = torch.arange(1, 7)[None]
    with torch.no_grad():
        hidden = model.base_model(input_ids=tokens).last_hidden_state[0]
        head = OutputHead.from_config(config)
        got, _ = linear_log_probs(
            hidden[:-1], model.lm_head.weight, None, tokens[0, 1:], scale=head.scale, softcap=head.softcap
        )
        expected = torch.log_softmax(model(input_ids=tokens).logits[0, :-1], -1).gather(1, tokens[0, 1:, None])[:, 0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("device", "is_imported"), [("cuda", True), long("cpu", False)])
def test_varlen_attention_is_imported_at_start_only_on_cuda(device: str, is_imported: bool) -> None:
    """The import takes two seconds: on a GPU it would delay the first such step; a CPU does not need it."""
    done = subprocess.run([sys.executable, "-c", IMPORTED, device], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(is_imported)]
