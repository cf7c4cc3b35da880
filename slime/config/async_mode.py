"""Asynchronous modes: the loop that a run uses, and the flags that contradict it."""

from __future__ import annotations

from collections.abc import Iterator

from slime.config.config import Config
from slime.config.flags.rollout import (
    DEFAULT_ROLLOUT_FUNCTION,
    FULL,
    FULLY_ASYNC_ROLLOUT_FUNCTION,
    ONE_STEP,
    SFT_ROLLOUT_FUNCTION,
    SYNC,
)
from slime.errors import UserError
from slime.storage.json_types import JsonObject

DEFAULT_STALENESS = 2


def is_async(config: Config) -> bool:
    """Return whether generation overlaps with training; a maximum staleness of 0 excludes it."""
    return config.async_mode in (ONE_STEP, FULL) and config.max_weight_staleness != 0


def may_train_on_stale_tokens(config: Config) -> bool:
    """Return whether training may use tokens that were sampled with older weights than the current ones."""
    return is_async(config) or config.partial_rollout or config.update_weights_interval > 1


def max_versions_behind(config: Config) -> int:
    """Return the largest age, in steps, of the weights that sampled a token, as bounded by the flags."""
    unpublished = config.update_weights_interval - 1
    if config.async_mode == ONE_STEP and is_async(config):
        return config.async_buffer_size + unpublished
    if is_async(config):
        return DEFAULT_STALENESS if config.max_weight_staleness is None else config.max_weight_staleness
    if config.partial_rollout:
        older = DEFAULT_STALENESS if config.max_weight_staleness is None else config.max_weight_staleness
        return max(older, unpublished)
    return unpublished


def describe_loop(config: Config) -> str:
    """Describe the loop of a resolved config for the plan."""
    interval = config.update_weights_interval
    weights = "every step" if interval == 1 else f"every {interval} steps"
    if not is_async(config):
        older = "" if interval == 1 else f", new weights {weights}, samples up to {interval - 1} steps old"
        return f"synchronous: generate, then train{older}"
    if config.async_mode == ONE_STEP:
        ready, oldest = config.async_buffer_size, max_versions_behind(config)
        return f"one step off: up to {ready} rollout(s) ready, new weights {weights}, samples up to {oldest} steps old"
    return (
        f"fully asynchronous: new weights {weights} under running requests, samples at most "
        f"{config.max_weight_staleness} steps old"
    )


def default_async_mode(config: Config) -> str:
    """Return the default mode of the asynchronous entry point; a run of half the loop is synchronous."""
    half = config.debug_rollout_only or config.load_debug_rollout_data is not None
    return SYNC if half else ONE_STEP


def derive_async(config: Config) -> Config:
    """Set the mode from its flag or from the name of upstream's fully asynchronous rollout function."""
    changes: JsonObject = {}
    if config.rollout_function_path == FULLY_ASYNC_ROLLOUT_FUNCTION:
        if config.async_mode == SYNC:
            raise UserError("--async-mode sync contradicts the fully asynchronous --rollout-function-path: drop one")
        changes |= {"async_mode": FULL, "rollout_function_path": DEFAULT_ROLLOUT_FUNCTION}
    elif config.async_mode is None:
        changes["async_mode"] = SYNC
    mode = changes.get("async_mode", config.async_mode)
    if mode == FULL and config.max_weight_staleness is None:
        changes["max_weight_staleness"] = DEFAULT_STALENESS
    if config.update_weight_pause_mode is None:
        in_place = mode == FULL and config.max_weight_staleness != 0 and config.rollout_backend != "sglang"
        changes["update_weight_pause_mode"] = "in_place" if in_place else "abort"
    return config.replace(**changes)


def async_contradictions(config: Config) -> Iterator[str]:
    """Yield one sentence for each contradiction between flags of the mode."""
    mode, interval, staleness = config.async_mode, config.update_weights_interval, config.max_weight_staleness
    if not is_async(config):
        if staleness is not None and staleness < interval - 1:
            yield (
                f"--max-weight-staleness {staleness} is less than the age of {interval - 1} steps that samples reach "
                f"with --update-weights-interval {interval}: lower the interval or raise the staleness"
            )
        if interval > 1 and config.offload_rollout:
            yield (
                f"--offload-rollout frees the engines' weights in every step, but --update-weights-interval {interval} "
                f"sends them only every {interval} steps: drop one"
            )
        return
    if config.offload_rollout:
        yield (
            f"--offload-rollout frees the engines' memory during training, when --async-mode {mode} needs them: drop "
            "one"
        )
    if config.offload_train:
        yield (
            f"--offload-train frees the trainers' memory during rollouts, when --async-mode {mode} needs them: drop one"
        )
    for flag, given in (
        ("--load-debug-rollout-data", config.load_debug_rollout_data is not None),
        ("--debug-rollout-only", config.debug_rollout_only),
    ):
        if given:
            yield f"{flag} runs only half of the loop, so nothing can overlap: drop --async-mode {mode}"
    if mode == FULL and config.rollout_function_path not in (DEFAULT_ROLLOUT_FUNCTION, SFT_ROLLOUT_FUNCTION):
        yield (
            f"--async-mode full generates by itself, but --rollout-function-path {config.rollout_function_path} makes "
            "whole rollouts: use --async-mode one-step"
        )
    if mode == FULL and config.loss_type == "sft_loss":
        yield "--async-mode full needs sampled responses, and supervised training has none: use --async-mode one-step"
    if mode == FULL and staleness is not None and staleness < interval:
        yield (
            f"--max-weight-staleness {staleness} is less than --update-weights-interval {interval}: samples would be "
            "too old before new weights arrive"
        )
    needed = config.async_buffer_size + interval - 1
    if mode == ONE_STEP and staleness is not None and staleness < needed:
        yield (
            f"--max-weight-staleness {staleness} cannot be guaranteed: buffered rollouts (--async-buffer-size "
            f"{config.async_buffer_size}, --update-weights-interval {interval}) are up to {needed} steps old"
        )
