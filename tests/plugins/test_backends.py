"""`slime.backends.megatron_utils`: values of the helpers, and a custom loss that equals the built-in loss."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.cp_utils import (
    all_gather_with_cp,
    get_logits_and_tokens_offset_with_cp,
    get_sum_of_sample_mean,
    slice_log_prob_with_cp,
    slice_with_cp,
)
from slime.backends.megatron_utils.data import DataIterator, get_batch
from slime.backends.megatron_utils.loss import (
    compute_advantages_and_returns,
    get_log_probs_and_entropy,
    get_responses,
    get_values,
    icepop_function,
    sft_loss_function,
    value_loss_function,
    vanilla_tis_function,
)
from slime.errors import UserError
from tests.train.in_process import InProcess, config_for
from tests.train.tiny_training import build_model, make_samples

LOSS = f"{Path(__file__).parents[1] / 'migration' / 'plugins' / 'custom_loss.py'}:loss_function"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    build_model("qwen3").save_pretrained(folder)
    return folder


# custom loss of an upstream user compared with the built-in objective


@pytest.mark.parametrize(
    "flags",
    [
        {"advantage_estimator": "grpo", "eps_clip_c": 3.0},
        {"advantage_estimator": "gspo", "eps_clip": 0.01},
        {
            "use_kl_loss": True,
            "kl_loss_coef": 0.3,
            "kl_loss_type": "k3",
            "entropy_coef": 0.1,
            "rollout_temperature": 0.8,
        },
        {"calculate_per_token_loss": True},
    ],
    ids=["grpo", "gspo", "kl_entropy_temperature", "per_token"],
)
def test_custom_loss_of_an_upstream_user_matches_the_built_in_loss(
    flags: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    """Runs two updates on one rollout, so that the ratios of the second one differ from 1."""
    flags = flags | {"rollout_batch_size": 4, "num_steps_per_rollout": 2, "lr": 0.01}

    def steps(**more: Any) -> list[dict[str, float]]:
        run = InProcess(config_for(model, tmp_path, **flags, **more))
        return run.train(0, make_samples(4, 3))["metrics"]

    own = steps()
    theirs = steps(loss_type="custom_loss", custom_loss_function_path=LOSS)
    assert len(own) == len(theirs) == 2
    for mine, found in zip(own, theirs, strict=True):
        for name in ("train/loss", "train/pg_loss", "train/grad_norm", "train/pg_clipfrac"):
            assert found[name] == pytest.approx(mine[name], rel=2e-4, abs=1e-6), name
        assert found["train/shipped_loss"] == pytest.approx(mine["train/loss"], rel=2e-4, abs=1e-6)
    assert max(abs(step["train/loss"]) for step in own) > 1e-3


def test_sft_and_value_losses_match_hand_computed_values() -> None:
    batch = {
        "unconcat_tokens": [torch.tensor([1, 2, 0]), torch.tensor([3, 1])],
        "total_lengths": [3, 2],
        "response_lengths": [2, 1],
        "loss_masks": [torch.tensor([1.0, 1.0]), torch.tensor([1.0])],
        "values": [torch.tensor([0.0, 0.5]), torch.tensor([1.0])],
        "returns": [torch.tensor([1.0, 1.0]), torch.tensor([0.0])],
    }
    logits = torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    reducer = get_sum_of_sample_mean([3, 2], [2, 1], batch["loss_masks"])
    args = Namespace(rollout_temperature=0.5, log_probs_chunk_size=-1, value_clip=0.2)
    loss, metrics = sft_loss_function(args, batch, logits, reducer)
    log_p = torch.log_softmax(logits[0], -1)
    wanted = -(log_p[0, 2] + log_p[1, 0]) / 2 - log_p[3, 1]
    torch.testing.assert_close(loss, wanted)
    assert metrics["loss"].item() == pytest.approx(wanted.item())
    (got,) = torch.autograd.grad(loss, logits)
    assert got[0, 2].abs().sum() == got[0, 4].abs().sum() == 0.0  # last tokens of the sequences predict nothing
    values = torch.tensor([[[0.3], [0.6], [9.0], [0.9], [9.0]]])
    loss, metrics = value_loss_function(args, batch, values, reducer)
    first = (max((0.3 - 1) ** 2, (0.2 - 1) ** 2) + max((0.6 - 1) ** 2, (0.6 - 1) ** 2)) / 2
    assert loss.item() == pytest.approx(first + 0.9**2)
    assert metrics["value_clipfrac"].item() == pytest.approx(0.5)


def test_responses_log_probs_and_values_use_the_right_positions() -> None:
    logits = torch.randn(1, 6, 4, generator=torch.Generator().manual_seed(1))  # the last position is padding
    call = {
        "args": Namespace(rollout_temperature=0.5, log_probs_chunk_size=1),
        "unconcat_tokens": [torch.tensor([1, 2, 0]), torch.tensor([3, 1])],
        "total_lengths": [3, 2],
        "response_lengths": [2, 1],
    }
    (first, tokens), (second, others) = get_responses(logits, **call)
    torch.testing.assert_close(first, logits[0, 0:2] / 0.5)
    torch.testing.assert_close(second, logits[0, 3:4] / 0.5)
    assert (tokens.tolist(), others.tolist()) == ([2, 0], [1])
    _, found = output = get_log_probs_and_entropy(logits, with_entropy=True, **call)
    log_p = torch.log_softmax(logits[0] / 0.5, -1)
    torch.testing.assert_close(found["log_probs"][0], torch.stack([log_p[0, 2], log_p[1, 0]]))
    torch.testing.assert_close(found["entropy"][1], -(log_p.exp() * log_p).sum(-1)[3:4])
    assert output["log_probs"] is found["log_probs"]  # older versions returned a dict
    assert "entropy" not in get_log_probs_and_entropy(logits, **call)[1]
    _, values = get_values(torch.arange(5.0)[None, :, None], **call)
    assert [part.tolist() for part in values["values"]] == [[0.0, 1.0], [3.0]]
    with pytest.raises(UserError, match=r"logits of shape \[1, 4, 4\] do not match 5 tokens"):
        get_log_probs_and_entropy(logits[:, :4], **call)


def test_vanilla_tis_and_icepop_weights_match_the_formulas() -> None:
    args = Namespace(tis_clip=1.5, tis_clip_low=0.5)
    train, rollout = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.2, -3.0, -0.1])
    call = {
        "pg_loss": torch.tensor([1.0, 2.0, 3.0]),
        "train_log_probs": list(train.split([2, 1])),
        "rollout_log_probs": list(rollout.split([2, 1])),
        "loss_masks": [torch.tensor([1, 1]), torch.tensor([1])],
        "total_lengths": [4, 3],
        "response_lengths": [2, 1],
    }
    ratio = (train - rollout).exp()
    loss, masks, metrics = vanilla_tis_function(args, **call)
    assert loss.tolist() == pytest.approx([ratio[0].item(), 2 * 1.5, 3 * 0.5])
    assert masks is call["loss_masks"]
    assert metrics["tis_clipfrac"].tolist() == [0.0, 1.0, 1.0]
    torch.testing.assert_close(metrics["tis"], ratio)
    loss, _, metrics = icepop_function(args, **call)
    assert loss.tolist() == pytest.approx([ratio[0].item(), 0.0, 0.0])
    torch.testing.assert_close(metrics["tis_abs"], (ratio - 1).abs())


def test_advantages_of_user_columns_are_whitened(model: Path, tmp_path: Path) -> None:
    config = config_for(model, tmp_path, advantage_estimator="reinforce_plus_plus", normalize_advantages=True)
    data: dict[str, Any] = {
        "rewards": [1.0, 0.0],
        "response_lengths": [2, 1],
        "total_lengths": [4, 3],
        "loss_masks": [torch.ones(2), torch.ones(1)],
    }
    compute_advantages_and_returns(config, data)
    advantages = torch.cat(data["advantages"])
    assert advantages.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert advantages.std().item() == pytest.approx(1.0, abs=1e-5)


# context-parallel parts of a sequence


@pytest.mark.parametrize(("total", "response"), [(9, 4), (12, 11), (5, 1), (7, 3)])
def test_both_chunks_of_one_rank_predict_the_whole_response(total: int, response: int) -> None:
    length, chunks, logits, tokens = get_logits_and_tokens_offset_with_cp(total, response)
    assert chunks == ((0, length), (length, 2 * length))
    assert 2 * length - total in (0, 1)
    for spans, first in ((logits, total - response - 1), (tokens, total - response)):
        places = [place for begin, end in spans for place in range(begin, end)]
        assert places == list(range(first, first + response))
    inside = zip(logits, chunks, strict=True)
    assert all(begin == end == 0 or chunk[0] <= begin < end <= chunk[1] for (begin, end), chunk in inside)


def test_context_parallel_helpers_keep_the_whole_on_one_rank() -> None:
    length, chunks, logits, tokens = get_logits_and_tokens_offset_with_cp(9, 4)
    assert (length, chunks) == (5, ((0, 5), (5, 10)))
    assert (logits, tokens) == (((4, 5), (5, 8)), ((5, 6), (6, 9)))
    values = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    assert all_gather_with_cp(values, 9, 4) is values
    assert slice_log_prob_with_cp(values, 9, 4) is values
    assert slice_log_prob_with_cp([1.0, 2.0], 9, 2) == [1.0, 2.0]
    assert slice_with_cp(torch.arange(9), 0).tolist() == list(range(9))
    with pytest.raises(UserError, match="3 values for a response of 4 tokens"):
        slice_log_prob_with_cp(values[:3], 9, 4)
    with pytest.raises(UserError, match="rows are packed here"):
        slice_with_cp(torch.arange(9), 0, "bshd")


def test_sum_of_sample_mean_with_masks_and_denominators() -> None:
    masks = [torch.tensor([1, 0, 1]), torch.tensor([0]), torch.tensor([1, 1])]
    values = torch.tensor([1.0, float("nan"), 4.0, 7.0, 3.0, 5.0])
    assert get_sum_of_sample_mean([5, 2, 4], [3, 1, 2], masks)(values).item() == pytest.approx(2.5 + 0 + 4)
    assert get_sum_of_sample_mean([5, 2, 4], [3, 1, 2], masks, None, True)(values).item() == pytest.approx(5 + 8)
    assert get_sum_of_sample_mean([5, 2, 4], [3, 1, 2], masks, True)(values).item() == pytest.approx(5 + 8)
    denoms = torch.tensor([4.0, 4.0, 2.0])  # mask sums of the rollouts that the samples belong to
    for shared in (denoms, list(denoms)):
        assert get_sum_of_sample_mean([5, 2, 4], [3, 1, 2], masks, shared)(values).item() == pytest.approx(5 / 4 + 4)
        by_token = get_sum_of_sample_mean([5, 2, 4], [3, 1, 2], masks, shared, True)
        assert by_token(values).item() == pytest.approx(5 + 8)
    with pytest.raises(UserError, match="2 sample_denoms for 3 samples"):
        get_sum_of_sample_mean([5, 2, 4], [3, 1, 2], masks, denoms[:2])


def test_get_batch_packs_and_pads_micro_batches() -> None:
    data = {
        "tokens": [torch.tensor([1, 2, 3]), torch.tensor([4, 5]), torch.tensor([6, 7, 8, 9])],
        "total_lengths": [3, 2, 4],
        "response_lengths": [2, 1, 2],
        "loss_masks": [torch.tensor([1, 0]), torch.tensor([1]), torch.tensor([1, 1])],
    }
    iterator = DataIterator(data, micro_batch_indices=[[0, 2], [1]])
    keys = ["tokens", "loss_masks", "total_lengths", "response_lengths", "values"]
    batch = get_batch(iterator, keys, pad_multiplier=8)
    assert batch["tokens"].tolist() == [[1, 2, 3, 6, 7, 8, 9, 0]]
    assert batch["full_loss_masks"].tolist() == [[1, 0, 0, 0, 1, 1, 0, 0]]
    assert batch["packed_seq_params"].cu_seqlens_q.tolist() == [0, 3, 7, 8]
    assert batch["values"] is None
    assert [tokens.tolist() for tokens in batch["unconcat_tokens"]] == [[1, 2, 3], [6, 7, 8, 9]]
    assert get_batch(iterator, keys, pad_multiplier=2)["packed_seq_params"].cu_seqlens_kv.tolist() == [0, 2]
    assert iterator.reset().get_next(["total_lengths"]) == {"total_lengths": [3, 4]}
    by_two = DataIterator(data, micro_batch_size=2)
    assert [by_two.get_next(["total_lengths"])["total_lengths"] for _ in range(2)] == [[3, 2], [4]]
    with pytest.raises(UserError, match="name 'tokens' among the keys"):
        get_batch(iterator, ["values"])


@pytest.mark.filterwarnings("error:FSDP2-wrapped module")
def test_custom_loss_may_change_the_logits_in_place(model: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "in_place.py"
    plugin.write_text(
        "from slime.backends.megatron_utils.loss import sft_loss_function\n\n\n"
        "def plain(args, batch, logits, sum_of_sample_mean):\n"
        "    return sft_loss_function(args, batch, logits / 0.7, sum_of_sample_mean)\n\n\n"
        "def in_place(args, batch, logits, sum_of_sample_mean):\n"
        "    logits.div_(0.7)\n"
        "    return sft_loss_function(args, batch, logits, sum_of_sample_mean)\n"
    )

    def step(name: str) -> tuple[float, dict[str, torch.Tensor]]:
        flags = {"loss_type": "custom_loss", "custom_loss_function_path": f"{plugin}:{name}"}
        run = InProcess(config_for(model, tmp_path, **flags))
        return run.train(0, make_samples(3, 3))["metrics"][0]["train/grad_norm"], run.weights

    (norm, weights), (other_norm, others) = step("plain"), step("in_place")
    assert other_norm == pytest.approx(norm, rel=1e-5)
    assert all(torch.allclose(tensor, others[name], atol=1e-6) for name, tensor in weights.items())
