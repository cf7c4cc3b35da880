"""Metrics and traces of one's own: a traced reward, a log of every rollout, and one on the training ranks.

--custom-rm-path measured.reward_func --custom-rollout-log-function-path measured.log_rollout
--rollout-data-postprocess-path measured.log_train_data
"""

import torch

from slime.utils import tracking_utils
from slime.utils.metric_utils import compute_rollout_step, compute_statistics, dict_add_prefix
from slime.utils.timer import Timer, timer
from slime.utils.trace_utils import trace_event, trace_function, trace_span


@trace_function("my_reward")
async def reward_func(args, sample, **kwargs):
    with trace_span(sample, "count_tokens", attrs={"tokens": len(sample.tokens)}) as span:
        with timer("count"):
            reward = sum(sample.tokens) % 7 / 7
        span.update({"reward": reward})
    trace_event(sample, "scored")
    return reward


def log_rollout(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    tracking_utils.init_tracking(args, primary=False)
    metrics = dict_add_prefix(compute_statistics([sample.reward for sample in samples]), "rollout/my_reward/")
    metrics["rollout/count_is_measured"] = float(Timer().log_dict().get("count", -1.0) >= 0)
    metrics["rollout/step"] = compute_rollout_step(args, rollout_id)
    tracking_utils.log(args, metrics, step_key="rollout/step")
    return False


def log_train_data(args, rollout_id, rollout_data):
    metrics = {"mine/advantage_spread": torch.cat(rollout_data["advantages"]).std(), "mine/step": rollout_id}
    tracking_utils.log(args, metrics, step_key="mine/step")
