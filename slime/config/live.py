"""What a live service implies, and what does not go together with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slime.algorithms.estimators import NONZERO_STD_FILTER
from slime.config.algorithm import estimator_of
from slime.config.config import Config
from slime.config.groups.asynchronous import FULL

LIVE_GENERATE = "slime.agent.live.service.generate"
TRAFFIC_BASELINE = "slime.agent.live.baseline.traffic_baseline"


def derive_live(config: Config) -> Config:
    """Samples are exchanges of clients: no prompt file, one answer a prompt, and the traffic for a baseline."""
    if config.live_judge_path is None:
        return config
    changes: dict[str, Any] = {"disable_rollout_global_dataset": True}
    if config.custom_generate_function_path is None:
        changes["custom_generate_function_path"] = LIVE_GENERATE
    if config.custom_reward_post_process_path is None and estimator_of(config).group_relative:
        changes["custom_reward_post_process_path"] = TRAFFIC_BASELINE
    return config.replace(**changes)


def live_contradictions(config: Config) -> Iterator[str]:
    """Sentences about flags that exclude each other."""
    if config.live_judge_path is None:
        if config.live_filter_path is not None:
            yield "--live-filter-path is for a live service: name what judges its answers with --live-judge-path"
        return
    if config.async_mode != FULL or config.max_weight_staleness == 0:
        yield "--live-judge-path serves clients while it trains: use slime train-async --async-mode full"
    if config.n_samples_per_prompt != 1:
        yield (
            f"--n-samples-per-prompt {config.n_samples_per_prompt}: a client gets one answer to what it asks, so a "
            "live service has groups of 1"
        )
    if config.dynamic_sampling_filter_path == NONZERO_STD_FILTER:
        yield (
            f"--dynamic-sampling-filter-path {NONZERO_STD_FILTER} drops every group of a live service, whose groups "
            "have one sample: drop the flag"
        )
    if config.prompt_data is not None:
        yield "--prompt-data is not read by a live service, whose prompts are what clients ask: drop it"
