"""Tests the gathered weights and the reference after backend passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from slime.train.backends.fsdp import backend
from slime.train.backends.fsdp.packed_model import PackedModel
from slime.train.backends.fsdp.sharding import gather_ahead
from tests.train.in_process import InProcess, config_for
from tests.train.tiny_training import make_samples


def test_step_with_forward_only_passes_leaves_weights_sharded(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    config = config_for(model_folder("qwen3"), tmp_path, use_kl_loss=True, kl_loss_coef=0.1, num_steps_per_rollout=3)
    run = InProcess(config)
    run.train(0, make_samples(3, 3))
    parameters = list(run.trainer.actor.backend.module.parameters())
    assert parameters
    assert all(isinstance(parameter, DTensor) for parameter in parameters)


def test_gather_ahead_does_not_change_results(
    model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are gathered during the reference pass; the results equal those of gathering layer by layer."""
    config = config_for(model_folder("qwen3"), tmp_path, dtype="bfloat16", use_kl_loss=True, kl_loss_coef=0.1)
    found, gathered = [], []
    for is_ahead in (True, False):

        def gather(module: PackedModel, is_ahead: bool = is_ahead) -> None:
            gathered.append(is_ahead)
            if is_ahead:
                gather_ahead(module)
                assert not any(isinstance(parameter, DTensor) for parameter in module.parameters())

        monkeypatch.setattr(backend, "gather_ahead", gather)
        run = InProcess(config)
        for rollout_id in range(3):
            run.train(rollout_id, make_samples(3, 3))
        found.append(dict(run.weights))
    assert gathered == [True, True, False, False]  # gather_ahead is not called in the first step
    assert_equal(*found)


def test_moving_average_reference_survives_resume(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Holds in bfloat16 too, where rounding would drop one hundredth of an update."""
    flags = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 1, "ref_update_decay": 0.99}
    config = config_for(
        model_folder("qwen3"), tmp_path, dtype="bfloat16", save=str(tmp_path / "c"), load=str(tmp_path / "c"), **flags
    )
    run = InProcess(config)
    expected = {name: tensor.clone() for name, tensor in run.trainer.actor.backend.full_parameters("ref")}
    expected = {name: tensor.float() for name, tensor in expected.items()}
    for rollout_id in range(3):
        run.train(rollout_id, make_samples(3, 3))
        expected = {name: average.lerp(run.weights[name], 0.01) for name, average in expected.items()}
    rounded = {name: average.bfloat16() for name, average in expected.items()}
    assert_equal(dict(run.trainer.actor.backend.full_parameters("ref")), rounded)
    run.trainer.save(2)
    resumed = InProcess(config)
    assert_equal(dict(resumed.trainer.actor.backend.full_parameters("ref")), rounded)
    for one in (run, resumed):
        one.train(3, make_samples(3, 3))
    references = [dict(one.trainer.actor.backend.full_parameters("ref")) for one in (run, resumed)]
    assert_equal(*references)


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
