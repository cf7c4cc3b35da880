"""Tests that sparse attention in query blocks matches the full score matrix."""

from __future__ import annotations

import pytest
import torch

from slime.train.backends import attention as sparse_attention
from slime.train.backends.attention import pick_tokens, picked_attention
from slime.train.samples.packing import PackedLayout

LENGTHS = (5, 17, 3, 11)
COUNT = 4


def layout() -> PackedLayout:
    bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    return PackedLayout(LENGTHS, bounds, max(LENGTHS))


@pytest.mark.parametrize("queries", [3, 4, 512])
def test_tokens_attend_to_their_top_scored_earlier_tokens(queries, monkeypatch) -> None:
    monkeypatch.setattr(sparse_attention, "QUERIES", queries)
    total, generator = sum(LENGTHS), torch.Generator().manual_seed(0)
    shapes = [(total, 2, 8), (total, 8), (total, 2), (total, 3, 6), (total, 3, 6), (total, 3, 5)]
    index_query, index_key, weights, query, key, value = (torch.rand(*s, generator=generator) for s in shapes)
    picked = pick_tokens(index_query, index_key, weights, layout(), COUNT)
    assert picked.shape == (total, COUNT)
    got = picked_attention(query, key, value, picked, layout(), 0.5)
    begin = 0
    for length in LENGTHS:
        for place in range(length):
            token, seen = begin + place, slice(begin, begin + place + 1)
            scores = (index_query[token] @ index_key[seen].T * 8**-0.5).relu()
            best = (weights[token] * 2**-0.5 @ scores).topk(min(COUNT, place + 1)).indices + begin
            attention = torch.softmax(torch.einsum("hd,khd->hk", query[token], key[best]) * 0.5, dim=-1)
            wanted = torch.einsum("hk,khd->hd", attention, value[best])
            torch.testing.assert_close(got[token], wanted, rtol=0, atol=1e-5)
        begin += length


def test_short_sequences_use_full_attention() -> None:
    total = sum(LENGTHS)
    picked = pick_tokens(torch.randn(total, 2, 8), torch.randn(total, 8), torch.randn(total, 2), layout(), 17)
    assert picked.shape == (total, 0)
