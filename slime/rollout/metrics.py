"""Metrics of samples, under upstream's names; pure functions of the samples.

Failed samples are counted and otherwise excluded: no length, reward or ratio below includes them. Rewards are averaged
over rollouts: a rollout with several samples (a session with branches) counts once, with the mean of their rewards.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from slime.config import Config
from slime.config.flags.rollout import DEFAULT_RESPONSE_LEN
from slime.data.sample import Sample
from slime.errors import UserError

Metrics = dict[str, float]
DatasetResult = Mapping[str, Any]
"""Result of one evaluation dataset: the aligned lists `rewards`, `truncated` and `samples`, and the list `failed`."""

REPETITION_TAIL_CHARS = 10_000
REPETITION_COMPRESSION = 10.0


class RepetitionCache:
    """Caches which responses are repetitive; each is checked when it arrives, as checking all at the end is slow."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, bool]] = {}

    def note(self, sample: Sample) -> None:
        """Check the response of a sample and store the result."""
        self._known[id(sample)] = sample.response, has_repetition(sample.response)

    def only(self, samples: Iterable[Sample]) -> RepetitionCache:
        """Return a cache with the results of these samples alone."""
        some = RepetitionCache()
        some._known = {id(sample): self._known[id(sample)] for sample in samples if id(sample) in self._known}
        return some

    def __call__(self, sample: Sample) -> bool:
        """Return whether the response is repetitive; it is checked again if it has changed since."""
        text, verdict = self._known.get(id(sample), (None, False))
        return verdict if text is sample.response else has_repetition(sample.response)


def rollout_metrics(
    args: Config, samples: Sequence[Sample], rollout_time: float, repetitions: RepetitionCache | None = None
) -> Metrics:
    """Return all metrics of one training rollout: ``rollout/*``, ``perf/*``, and those that ``--log-*`` flags add."""
    usable = _usable(samples)
    common = sample_metrics(samples, repetitions) | _reward_metrics(args, usable)
    metrics = {f"rollout/{name}": value for name, value in common.items()}
    metrics |= task_metrics(args, samples)
    metrics |= _flag_metrics(args, [sample for sample in usable if sample.reward is not None])
    if args.log_multi_turn:
        metrics |= _multi_turn_metrics(args, usable)
    metrics |= _session_metrics(samples)
    tool_calls = _summed_counters(samples, "tool_calls")  # by outcome, as attempts store them
    if tool_calls:
        metrics["agent/tool_calls"] = float(tool_calls.pop("calls", 0))
        metrics["agent/tool_failures"] = metrics["agent/tool_calls"] - tool_calls["ok"]
        metrics |= {f"agent/tool_{name}": float(value) for name, value in tool_calls.items()}
    for name, cost in _summed_counters(samples, "tournament").items():  # of pairwise judging (examples/mcp_arena)
        metrics[f"rollout/tournament_{name}"] = float(cost)
    metrics["perf/rollout_time"] = rollout_time
    if not usable or rollout_time <= 0:
        return metrics
    gpus = args.rollout_num_gpus or 1
    own_tokens = [sample.effective_response_length for sample in usable]
    metrics["perf/tokens_per_gpu_per_sec"] = sum(s.response_length for s in usable) / rollout_time / gpus
    metrics["perf/effective_tokens_per_gpu_per_sec"] = sum(own_tokens) / rollout_time / gpus
    metrics["perf/longest_sample_tokens_per_sec"] = max(s.response_length for s in usable) / rollout_time
    metrics["perf/longest_effective_sample_tokens_per_sec"] = max(own_tokens) / rollout_time
    times = [sample.non_generation_time for sample in usable]
    return metrics | (_spread("perf/non_generation_time", times) if any(times) else {})


