"""What is probably wrong with a run, told from one rollout: sentences that name the remedy and show a response.

Pure functions of samples and metrics, and a memory of what was said: each concern is told when it first appears and,
while it lasts, when it has appeared 2, 4, 8, ... times.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence

from slime.config import Config
from slime.config.algorithm import compares_siblings
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
"""How many times its usual value a gradient norm may be, where it is above the second."""
USUAL_ROLLOUTS, FEWEST_ROLLOUTS = 20, 3
"""The usual gradient norm is the median over so many earlier rollouts; with fewer there is none."""

EQUAL, TRUNCATED, NO_GRADIENT, SPECIAL = "equal rewards", "truncated", "no gradient", "special tokens"
ADVANTAGES, GRADIENT = "large advantages", "large gradient"
TINY = "tiny micro-batches"
TINY_TOKENS, MANY_PASSES, FULL_PASS = 1024, 32, 8192
"""Passes over fewer tokens leave most of a device idle; with so many of them in a step it is worth a word."""


class Concerns:
    """What was said so far. `special_tokens()` is asked only when every answer missed: it may load a tokenizer."""

    def __init__(self, config: Config, special_tokens: Callable[[], Collection[str]]) -> None:
        self._config = config
        self._special_tokens = special_tokens
        self._seen: Counter[str] = Counter()
        self._grad_norms: deque[float] = deque(maxlen=USUAL_ROLLOUTS)

    def about(
        self, rollout_id: int, samples: Sequence[Sample], grad_norm: float | None, advantage: float | None = None
    ) -> list[str]:
        """What is to be said after this rollout was trained on; gradient norm and advantage are its largest."""
        said = []
        found = concerns_of(self._config, samples, grad_norm, self._special_tokens)
        found |= _large(advantage, grad_norm, self._grad_norms)
        if grad_norm:
            self._grad_norms.append(grad_norm)
        for kind, sentence in found.items():
            self._seen[kind] += 1
            count = self._seen[kind]
            if count & (count - 1) == 0 and (count == 1 or kind != TINY):
                so_far = "" if count == 1 else f" (so in {count} rollouts by now)"
                said.append(f"rollout {rollout_id}: {sentence}{so_far}")
        return said


def concerns_of(
    config: Config,
    samples: Sequence[Sample],
    grad_norm: float | None,
    special_tokens: Callable[[], Collection[str]],
) -> dict[str, str]:
    """By kind, one sentence each; nothing when all is well."""
    usable = [sample for sample in samples if sample.status is not Sample.Status.FAILED]
    found = _tiny_micro_batches(config, usable)
    if config.loss_type == "sft_loss" or not usable:
        return found
    scored = [sample for sample in usable if has_number(config, sample)]
    rewards = {float(sample.reward_number(config)) for sample in scored}
    no_gradient = grad_norm == 0
    if len(scored) > 1 and len(rewards) == 1 and not config.use_opd:
        found |= _equal_rewards(config, scored, rewards.pop(), no_gradient, special_tokens())
    elif no_gradient:
        found[NO_GRADIENT] = _no_gradient(config, usable)
    cut = [sample for sample in usable if sample.status is Sample.Status.TRUNCATED]
    if len(cut) >= MOST_TRUNCATED * len(usable):
        found[TRUNCATED] = _truncated(config, cut, len(usable))
    return found


def _large(advantage: float | None, grad_norm: float | None, earlier: Sequence[float]) -> dict[str, str]:
    """Advantages and gradient norms that are orders of magnitude outside the usual."""
    found: dict[str, str] = {}
    if advantage is not None and advantage > LARGE_ADVANTAGE:
        found[ADVANTAGES] = (
            f"the largest advantage is {advantage:.3g}, and usual ones are below 10: look at the samples' rewards and "
            "at what normalises them (--advantage-estimator, --custom-reward-post-process-path), or add "
            "--normalize-advantages"
        )
    if grad_norm is None:
        return found
    usual = statistics.median(earlier) if len(earlier) >= FEWEST_ROLLOUTS else None
    jumped = usual is not None and grad_norm > max(GRAD_NORM_JUMP * usual, FIRST_JUMP_NORM)
    if jumped or grad_norm > LARGE_GRAD_NORM:
        compared = "" if usual is None else f", and the median of earlier rollouts is {usual:.3g}"
        found[GRADIENT] = (
            f"the gradient norm is {grad_norm:.3g}{compared}: look at train/advantages_abs_max, train/ppo_kl and the "
            "rewards, lower --lr, or check that --clip-grad bounds the step"
        )
    return found


def _equal_rewards(
    config: Config, scored: Sequence[Sample], reward: float, no_gradient: bool, special_tokens: Collection[str]
) -> dict[str, str]:
    hit = next((sample for sample in scored if _would_hit(sample, special_tokens)), None)
    if hit is not None:
        token = next(token for token in special_tokens if token in hit.response)
        return {
            SPECIAL: f"every answer got the reward {reward:g}, and special tokens left in the text may be why: "
            f"{quoted(hit)}, which would match without {token!r}. Leave special tokens out with "
            "--rollout-skip-special-tokens, or strip them in the generate or reward function"
        }
    effect = (
        "so the gradient was zero and the weights did not change" if no_gradient else "so there is nothing to learn"
    )
    if reward > 0:
        remedy = "if that is the best there is, the prompts are solved: use harder ones; else check the reward function"
    else:
        remedy = (
            "check that the reward function finds the answer in such a response, and that the label and the prompt's "
            "format (--apply-chat-template, --label-key) are what it expects; or start from easier prompts or a model "
            "that sometimes succeeds"
        )
    shown = quoted(scored[0])
    return {EQUAL: f"all {len(scored)} samples got the reward {reward:g}, {effect}; {shown}; {remedy}"}


def _would_hit(sample: Sample, special_tokens: Collection[str]) -> bool:
    """Whether a response is its label but for special tokens."""
    if not isinstance(sample.label, str | int | float) or not sample.response:
        return False
    plain = sample.response
    for token in special_tokens:
        plain = plain.replace(token, "")
    return plain != sample.response and plain.strip() == str(sample.label).strip()


def _tiny_micro_batches(config: Config, usable: Sequence[Sample]) -> dict[str, str]:
    """A step of many passes over few tokens each, which take many times as long as a few full ones."""
    if config.use_dynamic_batch_size or not usable or config.debug_rollout_only:
        return {}
    tokens = sum(sample.total_length for sample in usable) / len(usable) * config.micro_batch_size
    passes = len(usable) / (num_trainers(config) * config.micro_batch_size)
    if not 0 < tokens < TINY_TOKENS or passes < MANY_PASSES:
        return {}
    return {
        TINY: f"training takes {passes:.0f} passes over about {tokens:.0f} tokens each (--micro-batch-size "
        f"{config.micro_batch_size}): --use-dynamic-batch-size --max-tokens-per-gpu {FULL_PASS} packs them into fewer, "
        "which is many times faster"
    }


def _no_gradient(config: Config, usable: Sequence[Sample]) -> str:
    why = "every token may be masked, or every ratio clipped: look at the samples' loss_mask and train/pg_clipfrac"
    if compares_siblings(config):
        why = (
            "in every group all rewards are equal: more --n-samples-per-prompt or a higher --rollout-temperature make "
            "them differ, --dynamic-sampling-filter-path "
            "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std passes such groups over"
        )
    return f"the gradient was zero and the weights did not change; {quoted(usable[0])}; {why}"


def _truncated(config: Config, cut: Sequence[Sample], count: int) -> str:
    limit = config.rollout_max_response_len or DEFAULT_RESPONSE_LEN
    longer = f"a larger --rollout-max-response-len (now {limit})"
    return (
        f"{len(cut)} of {count} responses were cut off at the length limit; {quoted(cut[0], end=True)}; give them "
        f"{longer}, or if the answer was there already, --rollout-stop or the chat template "
        "(--apply-chat-template) that makes the model stop"
    )


def quoted(sample: Sample, *, end: bool = False) -> str:
    """One response (its beginning, or its end) beside its label, each on one line whatever is in it."""
    text = sample.response
    if len(text) > QUOTED_CHARS:
        shown = "..." + repr(text[-QUOTED_CHARS:]) if end else repr(text[:QUOTED_CHARS]) + "..."
    else:
        shown = repr(text)
    label = repr(sample.label)
    return f"one response is {shown}, its label {label if len(label) <= QUOTED_CHARS else label[:QUOTED_CHARS] + '...'}"
