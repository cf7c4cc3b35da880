"""Tests `--share-prompts`: tokens of a shared prompt are computed once and the results do not change."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.config.parallelism import shares_prompts
from slime.config.resolve import check_contradictions
from slime.data.sample import Sample
from slime.errors import UserError
from slime.train.backends.fsdp.backend import recompute_layers
from slime.train.backends.fsdp.shared_prompt_ops import expand_to_row, select_first_copies
from slime.train.samples.micro_batch import Routing
from slime.train.samples.packing import PackedRow, common_beginnings, pack
from tests.train.in_process import InProcess, config_for
from tests.train.test_packed import packed_policy
from tests.train.tiny_training import CONFIGS, SPARSE_CONFIGS, make_samples
from tests.triton_interpreter import run_interpreted

RESPONSES = (4, 3, 5, 6, 2, 1)
WHOLE_SEQUENCES = {"qwen3_next", "qwen3_5", "llama_dynamic", "phi3_longrope", "glm_moe_dsa"}


def sequences() -> list[np.ndarray]:
    """Make three samples of one prompt, two of a prefix of it, and one of another prompt."""
    rng = np.random.default_rng(4)
    long, short = rng.integers(0, 128, 9), rng.integers(0, 128, 3)
    prompts = [long, long, long[:7], long, long[:7], short]
    return [np.concatenate([p, rng.integers(0, 128, n)]) for p, n in zip(prompts, RESPONSES, strict=True)]


def make_row(*, share: bool, multiple: int = 1) -> PackedRow:
    return pack(sequences(), RESPONSES, multiple=multiple, share_prompts=share)


def test_packed_row_marks_shared_prompt_copies() -> None:
    row = make_row(share=True, multiple=8)
    shared, tokens = row.shared, row.tokens[0]
    assert shared is not None
    assert row.num_tokens == 72  # 65, and 7 of padding
    assert len(shared.first) == 72 - 9 - 9 - 7 - 7
    assert torch.equal(tokens[shared.first][shared.place], tokens)
    assert torch.equal(row.position_ids[0][shared.first][shared.place], row.position_ids[0])
    assert torch.equal(shared.first, shared.first.sort().values)
    again = [shared.copies[a:b].tolist() for a, b in zip(shared.starts[:-1], shared.starts[1:], strict=True)]
    assert [copies[0] for copies in again] == shared.first.tolist()
    assert sorted(copy for copies in again for copy in copies) == list(range(72))
    assert all(shared.place[copy] == i for i, copies in enumerate(again) for copy in copies)
    assert again[0] == [0, 13, 25, 37, 52]  # the first token of the long prompt and of its prefix
    assert torch.equal(tokens, make_row(share=False, multiple=8).tokens[0])  # the row keeps all tokens


def test_prompts_are_not_shared_for_few_copies() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 128, 4)
    long = [np.concatenate([prompt, rng.integers(0, 128, 30)]) for _ in range(2)]
    assert pack(long, [30, 30], share_prompts=True).shared is None  # 4 of 68
    assert pack([long[0][:9], long[1][:9]], [5, 5], share_prompts=True).shared is not None  # 4 of 18
    assert pack([long[0], long[0]], [30, 29], share_prompts=True).shared is not None  # the same sequence twice


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=8))
def test_common_prefix_is_longest_over_earlier_sequences(lists: list[list[int]]) -> None:
    sequences = [np.array(tokens) for tokens in lists]
    for index, (lender, length) in enumerate(common_beginnings(sequences)):
        alike = [
            sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(lists[index], other, strict=False)))
            for other in lists[:index]
        ]
        assert length == max(alike, default=0)
        assert length == 0 or alike[lender] == length


def test_forked_conversation_shares_tokens_up_to_the_fork() -> None:
    """The shared turns are mostly response tokens in one sample and prompt tokens in the other."""
    rng = np.random.default_rng(0)
    turns = rng.integers(0, 128, 12)
    forks = [np.concatenate([turns[:10], [1, 2, 3]]), np.concatenate([turns, [4, 5]])]
    assert turns[10] != 1
    plain, shared = (pack(forks, [9, 4], share_prompts=share) for share in (False, True))
    assert shared.shared is not None
    assert len(shared.shared.first) == plain.num_tokens - 10
    policy = packed_policy("qwen3")
    (wanted, gradients), (found, again) = (outputs_and_gradients(policy, row) for row in (plain, shared))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    for got, want in zip(again, gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)


def outputs_and_gradients(policy: Any, row: PackedRow, **keywords: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    policy.zero_grad()
    log_probs, entropy = policy(row, **keywords)
    (log_probs * torch.linspace(-1, 1, len(log_probs)) + 0.1 * entropy).sum().backward()
    gradients = [p.grad.clone() for p in policy.parameters() if p.grad is not None]
    return torch.cat([log_probs, entropy]).detach(), gradients


@pytest.mark.parametrize("kind", [*CONFIGS, *SPARSE_CONFIGS])
def test_shared_prompts_match_whole_sequences(kind: str) -> None:
    policy = packed_policy(kind, temperature=0.8)
    seen: list[int] = []
    policy.model.get_input_embeddings().register_forward_hook(lambda m, i, out: seen.append(out.shape[1]))
    (plain, wanted), (shared, found) = (outputs_and_gradients(policy, make_row(share=share)) for share in (False, True))
    assert seen == [65, 65 if kind in WHOLE_SEQUENCES else 33]
    torch.testing.assert_close(shared, plain, rtol=0, atol=1e-5)
    assert len(found) == len(wanted) > 0
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)


def test_shared_prompts_with_recompute_are_bitwise_equal() -> None:
    policy = packed_policy("qwen3")
    row = make_row(share=True)
    _, once = outputs_and_gradients(policy, row)
    recompute_layers(policy.model)
    _, twice = outputs_and_gradients(policy, row)
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


def test_shared_prompts_return_logits_of_the_whole_row() -> None:
    policy = packed_policy("qwen3")
    plain, shared = (policy(make_row(share=share), reads="logits")[0] for share in (False, True))
    assert shared.shape == (1, 65, 128)
    torch.testing.assert_close(shared, plain, rtol=0, atol=1e-5)


def test_routing_replay_computes_every_prompt_copy() -> None:
    """Engines may route copies of a prompt to different experts, so each copy is computed."""
    policy = packed_policy("qwen3_moe")
    policy.enable_routing_replay()
    seen: list[int] = []
    policy.model.get_input_embeddings().register_forward_hook(lambda m, i, out: seen.append(out.shape[1]))
    policy(make_row(share=True), routing=Routing())
    assert seen == [65]


def test_gradients_of_prompt_copies_are_summed() -> None:
    shared = make_row(share=True).shared
    assert shared is not None
    computed = torch.randn(33, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: expand_to_row(x, shared).sin(), computed.float(), eps=1e-2, atol=1e-2)
    grad = torch.randn(65, 3, 2)
    expand_to_row(computed.float(), shared).backward(grad)
    assert computed.grad is not None
    wanted = torch.stack([grad[shared.place == i].sum(0) for i in range(33)])
    torch.testing.assert_close(computed.grad.float(), wanted)
    whole = torch.randn(65, 4, requires_grad=True)
    select_first_copies(whole, shared).sum().backward()
    assert whole.grad is not None
    assert whole.grad.sum(1).nonzero()[:, 0].tolist() == shared.first.tolist()


KERNEL = """
import torch
from slime.train.backends.fsdp.shared_prompt_ops import sum_of_copies, to_first_copies
from slime.train.backends.fsdp.fused.kernels import add_copies, put_first
from tests.train.test_shared_prompts import make_row
shared = make_row(share=True).shared
torch.manual_seed(0)
for shape, dtype in (((65, 3, 5), torch.float32), ((65, 1500), torch.bfloat16), ((65, 2, 4), torch.float32)):
    grad = torch.randn(*shape).to(dtype)
    grad = grad.transpose(0, 1).contiguous().transpose(0, 1)  # as attention hands it back
    found = add_copies(grad, shared.copies, shared.starts)
    assert found.dtype == dtype
    rounding = 0 if dtype == torch.float32 else 2**-7  # the interpreter has one of its own
    torch.testing.assert_close(found, sum_of_copies(grad, shared), rtol=rounding, atol=0)
    computed = found.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(put_first(computed, shared.place, shared.first), to_first_copies(computed, shared))
