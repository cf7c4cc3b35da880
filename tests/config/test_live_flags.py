"""Flags that live mode sets, and flags that it rejects."""

import pytest

from slime.algorithms.estimators import ESTIMATORS, NONZERO_STD_FILTER
from slime.config import Config, derive
from slime.config.algorithm import algorithm_contradictions
from slime.config.checks import LIVE_GENERATE, TRAFFIC_BASELINE, live_contradictions

LIVE = {"rollout_batch_size": 4, "num_rollout": 2, "live_judge_path": "judge.py:judge", "device": "cpu"}


def derive_config(**flags):
    return derive(Config(**{**LIVE, "async_mode": "full", "n_samples_per_prompt": 1, **flags}))


def test_live_mode_sets_live_generate_and_traffic_baseline():
    config = derive_config()
    assert config.disable_rollout_global_dataset
    assert config.custom_generate_function_path == LIVE_GENERATE
    assert config.custom_reward_post_process_path == TRAFFIC_BASELINE
    assert list(live_contradictions(config)) == []


def test_live_mode_keeps_functions_that_were_given():
    config = derive_config(custom_generate_function_path="mine.py:f", custom_reward_post_process_path="mine.py:g")
    assert (config.custom_generate_function_path, config.custom_reward_post_process_path) == ("mine.py:f", "mine.py:g")
    assert derive_config(advantage_estimator="reinforce_plus_plus").custom_reward_post_process_path is None


@pytest.mark.parametrize("estimator", [name for name, one in ESTIMATORS.items() if one.group_relative])
def test_group_relative_estimators_accept_groups_of_one_in_live_mode(estimator):
    whitens = ESTIMATORS[estimator].needs_whitening
    config = derive_config(advantage_estimator=estimator, normalize_advantages=whitens, rollout_max_response_len=8)
    assert config.custom_reward_post_process_path == TRAFFIC_BASELINE
    assert config.dynamic_sampling_filter_path is None
    assert [*live_contradictions(config), *algorithm_contradictions(config)] == []


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"async_mode": "sync"}, "--async-mode full"),
        ({"max_weight_staleness": 0}, "--async-mode full"),
        ({"n_samples_per_prompt": 2}, "groups of 1"),
        ({"prompt_data": "prompts.jsonl"}, "drop it"),
        ({"dynamic_sampling_filter_path": NONZERO_STD_FILTER}, "drops every group"),
        ({"live_judge_path": None, "live_filter_path": "f.py"}, "--live-judge-path"),
    ],
)
def test_flags_that_conflict_with_live_mode_are_rejected(flags, sentence):
    [found] = live_contradictions(derive_config(**flags))
    assert sentence in found
