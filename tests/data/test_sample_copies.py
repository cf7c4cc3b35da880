"""Deep copies of samples: equal to the original, with no shared mutable state."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from slime.data.sample import Sample


def _full() -> Sample:
    sample = Sample(prompt=[{"role": "user", "content": "2+2"}], label={"answer": ["4"]}, index=3, group_index=1)
    sample.tokens = [1, 2, 3]
    meta = {"finish_reason": {"type": "stop"}, "prompt_tokens": 3, "cached_tokens": 2, "weight_version": "4"}
    sample.append_response_tokens(tokens=[4, 5], log_probs=[-0.5, -0.25], meta_info=meta, text="4")
    sample.metadata = {"tools": [{"name": "add"}], "note": {"deep": [1]}}
    sample.rollout_routed_experts = np.arange(8).reshape(4, 2, 1)
    sample.of_a_plugin = {"mine": [7]}  # type: ignore[attr-defined]
    return sample


def _containers(value: Any) -> list[int]:
    """Ids of all mutable objects in a value."""
    if isinstance(value, dict):
        return [id(value), *(one for item in value.values() for one in _containers(item))]
    if isinstance(value, list):
        return [id(value), *(one for item in value for one in _containers(item))]
    return [id(value)] if isinstance(value, np.ndarray | Sample.SpecInfo | Sample.PrefixCacheInfo) else []


def test_deep_copy_equals_its_original_and_shares_no_mutable_state() -> None:
    sample = _full()
    _ = sample.tokens, sample.rollout_log_probs  # read as lists as well
    twin = copy.deepcopy(sample)
    assert twin == sample
    assert vars(twin).keys() == vars(sample).keys()
    assert not set(_containers(vars(twin))) & set(_containers(vars(sample)))
    assert type(twin) is Sample


def test_changes_to_a_copy_do_not_change_the_original() -> None:
    sample, before = _full(), _full()
    tokens = sample.tokens
    twin = copy.deepcopy(sample)
    meta = {"finish_reason": {"type": "length"}, "prompt_tokens": 5, "cached_tokens": 5}
    twin.append_response_tokens(tokens=[6], log_probs=[-1.0], meta_info=meta, text="6")
    twin.metadata["note"]["deep"].append(2)
    assert tokens == [1, 2, 3, 4, 5]
    assert sample == before
    assert twin.tokens == [1, 2, 3, 4, 5, 6]
    assert (twin.prefix_cache_info.total_prompt_tokens, sample.prefix_cache_info.total_prompt_tokens) == (8, 3)


def test_deep_copy_preserves_shared_references() -> None:
    sample = Sample(metadata={"log": []})
    sample.train_metadata = sample.metadata
    sample.metadata["itself"] = sample
    twin = copy.deepcopy(sample)
    assert twin.train_metadata is twin.metadata
    assert twin.metadata["itself"] is twin
    assert twin.metadata is not sample.metadata


def test_log_probs_from_an_array_are_kept_exactly() -> None:
    sample = Sample(tokens=[1])
    wide = np.array([-0.1, -0.5])
    sample.append_response_tokens(tokens=[2, 3], log_probs=wide)
    wide[0] = 9.0
    assert sample.rollout_log_probs == [-0.1, -0.5]
    slim = Sample(tokens=[1])
    slim.append_response_tokens(tokens=[2], log_probs=np.array([-0.5]))
    column = slim.column_array("rollout_log_probs")
    assert column is not None
    assert column.dtype == np.float32