print("right")
"""


@pytest.mark.kernels
def test_copy_kernels_match_cpu_implementation() -> None:
    assert run_interpreted(KERNEL) == "right\n"


def groups_of_one_prompt(rollout_id: int) -> list[list[Sample]]:
    groups = make_samples(3, 3, seed=rollout_id)
    for first, *others in groups:
        prompt = first.tokens[: -first.response_length]
        for one in others:
            one.tokens = prompt + one.tokens[-one.response_length :]
    return groups


@pytest.mark.parametrize("more", [{}, {"advantage_estimator": "ppo", "kl_loss_coef": 0.0}], ids=["grpo", "ppo"])
def test_trainer_steps_match_without_shared_prompts(
    more: dict[str, Any], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    flags = {"use_kl_loss": True, "kl_loss_coef": 0.05, "entropy_coef": 0.01, "lr": 1e-4, "micro_batch_size": 9, **more}
    found = []
    for share in (False, True):
        one = InProcess(config_for(model_folder("qwen3"), tmp_path, share_prompts=share, **flags))
        results = [one.train(rollout_id, groups_of_one_prompt(rollout_id)) for rollout_id in range(2)]
        found.append(([step for result in results for step in result["metrics"]], one.weights))
    (plain, weights), (shared, again) = found
    for step, wanted in zip(shared, plain, strict=True):
        assert step == pytest.approx(wanted, abs=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(
            again[name], tensor, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_prompt_sharing_is_on_by_default_unless_unsupported(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    config = config_for(model_folder("qwen3"), tmp_path)
    assert shares_prompts(config)
    assert not shares_prompts(config.replace(share_prompts=False))
    for flags in ({"context_parallel_size": 2}, {"use_routing_replay": True}, {"train_backend": "megatron"}):
        assert not shares_prompts(config.replace(**flags))


def test_unsupported_model_trains_without_prompt_sharing(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    found = []
    for share in (None, False):
        one = InProcess(config_for(model_folder("qwen3_5"), tmp_path, share_prompts=share, micro_batch_size=9))
        found.append(one.train(0, groups_of_one_prompt(0))["metrics"])
    assert found[0] == found[1]


def test_rejects_share_prompts_for_unsupported_models(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Qwen3_5ForCausalLM has PackedDeltaNet as well: drop the flag"):
        InProcess(config_for(model_folder("qwen3_5"), tmp_path, share_prompts=True))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            {"context_parallel_size": 2, "actor_num_gpus_per_node": 2},
            "cannot be combined with --context-parallel-size 2",
        ),
        ({"use_routing_replay": True}, "cannot be combined with routing replay"),
    ],
)
def test_rejects_flags_incompatible_with_share_prompts(
    flags: dict[str, Any], reason: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    config = config_for(model_folder("qwen3_moe"), tmp_path, share_prompts=True, **flags)
    with pytest.raises(UserError, match=f"--share-prompts {reason}.*drop one"):
        check_contradictions(config.replace(prompt_data="any.jsonl"))
