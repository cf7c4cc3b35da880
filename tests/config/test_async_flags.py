"""The asynchronous modes: derived values and contradicting flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config, resolve
from slime.config.algorithm import uses_importance_weights, uses_optional_importance_weights
from slime.config.async_mode import default_async_mode, describe_loop, is_async, max_versions_behind
from slime.config.flags.rollout import DEFAULT_ROLLOUT_FUNCTION, FULLY_ASYNC_ROLLOUT_FUNCTION
from slime.errors import UserError
from tests.model_files import add_weights


@pytest.fixture
def flags(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    add_weights(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"input": "1"}\n')
    return {
        "hf_checkpoint": str(tmp_path),
        "prompt_data": str(tmp_path / "prompts.jsonl"),
        "rollout_batch_size": 4,
        "num_rollout": 2,
        "rollout_max_response_len": 8,
        "rm_type": "random",
        "output_dir": str(tmp_path / "out"),
    }


def test_default_loop_is_synchronous_and_colocated(flags: dict[str, Any]) -> None:
    config = resolve(Config(**flags))
    assert (config.async_mode, config.colocate, config.max_weight_staleness) == ("sync", True, None)
    assert not is_async(config)
    assert describe_loop(config) == "synchronous: generate, then train"


def test_synchronous_loop_accepts_a_longer_weight_update_interval(flags: dict[str, Any]) -> None:
    config = resolve(Config(**flags, update_weights_interval=3))
    assert (config.async_mode, is_async(config), max_versions_behind(config)) == ("sync", False, 2)
    words = "synchronous: generate, then train, new weights every 3 steps, samples up to 2 steps old"
    assert describe_loop(config) == words


@pytest.mark.parametrize("mode", ["one-step", "full"])
def test_async_modes_give_engines_their_own_gpus_by_default(mode: str, flags: dict[str, Any]) -> None:
    config = resolve(Config(**flags, async_mode=mode))
    assert (config.colocate, config.rollout_num_gpus) == (False, 1)
    assert is_async(config)


@pytest.mark.parametrize("mode", ["one-step", "full"])
def test_async_modes_accept_colocate_without_offload(mode: str, flags: dict[str, Any]) -> None:
    config = resolve(Config(**flags, async_mode=mode, colocate=True, actor_num_gpus_per_node=2))
    assert (config.colocate, config.rollout_num_gpus) == (True, 2)
    with pytest.raises(UserError, match="--offload-rollout frees the engines' memory during training"):
        resolve(Config(**flags, async_mode=mode, colocate=True, offload=True))


def test_full_mode_defaults_to_staleness_2_and_pause_mode_in_place(flags: dict[str, Any]) -> None:
    config = resolve(Config(**flags, async_mode="full"))
    assert (config.max_weight_staleness, config.update_weight_pause_mode) == (2, "in_place")
    retract = resolve(Config(**flags, async_mode="full", update_weight_pause_mode="retract"))
    assert retract.update_weight_pause_mode == "retract"


def test_upstream_async_rollout_function_selects_full_mode(flags: dict[str, Any]) -> None:
    config = resolve(Config(**flags, rollout_function_path=FULLY_ASYNC_ROLLOUT_FUNCTION, async_mode="one-step"))
    assert (config.async_mode, config.rollout_function_path) == ("full", DEFAULT_ROLLOUT_FUNCTION)
    with pytest.raises(UserError, match="--async-mode sync contradicts the fully asynchronous"):
        resolve(Config(**flags, rollout_function_path=FULLY_ASYNC_ROLLOUT_FUNCTION, async_mode="sync"))


@pytest.mark.parametrize("mode", ["one-step", "full"])
def test_staleness_of_zero_makes_the_loop_synchronous(mode: str, flags: dict[str, Any]) -> None:
    config = resolve(Config(**flags, async_mode=mode, max_weight_staleness=0))
    assert not is_async(config)
    assert (config.colocate, config.update_weight_pause_mode) == (True, "abort")


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"async_mode": "one-step", "offload_rollout": True}, "--offload-rollout frees the engines' memory"),
        ({"async_mode": "one-step", "offload_train": True}, "--offload-train frees the trainers' memory"),
        ({"update_weights_interval": 3, "max_weight_staleness": 1}, "less than the age of 2 steps that samples reach"),
        (
            {"update_weights_interval": 2, "offload_rollout": True},
            "--update-weights-interval 2 sends them only every 2",
        ),
        ({"async_mode": "full", "debug_rollout_only": True}, "--debug-rollout-only runs only half of the loop"),
        (
            {"async_mode": "one-step", "load_debug_rollout_data": "{rollout_id}.pt"},
            "--load-debug-rollout-data runs only half of the loop",
        ),
        (
            {"async_mode": "full", "max_weight_staleness": 1, "update_weights_interval": 2},
            "--max-weight-staleness 1 is less than --update-weights-interval 2",
        ),
        (
            {"async_mode": "one-step", "max_weight_staleness": 2, "async_buffer_size": 2, "update_weights_interval": 2},
            "--max-weight-staleness 2 cannot be guaranteed",
        ),
        ({"async_mode": "full", "loss_type": "sft_loss"}, "supervised training has none"),
        ({"async_mode": "full", "rollout_function_path": "json.loads"}, "use --async-mode one-step"),
    ],
)
def test_contradicting_async_flags_are_rejected_in_one_sentence(
    more: dict[str, Any], sentence: str, flags: dict[str, Any]
) -> None:
    with pytest.raises(UserError) as refused:
        resolve(Config(**flags | more))
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("more", "corrects"),
    [
        ({}, False),
        ({"async_mode": "one-step"}, True),
        ({"async_mode": "full"}, True),
        ({"async_mode": "full", "max_weight_staleness": 0}, False),
        ({"partial_rollout": True}, True),
        ({"update_weights_interval": 2}, True),
        ({"async_mode": "full", "use_tis": False}, False),
        ({"async_mode": "full", "use_rollout_logprobs": True}, False),
        ({"async_mode": "one-step", "loss_type": "sft_loss"}, False),
        ({"use_tis": True}, True),
    ],
)
def test_stale_samples_are_importance_weighted_by_default(
    more: dict[str, Any], corrects: bool, flags: dict[str, Any]
) -> None:
    config = resolve(Config(**flags | more))
    assert uses_importance_weights(config) is corrects
    assert uses_optional_importance_weights(config) is (corrects and "use_tis" not in more)


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        ({}, "one-step"),
        ({"debug_train_only": True, "loss_type": "sft_loss"}, "one-step"),
        ({"debug_rollout_only": True}, "sync"),
        ({"load_debug_rollout_data": "{rollout_id}.pt"}, "sync"),
    ],
)
def test_train_async_defaults_to_one_step_except_for_debug_rollouts(flags: dict[str, Any], mode: str) -> None:
    assert default_async_mode(Config(**flags)) == mode
