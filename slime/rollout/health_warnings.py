"""Detects probable problems of a run in one rollout, and describes each with a remedy and an example response.

The checks are pure functions of samples and metrics. `HealthWarnings` counts the warnings: each is given when it first
occurs and, while it persists, after 2, 4, 8, ... occurrences.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence

from slime.config import Config
from slime.config.algorithm import uses_group_baseline
from slime.config.batch import num_trainers
from slime.config.flags.rollout import DEFAULT_RESPONSE_LEN
from slime.data.sample import Sample
from slime.rollout.metrics import has_number

MOST_TRUNCATED = 0.9
QUOTED_CHARS = 60

LARGE_ADVANTAGE = 100.0
"""Normalised rewards of a group of n are at most sqrt(n)."""
LARGE_GRAD_NORM = 1e4
GRAD_NORM_JUMP, FIRST_JUMP_NORM = 100.0, 10.0
"""A gradient norm is too large above this multiple of its usual value, if it also exceeds the second number."""
USUAL_ROLLOUTS, FEWEST_ROLLOUTS = 20, 3
"""The usual gradient norm is the median over the last 20 rollouts; it is undefined with fewer than 3."""

EQUAL, TRUNCATED, NO_GRADIENT, SPECIAL = "equal rewards", "truncated", "no gradient", "special tokens"
ADVANTAGES, GRADIENT = "large advantages", "large gradient"
TINY = "tiny micro-batches"
TINY_TOKENS, MANY_PASSES, FULL_PASS = 1024, 32, 8192
"""Passes over fewer tokens leave most of a device idle; a step with this many such passes gives a warning."""


class HealthWarnings:
    """Collects the warnings of a run, and limits how often each is repeated.

    `special_tokens()` is called only if all rewards are equal, because it may load a tokenizer.
    """

    def __init__(self, config: Config, special_tokens: Callable[[], Collection[str]]) -> None:
        self._config = config
        self._special_tokens = special_tokens
        self._seen: Counter[str] = Counter()
        self._grad_norms: deque[float] = deque(maxlen=USUAL_ROLLOUTS)

    def about(
        self, rollout_id: int, samples: Sequence[Sample], grad_norm: float | None, advantage: float | None = None
    ) -> list[str]:
        """Return the warnings to show after training on this rollout; gradient norm and advantage are its largest."""
        shown = []
        found = find_problems(self._config, samples, grad_norm, self._special_tokens)
        if advantage is not None and advantage > LARGE_ADVANTAGE:
            found[ADVANTAGES] = (
                f"the largest advantage is {advantage:.3g}, and usual ones are below 10: look at the samples' rewards "
                "and at what normalises them (--advantage-estimator, --custom-reward-post-process-path), or add "
                "--normalize-advantages"
            )
        if grad_norm is not None:
            earlier = self._grad_norms
            usual = statistics.median(earlier) if len(earlier) >= FEWEST_ROLLOUTS else None
            jumped = usual is not None and grad_norm > max(GRAD_NORM_JUMP * usual, FIRST_JUMP_NORM)
            if jumped or grad_norm > LARGE_GRAD_NORM:
                compared = "" if usual is None else f", and the median of earlier rollouts is {usual:.3g}"
                found[GRADIENT] = (
                    f"the gradient norm is {grad_norm:.3g}{compared}: look at train/advantages_abs_max, train/ppo_kl "
                    "and the rewards, lower --lr, or check that --clip-grad bounds the step"
                )
        if grad_norm:
            self._grad_norms.append(grad_norm)
        for kind, sentence in found.items():
            self._seen[kind] += 1
            count = self._seen[kind]
            if count & (count - 1) == 0 and (count == 1 or kind != TINY):
                so_far = "" if count == 1 else f" ({count} rollouts so far)"
                shown.append(f"rollout {rollout_id}: {sentence}{so_far}")
        return shown


def find_problems(
    config: Config,
    samples: Sequence[Sample],
    grad_norm: float | None,
    special_tokens: Callable[[], Collection[str]],
) -> dict[str, str]:
    """Return one sentence per kind of problem; the dict is empty if none is found."""
    usable = [sample for sample in samples if sample.status is not Sample.Status.FAILED]
    found: dict[str, str] = {}
    if not config.use_dynamic_batch_size and usable and not config.debug_rollout_only:
        tokens = sum(sample.total_length for sample in usable) / len(usable) * config.micro_batch_size
        passes = len(usable) / (num_trainers(config) * config.micro_batch_size)
        if 0 < tokens < TINY_TOKENS and passes >= MANY_PASSES:  # much slower than a few full passes
            found[TINY] = (
                f"training takes {passes:.0f} passes over about {tokens:.0f} tokens each (--micro-batch-size "
                f"{config.micro_batch_size}): --use-dynamic-batch-size --max-tokens-per-gpu {FULL_PASS} packs them "
                "into fewer, which is many times faster"
            )
    if config.loss_type == "sft_loss" or not usable:
        return found
    scored = [sample for sample in usable if has_number(config, sample)]
    rewards = {float(sample.reward_number(config)) for sample in scored}
    no_gradient = grad_norm == 0
    if len(scored) > 1 and len(rewards) == 1 and not config.use_opd:
        found |= _equal_rewards(config, scored, rewards.pop(), no_gradient, special_tokens())
    elif no_gradient:
        why = "every token may be masked, or every ratio clipped: look at the samples' loss_mask and train/pg_clipfrac"
        if uses_group_baseline(config):
            why = (
                "in every group all rewards are equal: more --n-samples-per-prompt or a higher --rollout-temperature "
                "make them differ, --dynamic-sampling-filter-path "
                "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std skips such groups"
            )
        found[NO_GRADIENT] = f"the gradient was zero and the weights did not change; {quote_response(usable[0])}; {why}"
    cut = [sample for sample in usable if sample.status is Sample.Status.TRUNCATED]
    if len(cut) >= MOST_TRUNCATED * len(usable):
        limit = config.rollout_max_response_len or DEFAULT_RESPONSE_LEN
        found[TRUNCATED] = (
            f"{len(cut)} of {len(usable)} responses were cut off at the length limit; "
            f"{quote_response(cut[0], end=True)}; "
            f"raise --rollout-max-response-len (now {limit}), or if the response already had its answer, use "
            "--rollout-stop or a chat template (--apply-chat-template) that makes the model stop"
        )
    return found


def _equal_rewards(
    config: Config, scored: Sequence[Sample], reward: float, no_gradient: bool, special_tokens: Collection[str]
) -> dict[str, str]:
    """Warn of equal rewards; the cause may be special tokens without which a response would equal its label."""
    for sample in scored:
        if not isinstance(sample.label, str | int | float) or not sample.response:
            continue
        plain = sample.response
        for token in special_tokens:
            plain = plain.replace(token, "")
        if plain != sample.response and plain.strip() == str(sample.label).strip():
            token = next(token for token in special_tokens if token in sample.response)
            return {
                SPECIAL: f"every answer got the reward {reward:g}, and special tokens left in the text may be why: "
                f"{quote_response(sample)}, which would match without {token!r}. Leave special tokens out with "
                "--rollout-skip-special-tokens, or strip them in the generate or reward function"
            }
    effect = (
        "so the gradient was zero and the weights did not change" if no_gradient else "so there is nothing to learn"
    )
    if reward > 0:
        remedy = "if this is the top reward, the prompts are solved: use harder ones; else check the reward function"
    else:
        remedy = (
            "check that the reward function finds the answer in such a response, and that the label and the prompt's "
            "format (--apply-chat-template, --label-key) are what it expects; or start from easier prompts or a model "
            "that sometimes succeeds"
        )
    shown = quote_response(scored[0])
    return {EQUAL: f"all {len(scored)} samples got the reward {reward:g}, {effect}; {shown}; {remedy}"}


def quote_response(sample: Sample, *, end: bool = False) -> str:
    """Return one response (its beginning, or its end) and its label, each escaped onto one line."""
    text = sample.response
    if len(text) > QUOTED_CHARS:
        shown = "..." + repr(text[-QUOTED_CHARS:]) if end else repr(text[:QUOTED_CHARS]) + "..."
    else:
        shown = repr(text)
    label = repr(sample.label)
    return f"one response is {shown}, its label {label if len(label) <= QUOTED_CHARS else label[:QUOTED_CHARS] + '...'}"
