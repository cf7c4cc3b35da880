"""Sample columns: stored as packed arrays, read as lists."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.data.columns import PackedArray
from slime.data.sample import COLUMNS, Sample
from slime.data.validation import BadSample, Bounds, check_sample
from tests.rows import examples

whole = st.lists(st.integers(-(2**70), 2**70) | st.integers(0, 200_000), max_size=20)
floats = st.lists(st.floats() | st.floats(width=32), max_size=20)
mixed = st.lists(st.booleans() | st.integers() | st.floats() | st.none() | st.builds(np.int64, st.just(3)), max_size=5)
columns = st.none() | whole | floats | mixed | st.just((1, 2))


def exactly(value: Any) -> str:
    """Represent a value with its types: 1, 1.0 and True differ, 0.0 and -0.0 differ, NaN equals NaN."""
    return repr(value)


def finished(tokens: int = 1000, *, log_prob: float = -0.5) -> Sample:
    sample = Sample(index=1, tokens=list(range(5000, 5010)))
    sample.append_response_tokens(
        tokens=list(range(1000, 1000 + tokens)), log_probs=[log_prob] * tokens, meta_info={"finish_reason": "stop"}
    )
    return sample


@settings(max_examples=examples(150), deadline=None)
@given(values=st.fixed_dictionaries(dict.fromkeys(COLUMNS, columns)))
def test_packing_is_invisible_to_plugins(values: dict[str, Any]) -> None:
    sample = Sample(index=3, **copy.deepcopy(values))
    sample.compact()
    assert {name: exactly(value) for name, value in sample.to_dict().items() if name in values} == {
        name: exactly(value) for name, value in values.items()
    }
    for twin in (copy.copy(sample), copy.deepcopy(sample), pickle.loads(pickle.dumps(sample)), sample):
        assert {name: exactly(getattr(twin, name)) for name in values} == {
            name: exactly(value) for name, value in values.items()
        }
    sample.compact()
    assert exactly(Sample.from_dict(sample.to_dict()).to_dict()) == exactly(sample.to_dict())
    sample.keep_with(lambda arrays: [array.copy() for array in arrays])
    assert {name: exactly(getattr(sample, name)) for name in values} == {
        name: exactly(value) for name, value in values.items()
    }


def test_kept_sample_caches_column_statistics_and_can_grow() -> None:
    sample = finished(4)
    sample.append_response_tokens(tokens=[7, 8], trainable=False)
    sample.rollout_routed_experts = np.zeros((15, 2, 1), np.uint8)
    taken: list[np.ndarray] = []

    def keep(arrays: Any) -> list[np.ndarray]:
        taken.extend(array.copy() for array in arrays)
        return taken

    sample.keep_with(keep)
    mask, log_probs = vars(sample)["loss_mask"], vars(sample)["rollout_log_probs"]
    assert (mask.total, log_probs.is_finite) == (4, True)
    assert [array is column for array, column in zip(taken, (sample.token_array(), mask.array), strict=False)] == [
        True,
        True,
    ]
    assert sample.rollout_routed_experts is taken[-1]
    assert [array.flags.writeable for array in taken] == [False, False, False, True]
    twin = copy.copy(sample)
    sample.append_response_tokens(tokens=[9], log_probs=[-1.0])
    assert vars(sample)["loss_mask"].total is None, "it is not the column that was looked at"
    assert (sample.tokens[-3:], sample.loss_mask) == ([7, 8, 9], [1, 1, 1, 1, 0, 0, 1])
    assert twin.tokens[-2:] == [7, 8]


def test_packed_column_is_scanned_once() -> None:
    sample = finished(4)
    sample.append_response_tokens(tokens=[7, 8], trainable=False)
    sample.compact()
    tokens, mask, log_probs = (vars(sample)[name] for name in ("tokens", "loss_mask", "rollout_log_probs"))
    assert (tokens.low, mask.total, log_probs.is_finite) == (None, None, None)
    check_sample(sample, Bounds(vocab_size=6000))
    assert (tokens.low, tokens.high, tokens.total) == (7, 5009, None)
    assert (mask.low, mask.high, mask.total, log_probs.is_finite) == (0, 1, 4, True)
    assert sample.effective_response_length == 4
    tokens.high = 6000  # the cached value now differs from the array
    with pytest.raises(BadSample, match="tokens has 6000"):
        check_sample(sample, Bounds(vocab_size=6000))
    sample.tokens[0] = 6001  # becomes a new column
    with pytest.raises(BadSample, match="tokens has 6001"):
        check_sample(sample, Bounds(vocab_size=6000))


def test_nan_log_probs_are_marked_as_not_finite() -> None:
    sample = finished(3, log_prob=float("nan"))
    sample.keep_with(list)
    assert vars(sample)["rollout_log_probs"].is_finite is False


def test_packed_samples_compare_like_lists() -> None:
    sample, lists = finished(), finished()
    assert lists.tokens[-1] == 1999
    sample.compact()
    assert sample == lists
    assert copy.deepcopy(sample) == sample
    assert dataclasses.replace(sample) == sample
    lists.tokens[0] = 0
    assert sample != lists
    lists = finished()
    lists.loss_mask = [True] * 1000  # type: ignore[list-item]
    assert sample == lists
    lists.loss_mask = None
    assert sample != lists
    longer = finished(1001)
    longer.response_length = 1000
    assert sample != longer


def test_changes_to_a_returned_list_change_the_column() -> None:
    sample = finished(3)
    sample.compact()
    tokens, mask = sample.tokens, sample.loss_mask
    assert tokens is sample.tokens
    assert mask is not None
    tokens[-1] = 7
    mask[0] = 0
    assert sample.token_array().tolist()[-1] == 7
    assert sample.effective_response_length == 2
    sample.compact()
    assert sample.tokens[-3:] == [1000, 1001, 7]
    assert sample.loss_mask == [0, 1, 1]


def test_lists_held_by_a_plugin_grow_with_the_response() -> None:
    sample = Sample(tokens=[5, 6])
    sample.append_response_tokens(tokens=[7], log_probs=[-0.5])
    held = {name: getattr(sample, name) for name in ("tokens", "loss_mask", "rollout_log_probs")}
    sample.append_response_tokens(tokens=[8], trainable=False)
    top_p = {"top_p_token_ids": [], "top_p_token_offsets": [0]}
    with pytest.raises(ValueError, match="trainable tokens need log_probs"):
        sample.append_response_tokens(tokens=[9], meta_info=top_p)
    sample.append_response_tokens(tokens=np.array([9]), log_probs=np.array([-1.5]))
    assert held == {"tokens": [5, 6, 7, 8, 9], "loss_mask": [1, 0, 1], "rollout_log_probs": [-0.5, 0.0, -1.5]}
    assert all(getattr(sample, name) is column for name, column in held.items())
    assert {type(value) for value in (*held["tokens"], *held["loss_mask"])} == {int}


def test_top_p_spans_held_by_a_plugin_grow_with_the_response() -> None:
    sample = Sample(tokens=[1])
    spans = {"top_p_token_ids": [4, 7], "top_p_token_offsets": [0, 2]}
    sample.append_response_tokens(tokens=[4], log_probs=[-0.5], meta_info=spans)
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    with pytest.raises(ValueError, match="routed experts need args"):
        sample.append_response_tokens(tokens=[4], log_probs=[-0.5], meta_info={**spans, "routed_experts": [1]})
    assert (ids, offsets) == ([4, 7], [0, 2])
    sample.append_response_tokens(tokens=[4], log_probs=[-0.5], meta_info=spans)
    sample.append_response_tokens(tokens=[3], trainable=False)
    assert (ids, offsets) == ([4, 7, 4, 7], [0, 2, 4, 4])
    assert ids is sample.rollout_top_p_token_ids


def test_append_continues_directly_assigned_fields() -> None:
    sample = finished(2)
    sample.compact()
    sample.tokens += [1, 2]
    sample.response_length += 2
    assert sample.loss_mask is not None
    sample.loss_mask += [0, 0]
    sample.rollout_log_probs = [*(sample.rollout_log_probs or []), 0.0, 0.0]
    sample.append_response_tokens(tokens=[3], log_probs=[-2.0])
    assert sample.tokens == [*range(5000, 5010), 1000, 1001, 1, 2, 3]
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 1, 0, 0, 1], [-0.5, -0.5, 0.0, 0.0, -2.0])
    assert sample.response_length == 5


def test_append_does_not_change_lists_shared_with_other_samples() -> None:
    ids = [1, 2]
    group = [Sample(), Sample()]
    for sample in group:
        sample.tokens = ids
        sample.append_response_tokens(tokens=[7], log_probs=[-0.5])
    assert ([sample.tokens for sample in group], ids) == ([[1, 2, 7]] * 2, [1, 2])
    first = group[0]
    second = dataclasses.replace(first, index=1)
    assert len(first.tokens) == 3
    first.append_response_tokens(tokens=[8], log_probs=[-0.5])
    second.append_response_tokens(tokens=[9], log_probs=[-0.5])
    assert (first.tokens, second.tokens) == ([1, 2, 7, 8], [1, 2, 7, 9])


@pytest.mark.parametrize("read_before", [False, True])
def test_append_does_not_change_copies(read_before: bool) -> None:
    sample = finished(3)
    sample.compact()
    if read_before:
        assert len(sample.tokens) == len(sample.loss_mask or []) + 10 == len(sample.rollout_log_probs or []) + 10
    before = copy.copy(sample).tokens
    twin = copy.copy(sample)
    sample.append_response_tokens(tokens=[1], log_probs=[-1.0])
    twin.append_response_tokens(tokens=[2], trainable=False)
    other = copy.copy(sample)
    sample.append_response_tokens(tokens=[3], log_probs=[-1.0])
    other.append_response_tokens(tokens=[4], log_probs=[-2.0])
    assert before == [*range(5000, 5010), 1000, 1001, 1002]
    assert [one.tokens[-2:] for one in (sample, twin, other)] == [[1, 3], [1002, 2], [1, 4]]
    assert [one.rollout_log_probs for one in (sample, other)] == [[-0.5] * 3 + [-1.0, -1.0], [-0.5] * 3 + [-1.0, -2.0]]
    assert twin.loss_mask == [1, 1, 1, 0]


def test_append_does_not_copy_the_history() -> None:
    sample = finished(1000)
    sample.append_response_tokens(tokens=[1], log_probs=[-1.0])
    for _ in range(100):
        history = sample.token_array(), sample.column_array("rollout_log_probs")
        sample.append_response_tokens(tokens=[2], log_probs=[-1.0])
        now = sample.token_array(), sample.column_array("rollout_log_probs")
        for old, new in zip(history, now, strict=True):
            assert np.shares_memory(old, new)
    assert sample.tokens[-100:] == [2] * 100


def test_finished_sample_takes_under_ten_bytes_per_token() -> None:
    def agent() -> Sample:
        sample = Sample(tokens=[1])
        for _ in range(20):
            sample.append_response_tokens(tokens=list(range(10_000, 10_700)), log_probs=[-0.25] * 700)
            sample.append_response_tokens(tokens=list(range(10_000, 10_300)), trainable=False)
        assert len(sample.tokens) == 20_001  # as a reward function reads it
        sample.compact()
        return sample

    agent()
    tracemalloc.start()
    kept = [agent(), agent()]
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held / sum(sample.total_length for sample in kept) < 9.5


@pytest.mark.parametrize(("log_prob", "kind"), [(-0.5, np.float32), (-0.1, np.float64), (float("nan"), np.float32)])
def test_log_probs_are_never_rounded(log_prob: float, kind: type) -> None:
    sample = finished(2, log_prob=log_prob)
    array = sample.column_array("rollout_log_probs")
    assert array is not None
    assert array.dtype == kind
    sample.append_response_tokens(tokens=[1], log_probs=[-0.3])
    assert exactly(sample.rollout_log_probs) == exactly([log_prob, log_prob, -0.3])


def test_numpy_arrays_are_stored_without_conversion_to_lists() -> None:
    sample = Sample(tokens=[1])
    ids, log_probs = np.array([5, 2**40]), np.array([-1.0, -2.0], dtype=np.float32)
    sample.append_response_tokens(tokens=ids, log_probs=log_probs)
    ids[0], log_probs[0] = 9, -9.0
    assert sample.token_array().tolist() == [1, 5, 2**40]
    assert all(isinstance(vars(sample)[name], PackedArray) for name in ("tokens", "loss_mask", "rollout_log_probs"))
    with pytest.raises(ValueError, match="read-only"):
        sample.token_array()[0] = 3
    assert sample.tokens == [1, 5, 2**40]
    assert sample.rollout_log_probs == [-1.0, -2.0]
    assert sample.loss_mask_array() is not None
    assert sample.column_array("teacher_log_probs") is None
    with pytest.raises(ValueError, match="at most 64 bits"):
        sample.append_response_tokens(tokens=[2**64], log_probs=[0.0])


def test_columns_that_cannot_be_packed_grow_as_lists() -> None:
    sample = Sample(tokens=[2**80], response_length=1, loss_mask=[True], rollout_log_probs=[1])  # type: ignore[list-item]
    sample.append_response_tokens(tokens=[3], log_probs=[-0.5])
    assert exactly([sample.tokens, sample.loss_mask, sample.rollout_log_probs]) == exactly(
        [[2**80, 3], [True, 1], [1, -0.5]]
    )
