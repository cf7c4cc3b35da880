"""Weight version spans of a response: they always cover it and give the oldest version trained on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.data.sample import Sample


def answer(tokens: int, version: str, spans: list[tuple[str, int]] | None = None, **more: Any) -> dict[str, Any]:
    meta: dict[str, Any] = {"weight_version": version, "finish_reason": {"type": "stop"}, **more}
    if spans is not None:
        ends = [sum(length for _, length in spans[: i + 1]) for i in range(len(spans))]
        starts = [0, *ends[:-1]]
        meta["weight_versions"] = [
            {"version": v, "start": start, "end": end} for (v, _), start, end in zip(spans, starts, ends, strict=True)
        ]
    return {"tokens": [1] * tokens, "log_probs": [-0.5] * tokens, "meta_info": meta}


def test_each_turn_adds_its_version_and_tool_tokens_have_none() -> None:
    sample = Sample(tokens=[7])
    sample.append_response_tokens(**answer(3, "4"))
    sample.append_response_tokens(tokens=[5, 5], trainable=False)
    sample.append_response_tokens(**answer(2, "4"))
    sample.append_response_tokens(**answer(1, "6"))
    assert sample.version_spans == [["4", 3], [None, 2], ["4", 2], ["6", 1]]
    assert sample.weight_versions == ["4", "4", "6"]
    assert sample.oldest_weight_version == 4


def test_weight_update_during_a_request_splits_its_span() -> None:
    sample = Sample(tokens=[7])
    sample.append_response_tokens(**answer(5, "3", [("1", 2), ("3", 3)]))
    assert sample.version_spans == [["1", 2], ["3", 3]]
    sample.append_response_tokens(**answer(2, "3"))
    assert sample.version_spans == [["1", 2], ["3", 5]]


def test_tokens_get_the_first_version_if_the_engine_reports_no_spans() -> None:
    sample = Sample(tokens=[7])
    sample.append_response_tokens(**answer(4, "9", first_weight_version="8"))
    assert sample.version_spans == [["8", 4]]


def test_masked_tokens_do_not_count_for_the_oldest_version() -> None:
    sample = Sample(tokens=[7])
    sample.append_response_tokens(**answer(2, "1"))
    sample.loss_mask = [0, 0]
    sample.append_response_tokens(**answer(2, "5"))
    assert sample.oldest_weight_version == 5


def test_masked_until_masks_the_first_response_tokens() -> None:
    sample = Sample(tokens=[7])
    sample.append_response_tokens(**answer(4, "5", [("2", 3), ("5", 1)], masked_until=3))
    assert sample.loss_mask == [0, 0, 0, 1]
    assert sample.oldest_weight_version == 5


def test_oldest_version_falls_back_to_weight_versions() -> None:
    sample = Sample(tokens=[7, 1, 1], response_length=2, loss_mask=[1, 1], rollout_log_probs=[-1.0, -1.0])
    assert sample.oldest_weight_version is None
    sample.weight_versions = ["3", "2", "default"]
    assert sample.oldest_weight_version == 2
    sample.append_response_tokens(**answer(1, "7"))
    assert sample.version_spans == [[None, 2], ["7", 1]]
    assert sample.oldest_weight_version == 2


parts = st.lists(st.tuples(st.sampled_from(["0", "1", "2", None]), st.integers(1, 5)), max_size=8)


@given(parts)
def test_spans_cover_the_response_and_adjacent_versions_differ(history: list[tuple[str | None, int]]) -> None:
    sample = Sample(tokens=[7])
    for version, count in history:
        if version is None:
            sample.append_response_tokens(tokens=[5] * count, trainable=False)
        else:
            sample.append_response_tokens(**answer(count, version))
    flat = [version for version, count in history for _ in range(count)]
    assert [version for version, count in sample.version_spans for _ in range(count)] == flat
    assert all(left[0] != right[0] for left, right in zip(sample.version_spans, sample.version_spans[1:], strict=False))
    sampled = [int(version) for version in flat if version is not None]
    assert sample.oldest_weight_version == (min(sampled) if sampled else None)


@pytest.mark.parametrize("spans", [[["1", 2]], []])
def test_spans_survive_a_dict_round_trip(spans: list[list[Any]]) -> None:
    sample = Sample(tokens=[1, 2, 3], response_length=2, version_spans=spans)
    assert Sample.from_dict(sample.to_dict()) == sample
