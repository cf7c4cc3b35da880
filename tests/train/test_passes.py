"""What a pass through a backend leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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
    with backend.using("ref"):
        parameters = list(backend._active.parameters())
    assert parameters
    assert all(isinstance(parameter, DTensor) for parameter in parameters)
