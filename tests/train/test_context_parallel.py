"""Tests that context parallelism matches one rank: values, logits and summed gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from slime.config import Config
from slime.errors import UserError
from slime.models.heads import put_value_head
from slime.train.backends.fsdp.attention import exchange_heads_for_tokens, exchange_tokens_for_heads
from slime.train.backends.fsdp.packed_model import ValueModel
from slime.train.samples.batch import flatten_samples, make_train_batch
from slime.train.samples.micro_batch import StepShare, make_micro_batch
from slime.train.samples.packing import PackedRow, pack
from slime.train.samples.rollout_data import batch_for_plugins, make_rollout_data
from slime.train.topology import Ranks, exchange, gather_parts
from tests.peers import together
from tests.rows import long
from tests.train.test_packed import LENGTHS, packed_policy, sequences
from tests.train.tiny_training import CONFIGS, make_samples

RESPONSES = [response for _, response in LENGTHS]


def packed_row(multiple: int) -> PackedRow:
    return pack(sequences(), RESPONSES, multiple=multiple)


def test_row_padding_is_a_separate_sequence() -> None:
    row = pack([np.array([5, 6, 7]), np.array([8, 9])], [2, 1], multiple=4)
    assert row.tokens.tolist() == [[5, 6, 7, 8, 9, 0, 0, 0]]
    assert row.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert row.layout.lengths == (3, 2, 3)
    assert row.layout.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert row.total_lengths == (3, 2)
    assert (row.predict_index.tolist(), row.targets.tolist()) == ([0, 1, 3], [6, 7, 9])
    assert pack([np.array([5, 6, 7, 8])], [1], multiple=4).layout.lengths == (4,)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_concatenated_row_parts_equal_the_row(size) -> None:
    row = packed_row(size)
    parts = [row.part(rank, size) for rank in range(size)]
    length = row.num_tokens // size
    for name in ("tokens", "position_ids"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts], dim=1), getattr(row, name))
    assert torch.equal(torch.cat([part.targets for part in parts]), row.targets)
    whole_index = torch.cat([part.predict_index + rank * length for rank, part in enumerate(parts)])
    assert torch.equal(whole_index, row.predict_index)
    for part in parts:
        assert part.counts == tuple(len(other.targets) for other in parts)
        assert part.tokens.shape[1] == length


def test_rejects_row_not_divisible_into_parts() -> None:
    with pytest.raises(ValueError, match="45 tokens cannot be split into 2 equal parts"):
        packed_row(1).part(0, 2)


def summed_gradients(ranks: Ranks, module: nn.Module) -> dict[str, Tensor]:
    """Sum the gradients over the ranks, as the sharding backend does."""
    return {name: ranks.sum(p.grad.clone()) for name, p in module.named_parameters() if p.grad is not None}


def assert_same_gradients(ranks: Ranks, shared: nn.Module, alone: nn.Module) -> None:
    got = summed_gradients(ranks, shared)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def compare_policies(ranks: Ranks, recompute: bool) -> None:
    for kind in CONFIGS:
        alone, shared = packed_policy(kind, temperature=0.8), packed_policy(kind, temperature=0.8)
        shared.set_context_ranks(ranks)
        if recompute:
            shared.model.gradient_checkpointing_enable({"use_reentrant": False})
            shared.model.train()
        expected, row = alone(packed_row(1)), packed_row(ranks.size)
        got = shared(row)
        mix = torch.linspace(-1, 2, len(row.targets))
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5, msg=lambda m, k=kind: f"{k}: {m}")
        for log_probs, entropy in (got, expected):
            (log_probs * mix + entropy * mix.flip(0)).sum().backward()
        assert_same_gradients(ranks, shared, alone)


@pytest.mark.parametrize(("count", "recompute"), [(4, True), long(2, False)])
def test_context_parallel_policies_match_one_rank(count, recompute, tmp_path) -> None:
    together(count, compare_policies, recompute, folder=tmp_path)


def compare_outputs(ranks: Ranks) -> None:
    alone, shared = packed_policy("gemma2"), packed_policy("gemma2")
    shared.set_context_ranks(ranks)
    expected, _ = alone(packed_row(1), reads="logits")
    got, _ = shared(packed_row(ranks.size), reads="logits")
    assert got.shape[1] == packed_row(ranks.size).num_tokens
    got = got[:, : expected.shape[1]]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    for logits in (got, expected):
        (logits * weights).sum().backward()
    assert_same_gradients(ranks, shared, alone)
    alone, shared = (critic(seed=1) for _ in range(2))
    shared.set_context_ranks(ranks)
    got, expected = shared(packed_row(ranks.size))[0], alone(packed_row(1))[0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    for values in (got, expected):
        values.square().mean().backward()
    assert_same_gradients(ranks, shared, alone)


def critic(seed: int) -> ValueModel:
    model = packed_policy("gpt_oss").model
    put_value_head(model)
    torch.manual_seed(seed)
    nn.init.normal_(model.get_output_embeddings().weight, std=0.1)
    return ValueModel(model)


def test_context_parallel_logits_and_values_match_one_rank(tmp_path) -> None:
    together(2, compare_outputs, folder=tmp_path)


def compare_part_without_responses(ranks: Ranks) -> list[int]:
    """The first half is prompt only: that rank has no targets and still computes its part of the gradient."""
    tokens = np.arange(40) % 100
    alone, shared = packed_policy("qwen3"), packed_policy("qwen3")
    shared.set_context_ranks(ranks)
    row = pack([tokens], [3], multiple=2)
    got, expected = shared(row, entropy=False)[0], alone(row, entropy=False)[0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    for log_probs in (got, expected):
        log_probs.sum().backward()
    assert_same_gradients(ranks, shared, alone)
    return list(row.part(0, 2).counts)


def test_part_with_only_prompt_tokens_matches_one_rank(tmp_path) -> None:
    assert together(2, compare_part_without_responses, folder=tmp_path) == [[0, 3]] * 2


def attention_states(ranks: Ranks, heads: int, kv_heads: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return queries, keys and values of a whole row, and those of this rank's tokens."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, 6), (kv_heads, 6), (kv_heads, 4))
    whole = [torch.randn(1, count, 12, width, generator=generator) for count, width in shapes]
    return whole, [states.chunk(ranks.size, dim=2)[ranks.rank] for states in whole]


def exchange_heads_and_tokens(ranks: Ranks) -> Any:
    """The round trip is the identity, and each query head gets the keys of its group for all head counts."""
    seen = []
    for heads, kv_heads in ((4, 4), (8, 2), (4, 1), (12, 6)):
        whole, own = attention_states(ranks, heads, kv_heads)
        query, key, value, sinks = exchange_tokens_for_heads(*own, torch.arange(float(heads)), ranks)
        mine = slice(ranks.rank * heads // ranks.size, (ranks.rank + 1) * heads // ranks.size)
        assert torch.equal(query, whole[0][:, mine])
        assert torch.equal(sinks, torch.arange(float(heads))[mine])
        for got, states in ((key, whole[1]), (value, whole[2])):
            of_each_head = got.repeat_interleave(query.shape[1] // got.shape[1], dim=1)
            assert torch.equal(of_each_head, states.repeat_interleave(heads // kv_heads, dim=1)[:, mine])
        assert torch.equal(exchange_heads_for_tokens(query.transpose(1, 2), ranks), own[0].transpose(1, 2))
        seen.append(key.shape[1])
    try:
        exchange_tokens_for_heads(*attention_states(ranks, 6, 6)[1], None, ranks)
    except UserError as error:
        return seen, str(error)
    return seen, None


def test_exchange_between_heads_and_tokens_round_trips(tmp_path) -> None:
    for seen, refusal in together(4, exchange_heads_and_tokens, folder=tmp_path):
        assert seen == [1, 1, 1, 3]
        assert (
            refusal
            == "--context-parallel-size 4 does not divide the 6 attention heads of the model: use one of 1, 2, 3, 6"
        )


def gradients_of_collectives(ranks: Ranks) -> None:
    counts = [3, 0, 1, 2][: ranks.size]
    own = torch.full((counts[ranks.rank], 2), float(ranks.rank), requires_grad=True)
    whole = gather_parts(own, counts, ranks)
    expected = torch.tensor([float(rank) for rank, count in enumerate(counts) for _ in range(count)])
    assert torch.equal(whole, expected[:, None].expand(-1, 2))
    weights = torch.arange(float(whole.numel())).view_as(whole)
    (whole * weights).sum().backward()
    assert torch.equal(own.grad, weights.split(counts)[ranks.rank])
    blocks = torch.full((ranks.size, 3), float(ranks.rank), requires_grad=True)
    received = exchange(blocks, ranks)
    assert torch.equal(received, torch.arange(float(ranks.size))[:, None].expand(-1, 3))
    (received * (10.0 * ranks.rank + torch.arange(float(ranks.size))[:, None])).sum().backward()
    assert torch.equal(blocks.grad, (10.0 * torch.arange(float(ranks.size)) + ranks.rank)[:, None].expand(-1, 3))


@pytest.mark.parametrize("count", [2, 4])
def test_gather_and_exchange_gradients(count, tmp_path) -> None:
    together(count, gradients_of_collectives, folder=tmp_path)


def test_plugins_see_row_padding_but_no_padding_sample() -> None:
    samples = flatten_samples(make_samples(1, 3, seed=2))
    batch = make_train_batch(Config(), samples)
    micro = make_micro_batch(batch, [2, 0, 1], StepShare(3), 3, torch.device("cpu"), multiple=64)
    seen = batch_for_plugins(make_rollout_data(batch), micro)
    assert seen["tokens"].shape == seen["full_loss_masks"].shape == (1, 64)
    assert seen["full_loss_masks"].sum() == sum(mask.sum() for mask in batch.loss_masks)
    assert seen["packed_seq_params"].cu_seqlens_q[-2:].tolist() == [sum(batch.total_lengths), 64]
    assert micro.row.total_lengths == tuple(seen["total_lengths"]) == tuple(sorted(batch.total_lengths))
    nothing = make_micro_batch(batch, [], StepShare(3), 3, torch.device("cpu"), multiple=64)
    assert nothing.row.num_tokens == 64
    assert nothing.weights.tolist() == [0.0]
