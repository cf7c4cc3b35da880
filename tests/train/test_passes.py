"""What a pass through a backend leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.train.in_process import InProcess, config_for
from tests.train.tiny_training import make_samples


def test_a_pass_without_a_backward_leaves_no_gathered_weights(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    config = config_for(model_folder("qwen3"), tmp_path, use_kl_loss=True, kl_loss_coef=0.1, num_steps_per_rollout=3)
    run = InProcess(config)
    run.train(0, make_samples(3, 3))
    backend = run.trainer.actor.backend
    parameters = list(backend.module.parameters())
    assert parameters
    assert all(isinstance(parameter, DTensor) for parameter in parameters)


def test_a_reference_may_be_a_moving_average_which_a_resumed_run_goes_on_with(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """In bfloat16 too, where a hundredth of what one update changes would be lost in rounding."""
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