def tail_seconds(arrivals: Sequence[float], now: float) -> float:
    """Return the time spent on the last tenth of a batch, in seconds.

    This is `now` minus the time at which nine tenths of its groups (rounded down, at least one) had arrived, even if
    they arrived before the batch was started.
    """
    if not arrivals:
        return 0.0
    return now - sorted(arrivals)[max(1, len(arrivals) * 9 // 10) - 1]


def eval_metrics(args: Config, data: Mapping[str, DatasetResult]) -> Metrics:
    """Return ``eval/{name}`` (mean reward), ``-truncated_ratio``, ``-pass@k`` and sample metrics of each dataset.

    If a custom evaluation leaves out ``truncated`` or ``samples``, the metrics computed from them are left out too.
    """
    metrics: Metrics = {}
    for name, result in data.items():
        rewards, samples = result["rewards"], result.get("samples")
        groups = _by_rollout(samples, rewards) if samples is not None else {None: rewards}
        metrics[f"eval/{name}"] = fmean(reward for group in groups.values() for reward in group)
        if result.get("truncated"):
            metrics[f"eval/{name}-truncated_ratio"] = fmean(result["truncated"])
        if samples is None:
            continue
        right = [[reward == 1 for reward in group] for group in groups.values()]
        metrics |= {f"eval/{name}-{key}": value for key, value in pass_at_k(right).items()}
        every = [*samples, *result.get("failed", ())]
        metrics |= {f"eval/{name}/{key}": value for key, value in sample_metrics(every).items()}
    return metrics


def pass_at_k(groups: Iterable[Sequence[bool]]) -> Metrics:
    """Return ``pass@k`` for k = 1, 2, 4, ... up to the largest group: the unbiased estimate of Chen et al. (2021).

    For a group of n with c correct: 1 - C(n-c, k) / C(n, k). Groups smaller than k are left out.
    """
    outcomes = [(len(group), sum(group)) for group in groups]
    largest = max((n for n, _ in outcomes), default=0)
    result: Metrics = {}
    k = 1
    while k <= largest:
        result[f"pass@{k}"] = fmean(1 - math.comb(n - c, k) / math.comb(n, k) for n, c in outcomes if n >= k)
        k *= 2
    return result


def sample_metrics(samples: Sequence[Sample], repetitions: RepetitionCache | None = None) -> Metrics:
    """Return metrics that any list of samples has: lengths, truncation, repetition, caches, failures."""
    metrics: Metrics = {"failed/count": float(len(samples) - len(_usable(samples)))}
    stages = Counter((sample.failure or "unknown").partition(":")[0] for sample in samples if _failed(sample))
    for stage, count in stages.items():
        metrics[f"failed/{stage}"] = float(count)
    usable = _usable(samples)
    if not usable:
        return metrics
    lengths = [sample.effective_response_length for sample in usable]
    metrics |= _spread("response_len", lengths)
    metrics["truncated_ratio"] = fmean(sample.status is Sample.Status.TRUNCATED for sample in usable)
    metrics["repetition_frac"] = fmean(map(repetitions or RepetitionCache(), usable))
    prompt_tokens = sum(sample.prefix_cache_info.total_prompt_tokens for sample in usable)
    if prompt_tokens:
        cached = sum(sample.prefix_cache_info.cached_tokens for sample in usable)
        metrics["prefix_cache_hit_rate"] = cached / prompt_tokens
        metrics["avg_cached_tokens_per_sample"] = cached / len(usable)
    verified = sum(sample.spec_info.spec_verify_ct for sample in usable)
    if verified:
        drafted = sum(sample.spec_info.spec_draft_token_num for sample in usable)
        accepted = sum(sample.spec_info.spec_accept_token_num for sample in usable)
        metrics["spec_accept_rate"] = accepted / drafted if drafted else 0.0
        metrics["spec_accept_length"] = sum(s.spec_info.completion_token_num for s in usable) / verified
    return metrics


def has_number(args: Config, sample: Sample) -> bool:
    """Return whether a sample has a reward that is, or should be, a number.

    A dict without ``--reward-key`` does not count if ``--custom-reward-post-process-path`` computes the numbers.
    """
    is_material = isinstance(sample.reward, dict) and not args.reward_key and args.custom_reward_post_process_path
    return sample.reward is not None and not is_material


def has_repetition(text: str) -> bool:
    """Return whether the end of a text is so repetitive that it compresses more than tenfold."""
    tail = text[-REPETITION_TAIL_CHARS:].encode()
    return bool(tail) and len(tail) / len(zlib.compress(tail)) > REPETITION_COMPRESSION


def _reward_metrics(args: Config, samples: Sequence[Sample]) -> Metrics:
    """Return the mean raw reward, and the number of groups whose rewards are all equal (they give no gradient)."""
    scored = [sample for sample in samples if has_number(args, sample)]
    groups = _by_rollout(scored, [float(sample.reward_number(args)) for sample in scored])
    if not groups:
        return {}
    metrics: Metrics = {"raw_reward": fmean(reward for rewards in groups.values() for reward in rewards)}
    flat = [rewards[0] for rewards in groups.values() if len(rewards) > 1 and max(rewards) - min(rewards) <= 1e-6]
    metrics["zero_std/count"] = float(len(flat))
    for reward, count in Counter(round(reward, 1) for reward in flat).items():
        metrics[f"zero_std/count_{reward}"] = float(count)
    return metrics


def task_metrics(args: Config, samples: Sequence[Sample]) -> Metrics:
    """Return for each dataset of ``--prompt-config`` its share of the prompts, rewards, lengths and zero-std groups."""
    tasks: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        if isinstance(sample.task, str):
            tasks[sample.task].append(sample)
    prompts = {task: len({sample.group_index for sample in own}) for task, own in sorted(tasks.items())}
    metrics: Metrics = {}
    for task, count in prompts.items():
        usable = _usable(tasks[task])
        rewards = _reward_metrics(args, usable)
        known: Metrics = {name: rewards[name] for name in ("raw_reward", "zero_std/count") if name in rewards}
        if usable:
            known["response_len/mean"] = fmean(sample.effective_response_length for sample in usable)
            known["truncated_ratio"] = fmean(sample.status is Sample.Status.TRUNCATED for sample in usable)
        known["share"] = count / sum(prompts.values())
        metrics |= {f"rollout/{task}/{name}": value for name, value in known.items()}
    return metrics


def _by_rollout(samples: Sequence[Sample], values: Sequence[float]) -> dict[Hashable, list[float]]:
    """Return, by group, one value per rollout: the mean over the samples of the rollout."""
    rollouts: dict[Hashable, dict[Hashable, list[float]]] = defaultdict(dict)
    for place, (sample, value) in enumerate(zip(samples, values, strict=True)):
        alone = ("sample", place)
        rollout = alone if sample.rollout_id is None else sample.rollout_id
        rollouts[sample.group_index].setdefault(rollout, []).append(value)
    return {group: [fmean(own) for own in members.values()] for group, members in rollouts.items()}


def _flag_metrics(args: Config, scored: Sequence[Sample]) -> Metrics:
    """Return the metrics of ``--log-passrate``, ``--log-reward-category`` and ``--log-correct-samples``.

    A reward of 1 means a correct answer.
    """
    metrics: Metrics = {}
    if args.log_reward_category is not None:
        categories: Counter[str] = Counter()
        for sample in scored:
            if not isinstance(sample.reward, dict) or args.log_reward_category not in sample.reward:
                raise UserError(
                    f"--log-reward-category {args.log_reward_category}: the reward of sample {sample.index} is "
                    f"{sample.reward!r:.80}, but it must be a dict with this entry"
                )
            categories[str(sample.reward[args.log_reward_category])] += 1
        metrics |= {f"rollout/error_cat/{name}": count / len(scored) for name, count in categories.items()}
    scored = [sample for sample in scored if has_number(args, sample)]
    right = [sample.reward_number(args) == 1 for sample in scored]
    if args.log_passrate:
        groups = [[share == 1 for share in group] for group in _by_rollout(scored, right).values()]
        metrics |= {f"passrate/{name}": value for name, value in pass_at_k(groups).items()}
    if args.log_correct_samples:
        lengths = [sample.effective_response_length for sample, yes in zip(scored, right, strict=True) if yes]
        metrics["rollout/correct_samples/count"] = float(len(lengths))
        if lengths:
            metrics |= _spread("rollout/correct_samples/response_len", lengths)
    return metrics


def _multi_turn_metrics(args: Config, samples: Sequence[Sample]) -> Metrics:
    """Return response lengths with observations (all tokens) and without (trained tokens), and round numbers."""
    if not samples:
        return {}
    raw = [sample.response_length for sample in samples]
    own = [sample.effective_response_length for sample in samples]
    metrics: Metrics = {
        "multi_turn/raw_response_length/response_length_mean": fmean(raw),
        "multi_turn/raw_response_length/response_length_max": float(max(raw)),
        "multi_turn/wo_obs_response_length/response_length_mean": fmean(own),
        "multi_turn/wo_obs_response_length/response_length_max": float(max(own)),
    }
    limit = DEFAULT_RESPONSE_LEN if args.rollout_max_response_len is None else args.rollout_max_response_len
    metrics["multi_turn/raw_response_length/response_length_clip_ratio"] = fmean(length >= limit for length in raw)
    rounds = [sample.metadata["round_number"] for sample in samples if "round_number" in sample.metadata]
    if rounds:
        metrics["multi_turn/multi_turn_metric/round_number_mean"] = fmean(rounds)
        metrics["multi_turn/multi_turn_metric/round_number_max"] = float(max(rounds))
        metrics["multi_turn/multi_turn_metric/round_number_min"] = float(min(rounds))
    return metrics


def _summed_counters(samples: Sequence[Sample], key: str) -> Counter[str]:
    """Return the sums of the counters in `metadata[key]` of the samples."""
    totals: Counter[str] = Counter()
    for sample in samples:
        noted = sample.metadata.get(key)
        if isinstance(noted, Mapping):
            totals.update({name: value for name, value in noted.items() if isinstance(value, int | float)})
    return totals


_SESSION_TOTALS = (
    "turns",
    "extended",
    "forked",
    "refused",
    "abandoned",
    "sampled_tokens",
    "trained_tokens",
    "retokenised_tokens",
)
_SESSION_NUMBERS = (*_SESSION_TOTALS, "samples", "prompt_tokens", "shared_tokens")


def _session_metrics(samples: Sequence[Sample]) -> Metrics:
    """Return the metrics of sessions (`slime.agent.session.limits`); the first sample of each has its counters.

    A value that a user stores under the same name is ignored.
    """
    found = [sample.metadata.get("session") for sample in samples]
    sessions = [
        numbers
        for numbers in found
        if isinstance(numbers, dict) and all(isinstance(numbers.get(name), int) for name in _SESSION_NUMBERS)
    ]
    if not sessions:
        return {}
    metrics = {f"agent/{name}": float(sum(session[name] for session in sessions)) for name in _SESSION_TOTALS}
    metrics["agent/sessions"] = float(len(sessions))
    metrics["agent/turns_per_session"] = fmean(session["turns"] for session in sessions)
    metrics["agent/samples_per_session"] = fmean(session["samples"] for session in sessions)
    prompt_tokens = sum(session["prompt_tokens"] for session in sessions)
    metrics["agent/shared_ratio"] = sum(s["shared_tokens"] for s in sessions) / prompt_tokens if prompt_tokens else 0.0
    return metrics


def statistics_of(values: Sequence[float]) -> Metrics:
    """Return mean, median, max and min of a non-empty sequence."""
    return {
        "mean": fmean(values),
        "median": float(median(values)),
        "max": float(max(values)),
        "min": float(min(values)),
    }


def _spread(name: str, values: Sequence[float]) -> Metrics:
    return {f"{name}/{statistic}": value for statistic, value in statistics_of(values).items()}


def _failed(sample: Sample) -> bool:
    return sample.status is Sample.Status.FAILED


def _usable(samples: Sequence[Sample]) -> list[Sample]:
    return [sample for sample in samples if not _failed(sample)]


def staleness_metrics(samples: Sequence[Sample], rollout_id: int) -> dict[str, float]:
    """Return the staleness metrics of samples.

    These are the mean and largest staleness, the share of trained tokens that older weights sampled, and the share of
    samples whose tokens were sampled by several weight versions.
    """
    known = [version for sample in samples if (version := sample.oldest_weight_version) is not None]
    if not known:
        return {}
    old, trained = 0, 0
    mixed: list[bool] = []
    for sample in samples:
        trained += sample.effective_response_length
        position, mask = 0, sample.loss_mask_array()
        for version, length in sample.version_spans:
            if version is not None and version.isdigit() and int(version) < rollout_id:
                old += length if mask is None else int(mask[position : position + length].sum())
            position += length
        mixed.append(len({version for version, _ in sample.version_spans if version is not None}) > 1)
    return {
        "rollout/staleness/mean": fmean(rollout_id - version for version in known),
        "rollout/staleness/max": float(rollout_id - min(known)),
        "rollout/off_policy_token_frac": old / trained if trained else 0.0,
        "rollout/mixed_version_frac": fmean(mixed),
    }
