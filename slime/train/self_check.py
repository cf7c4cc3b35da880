"""`--ci-test`: numbers that hold in every correct run, whatever the model and the data.

Invariants checked: before a rollout's first update the policy is the one its old log-probs come from, which are
computed in a pass of their own for this (unless an engine or older weights are to give them); before the run's
first update it is its own reference; and trainer and engine agree on the log-probs of what was sampled by the weights
that are trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from slime.config import Config
from slime.config.asynchronous import may_be_older, versions_behind
from slime.config.start import find_reference, find_start
from slime.errors import RunFailed

KL_BEFORE_UPDATE = 1e-8
LOG_PROB_GAP = 0.1


class SelfCheckFailed(RunFailed):
    """A number that cannot be right."""


def check_numbers(config: Config, rollout_id: int, steps: Sequence[Mapping[str, float]]) -> None:
    """Raise SelfCheckFailed on the first wrong number in the metrics of a rollout's optimizer steps."""
    for name, value, bound in _bounded(config, steps):
        if not abs(value) <= bound:
            raise SelfCheckFailed(
                f"--ci-test: {name} is {value:g} in rollout {rollout_id}, but may be at most {bound:g}"
            )


def _bounded(config: Config, steps: Sequence[Mapping[str, float]]) -> Iterator[tuple[str, float, float]]:
    first = steps[0]
    of_older_weights = config.keep_old_actor and versions_behind(config) > 0
    if "train/ppo_kl" in first and not config.use_rollout_logprobs and not of_older_weights:
        yield "train/ppo_kl before the first update", first["train/ppo_kl"], KL_BEFORE_UPDATE
    if "train/kl_loss" in first and first["train/step"] == 0 and find_start(config) == find_reference(config):
        yield "train/kl_loss before the first update", first["train/kl_loss"], KL_BEFORE_UPDATE
    if may_be_older(config):
        return  # what older weights sampled is not what these would
    for step in steps:
        gap = step.get("train/train_rollout_logprob_abs_diff")
        if gap is not None:
            yield "train/train_rollout_logprob_abs_diff", gap, LOG_PROB_GAP
