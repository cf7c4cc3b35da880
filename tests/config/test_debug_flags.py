"""Flags of the debug modes and of the teacher: valid combinations, and one-sentence errors for the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.config import Config, resolve
from slime.errors import UserError


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"save_debug_rollout_data": "d/{rollout_id}.json"}, "a dump is a file that ends in .jsonl or .pt"),
        ({"save_debug_rollout_data": "d/{step}.pt"}, "may hold only the placeholder {rollout_id}"),
        ({"save_debug_rollout_data": "d/all.pt"}, "has no {rollout_id}: every rollout would overwrite"),
        ({"load_debug_rollout_data": "/no/{rollout_id}.pt"}, "there is no dump /no/0.pt"),
        ({"load_debug_rollout_data": "/no/{rollout_id}.pt", "start_rollout_id": 3}, "there is no dump /no/3.pt"),
        ({"debug_train_only": True}, "starts no engine to generate with: add --load-debug-rollout-data FILE"),
        ({"debug_rollout_only": True, "debug_train_only": True}, "leave nothing to run: keep one"),
        (
            {"use_opd": True, "opd_type": "engine", "rm_url": "http://x:1", "rollout_temperature": 0.5},
            "--opd-type engine scores at temperature 1, but --rollout-temperature is 0.5",
        ),
        (
            {"use_opd": True, "opd_type": "engine", "rm_url": "http://x:1", "opd_teacher_load": "/m"},
            "--opd-teacher-load and --rm-url each name a teacher",
        ),
        ({"use_opd": True, "opd_type": "engine", "opd_teacher_load": "/m"}, "there is no model folder /m"),
    ],
)
def test_invalid_debug_and_teacher_flags_are_rejected(
    valid: dict[str, Any], changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError) as caught:
        resolve(Config(**{**valid, **changes}))
    assert sentence in str(caught.value)


def test_training_from_dumps_needs_no_prompts_and_no_num_rollout(valid: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "0.pt").write_bytes(b"")
    changes = {"prompt_data": None, "num_rollout": None, "load_debug_rollout_data": str(tmp_path / "{rollout_id}.pt")}
    config = resolve(Config(**{**valid, **changes}))
    assert (config.debug_train_only, config.num_rollout) == (True, None)
    gone = {**changes, "prompt_data": "/elsewhere/prompts.jsonl", "eval_prompt_data": [("a", "/elsewhere/a.jsonl")]}
    assert resolve(Config(**{**valid, **gone})).debug_train_only


def test_remote_reward_can_be_combined_with_a_served_teacher(valid: dict[str, Any], model_dir: Path) -> None:
    teacher = {"use_opd": True, "opd_type": "sglang", "opd_teacher_load": str(model_dir)}
    config = resolve(Config(**{**valid, "rm_type": "remote_rm"}, rm_url="http://x:1", **teacher))
    assert config.opd_type == "engine"
