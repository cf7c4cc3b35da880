"""Metrics that the --log-* flags add."""

import pytest

from slime.config import Config, derive
from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.metrics import rollout_metrics

DONE, FAILED = Sample.Status.COMPLETED, Sample.Status.FAILED


def metrics(samples, **flags):
    config = derive(Config(rollout_batch_size=1, rollout_max_response_len=6, **flags))
    plain = rollout_metrics(config.replace(log_passrate=False, log_multi_turn=False, log_correct_samples=False,
                                           log_reward_category=None), samples, 1.0)  # fmt: skip
    return {name: value for name, value in rollout_metrics(config, samples, 1.0).items() if name not in plain}


@pytest.fixture
def samples():
    rows = [(0, 1.0, 2), (0, 0.0, 4), (1, 1.0, 6), (1, 1.0, 4)]
    made = [
        Sample(index=i, group_index=g, reward=r, response_length=n, status=DONE) for i, (g, r, n) in enumerate(rows)
    ]
    made[1].loss_mask = [1, 0, 0, 0]
    made[0].metadata["round_number"], made[2].metadata["round_number"] = 1, 4
    return [*made, Sample(index=9, group_index=1, status=FAILED, failure="reward: x", response_length=99)]


def test_log_passrate_adds_pass_at_k(samples):
    assert metrics(samples, log_passrate=True) == {"passrate/pass@1": 0.75, "passrate/pass@2": 1.0}


def test_log_correct_samples_adds_length_metrics(samples):
    assert metrics(samples, log_correct_samples=True) == {
        "rollout/correct_samples/count": 3.0,
        "rollout/correct_samples/response_len/mean": 4.0,
        "rollout/correct_samples/response_len/median": 4.0,
        "rollout/correct_samples/response_len/max": 6.0,
        "rollout/correct_samples/response_len/min": 2.0,
    }
    assert metrics(samples[1:2], log_correct_samples=True) == {"rollout/correct_samples/count": 0.0}


def test_log_multi_turn_adds_length_and_round_metrics(samples):
    assert metrics(samples, log_multi_turn=True) == {
        "multi_turn/raw_response_length/response_length_mean": 4.0,
        "multi_turn/raw_response_length/response_length_max": 6.0,
        "multi_turn/raw_response_length/response_length_clip_ratio": 0.25,
        "multi_turn/wo_obs_response_length/response_length_mean": 13 / 4,
        "multi_turn/wo_obs_response_length/response_length_max": 6.0,
        "multi_turn/multi_turn_metric/round_number_mean": 2.5,
        "multi_turn/multi_turn_metric/round_number_max": 4.0,
        "multi_turn/multi_turn_metric/round_number_min": 1.0,
    }


def test_log_reward_category_adds_the_share_of_each_category(samples):
    for sample, kind in zip(samples, ("right", "format", "right", "right"), strict=False):
        sample.reward = {"score": sample.reward, "kind": kind}
    assert metrics(samples, log_reward_category="kind", reward_key="score") == {
        "rollout/error_cat/right": 0.75,
        "rollout/error_cat/format": 0.25,
    }
    with pytest.raises(UserError, match=r"--log-reward-category why: the reward of sample 0 is "):
        metrics(samples, log_reward_category="why", reward_key="score")
