"""Tests the checks of `--ci-test`: thresholds, gradient norms and exceptions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.config import Config
from slime.errors import UserError
from slime.train.actor import Actor
from slime.train.backends.fsdp.backend import local_part
from slime.train.ci_checks import SelfCheckFailed, check_grad_norms, check_numbers
from tests.train.in_process import InProcess, config_for
from tests.train.tiny_training import make_samples

CONFIG = Config(hf_checkpoint="model", rollout_batch_size=1, use_kl_loss=True)
GOOD = {"train/step": 0.0, "train/ppo_kl": 0.0, "train/kl_loss": 0.0, "train/train_rollout_logprob_abs_diff": 0.01}


def test_later_steps_may_have_nonzero_kl() -> None:
    check_numbers(CONFIG, 0, [GOOD, {**GOOD, "train/step": 1.0, "train/ppo_kl": 0.3, "train/kl_loss": 0.2}])
    check_numbers(CONFIG, 4, [{**GOOD, "train/step": 8.0, "train/kl_loss": 0.2}])


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("train/ppo_kl", -1e-3, "--ci-test: train/ppo_kl before the first update is -0.001 in rollout 3, but may be"),
        (
            "train/kl_loss",
            1e-3,
            "train/kl_loss before the first update is 0.001 in rollout 3, but may be at most 1e-08",
        ),
        ("train/train_rollout_logprob_abs_diff", 0.2, "logprob_abs_diff is 0.2 in rollout 3, but may be at most 0.1"),
        ("train/ppo_kl", float("nan"), "train/ppo_kl before the first update is nan"),
    ],
)
def test_value_above_threshold_fails_with_its_name(name: str, value: float, sentence: str) -> None:
    with pytest.raises(SelfCheckFailed) as caught:
        check_numbers(CONFIG, 3, [{**GOOD, name: value}])
    assert sentence in str(caught.value)


def test_rollout_logprob_gap_is_checked_in_every_step() -> None:
    with pytest.raises(SelfCheckFailed, match=r"logprob_abs_diff is 0\.5"):
        check_numbers(CONFIG, 0, [GOOD, {**GOOD, "train/train_rollout_logprob_abs_diff": 0.5}])


def test_check_thresholds_are_configurable() -> None:
    far = {**GOOD, "train/train_rollout_logprob_abs_diff": 0.15}
    check_numbers(CONFIG.replace(ci_train_rollout_logprob_abs_diff_threshold=0.2), 0, [far])
    with pytest.raises(SelfCheckFailed, match=r"abs_diff is 0\.15 in rollout 0, but may be at most 0\.05"):
        check_numbers(CONFIG.replace(ci_train_rollout_logprob_abs_diff_threshold=0.05), 0, [far])
    no_kl = CONFIG.replace(ci_disable_kl_checker=True)
    check_numbers(no_kl, 0, [{**GOOD, "train/ppo_kl": 1.0, "train/kl_loss": 1.0}])
    with pytest.raises(SelfCheckFailed, match="abs_diff"):
        check_numbers(no_kl, 0, [far])


def test_gradient_norms_are_saved_and_compared(tmp_path: Path) -> None:
    template = str(tmp_path / "norms" / "{role}-{rollout_id}-{step_id}.pt")
    steps = [{"train/grad_norm": 3.0, "train/critic-grad_norm": 7.0}, {"train/grad_norm": 4.0}]
    check_grad_norms(CONFIG.replace(ci_save_grad_norm=template), 1, steps)
    assert {file.name for file in (tmp_path / "norms").iterdir()} == {"actor-1-0.pt", "critic-1-0.pt", "actor-1-1.pt"}
    compares = CONFIG.replace(ci_load_grad_norm=template)
    check_grad_norms(compares, 1, [{**steps[0], "train/grad_norm": 3.02}, steps[1]])
    with pytest.raises(SelfCheckFailed, match=r"train/critic-grad_norm of rollout 1, step 0, is 7\.2, but 7 in "):
        check_grad_norms(compares, 1, [{**steps[0], "train/critic-grad_norm": 7.2}])
    with pytest.raises(UserError, match=r"actor-0-0\.pt has no gradient norm .* write it with --ci-save-grad-norm"):
        check_grad_norms(compares, 0, steps)
    with pytest.raises(UserError, match="may contain only"):
        check_grad_norms(CONFIG.replace(ci_save_grad_norm="{other}"), 0, steps)


def test_path_without_placeholders_keeps_the_first_norm(tmp_path: Path) -> None:
    config = CONFIG.replace(ci_save_grad_norm=str(tmp_path / "norm.pt"))
    for rollout_id, norm in ((0, 3.0), (1, 5.0)):
        check_grad_norms(config, rollout_id, [{"train/grad_norm": norm}, {"train/grad_norm": 9.0}])
    assert (tmp_path / "norm.pt").read_text() == "3.0"


def test_initial_kl_loss_may_differ_when_load_gives_other_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    moved = [{**GOOD, "train/kl_loss": 2.0}]
    check_numbers(CONFIG.replace(load=str(tmp_path)), 0, moved)
    check_numbers(CONFIG.replace(load=str(tmp_path), ref_load="other"), 0, moved)
    with pytest.raises(SelfCheckFailed, match="kl_loss"):  # the policy also starts from --ref-load
        check_numbers(CONFIG.replace(ref_load="other"), 0, moved)


@pytest.mark.parametrize(
    "changes", [{"use_rollout_logprobs": True}, {"keep_old_actor": True, "async_mode": "one-step"}]
)
def test_ppo_kl_may_differ_with_another_old_policy(changes: dict[str, Any]) -> None:
    check_numbers(CONFIG.replace(**changes), 0, [{**GOOD, "train/ppo_kl": 2.0}])


@pytest.mark.parametrize("moved", [0.0, 0.01])
def test_detects_weight_change_between_scoring_and_first_update(
    moved: float, model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds with one update per rollout, where a run without --ci-test has no separate scoring pass."""
    run = InProcess(config_for(model_folder("llama"), tmp_path, ci_test=True))
    score = Actor.score

    def scored(actor: Actor, *args: Any, **kwargs: Any) -> None:
        score(actor, *args, **kwargs)
        with torch.no_grad():
            local_part(actor.backend.module.model.lm_head.weight).mul_(1.0 + moved)

    monkeypatch.setattr(Actor, "score", scored)
    metrics = run.train(0, make_samples(3, 3, with_log_probs=False))["metrics"]
    with pytest.raises(SelfCheckFailed, match="train/ppo_kl") if moved else nullcontext():
        check_numbers(run.config, 0, metrics)


def test_sft_steps_pass_without_rl_metrics() -> None:
    check_numbers(CONFIG, 0, [{"train/step": 0.0, "train/loss": 4.0}])
