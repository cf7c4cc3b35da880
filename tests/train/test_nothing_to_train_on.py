"""Tests that a rollout without response tokens is skipped with a warning."""

import logging

from slime.config import Config, derive
from slime.data.sample import Sample
from slime.train.trainer_group import TrainerGroup


def test_rollout_without_response_tokens_is_not_trained_on(tmp_path, caplog):
    config = derive(Config(hf_checkpoint=str(tmp_path), num_rollout=2, device="cpu", rollout_batch_size=1))
    group = TrainerGroup(config, device="cpu", run_dir=tmp_path)  # no rank is started or called
    empty = [Sample(group_index=0, index=i, tokens=[1], reward=1.0, status=Sample.Status.TRUNCATED) for i in range(2)]
    with caplog.at_level(logging.WARNING):
        result = group.train(0, [empty], last=True)
    assert result.metrics == []
    assert (result.rollout_metrics["rollout/raw_reward"], result.rollout_metrics["rollout/carried_rollouts"]) == (1, 0)
    assert "rollout 0 has no response token in any of its 2 samples: it is not trained on" in caplog.text
