"""Checks numbers that hold in every correct run, for any model and data (`--ci-test`).

Invariants checked: before a rollout's first update the policy equals the one that computed its old log-probs, which
have a pass of their own for this check (unless an engine or older weights provide them); before the run's first update
the policy equals its reference; trainer and engine agree on the log-probs of tokens sampled with the weights that are
trained on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from slime.config import Config
from slime.config.async_mode import max_versions_behind, may_train_on_stale_tokens
from slime.config.initial_weights import find_initial_weights, find_reference_weights
from slime.errors import RunFailed, UserError

KL_BEFORE_UPDATE = 1e-8
GRAD_NORM_TOLERANCE = 0.01
GRAD_NORMS = {"actor": "train/grad_norm", "critic": "train/critic-grad_norm"}


class SelfCheckFailed(RunFailed):
    """Raised when a checked number is out of its bounds."""


def check_numbers(config: Config, rollout_id: int, steps: Sequence[Mapping[str, float]]) -> None:
    """Raise SelfCheckFailed at the first wrong number in the metrics of a rollout's optimizer steps."""
    for name, value, bound in _bounded_metrics(config, steps):
        if not abs(value) <= bound:
            raise SelfCheckFailed(
                f"--ci-test: {name} is {value:g} in rollout {rollout_id}, but may be at most {bound:g}"
            )


def _bounded_metrics(config: Config, steps: Sequence[Mapping[str, float]]) -> Iterator[tuple[str, float, float]]:
    """Yield (description, value, bound) of each check that applies to the run."""
    first = steps[0]
    of_older_weights = config.keep_old_actor and max_versions_behind(config) > 0
    checks_kl = not config.ci_disable_kl_checker
    if checks_kl and "train/ppo_kl" in first and not config.use_rollout_logprobs and not of_older_weights:
        yield "train/ppo_kl before the first update", first["train/ppo_kl"], KL_BEFORE_UPDATE
    is_first = "train/kl_loss" in first and first["train/step"] == 0
    fresh = config.lora_load is None  # a loaded adapter makes the policy differ from its reference
    if checks_kl and is_first and fresh and find_initial_weights(config) == find_reference_weights(config):
        yield "train/kl_loss before the first update", first["train/kl_loss"], KL_BEFORE_UPDATE
    if may_train_on_stale_tokens(config):
        return  # older weights may have sampled the tokens, with other log-probs
    for step in steps:
        gap = step.get("train/train_rollout_logprob_abs_diff")
        if gap is not None:
            yield "train/train_rollout_logprob_abs_diff", gap, config.ci_train_rollout_logprob_abs_diff_threshold


def check_grad_norms(config: Config, rollout_id: int, steps: Sequence[Mapping[str, float]]) -> None:
    """Write the gradient norms of a rollout's steps, or compare them with those of another run."""
    for index, step in enumerate(steps):
        for role, name in GRAD_NORMS.items():
            if name not in step:
                continue
            written = _norm_file("--ci-save-grad-norm", config.ci_save_grad_norm, role, rollout_id, index)
            if written is not None:
                written.parent.mkdir(parents=True, exist_ok=True)
                written.write_text(json.dumps(step[name]))
            expected = _norm_file("--ci-load-grad-norm", config.ci_load_grad_norm, role, rollout_id, index)
            if expected is None:
                continue
            try:
                norm = float(json.loads(expected.read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError) as error:
                raise UserError(
                    f"--ci-load-grad-norm: {expected} has no gradient norm ({error}): write it with --ci-save-grad-norm"
                ) from error
            if not math.isclose(step[name], norm, rel_tol=GRAD_NORM_TOLERANCE, abs_tol=GRAD_NORM_TOLERANCE):
                raise SelfCheckFailed(
                    f"--ci-load-grad-norm: {name} of rollout {rollout_id}, step {index}, is {step[name]:g}, but "
                    f"{norm:g} in {expected}"
                )


def _norm_file(flag: str, template: str | None, role: str, rollout_id: int, step: int) -> Path | None:
    """Return the file of a norm; None if the template lacks a placeholder that the norm needs."""
    if template is None or (rollout_id and "{rollout_id" not in template) or (step and "{step_id" not in template):
        return None
    if role != "actor" and "{role" not in template:
        return None
    try:
        return Path(template.format(role=role, rollout_id=rollout_id, step_id=step))
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(f"{flag} {template} may contain only {{role}}, {{rollout_id}} and {{step_id}}") from error
