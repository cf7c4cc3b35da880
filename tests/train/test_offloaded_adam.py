"""Tests Adam moments in host memory and in bfloat16, and models in host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from slime.train.backend import MOMENTS
from slime.train.backends.fsdp import optimizer as streamed_adam
from slime.train.backends.fsdp.optimizer import StreamedAdam, rounded
from tests.tiny_models import make_model_folder
from tests.train.in_process import InProcess, config_for
from tests.train.tiny_training import make_samples

BF16 = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "qwen3")


def weights_after(run: InProcess, *rollouts: int) -> dict[str, torch.Tensor]:
    for rollout_id in rollouts:
        run.train(rollout_id, make_samples(3, 3, seed=rollout_id))
    return run.weights


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def test_optimizer_cpu_offload_is_bitwise_equal(folder: Path, tmp_path: Path) -> None:
    plain = weights_after(InProcess(config_for(folder, tmp_path)), 0, 1, 2)
    streamed = InProcess(config_for(folder, tmp_path, optimizer_cpu_offload=True))
    assert same(weights_after(streamed, 0, 1, 2), plain)
    assert isinstance(streamed.trainer.actor.backend.optimizer, StreamedAdam)


def test_fsdp_cpu_offload_is_bitwise_equal_and_resumes(folder: Path, tmp_path: Path) -> None:
    flags = {"use_kl_loss": True, "save": str(tmp_path / "ckpt"), "micro_batch_size": 1}
    whole = InProcess(config_for(folder, tmp_path, **flags))
    plain = weights_after(whole, 0, 1, 2)
    run = InProcess(config_for(folder, tmp_path, **flags, fsdp_cpu_offload=True))
    weights_after(run, 0, 1)
    run.trainer.save(1)
    assert same(weights_after(run, 2), plain)
    groups = [module for module in run.trainer.actor.backend.module.modules() if isinstance(module, FSDPModule)]
    assert all(group._get_fsdp_state()._fsdp_param_group.offload_policy.pin_memory is False for group in groups)
    resumed = InProcess(config_for(folder, tmp_path, **flags, fsdp_cpu_offload=True, load=str(tmp_path / "ckpt")))
    assert same(weights_after(resumed, 2), plain)


def test_bfloat16_moments_stay_close_and_resume_exactly(folder: Path, tmp_path: Path) -> None:
    plain = weights_after(InProcess(config_for(folder, tmp_path)), 0, 1, 2)
    flags = {**BF16, "save": str(tmp_path / "ckpt")}
    run = InProcess(config_for(folder, tmp_path, **flags))
    weights_after(run, 0, 1)
    run.trainer.save(1)
    whole = weights_after(run, 2)
    kept = [state[moment] for state in run.trainer.actor.backend.optimizer.state.values() for moment in MOMENTS]
    assert {tensor.dtype for tensor in kept} == {torch.bfloat16}
    start = InProcess(config_for(folder, tmp_path)).weights
    for name, tensor in plain.items():
        moved, apart = (tensor - start[name]).norm(), (whole[name] - tensor).norm()
        assert apart < 0.05 * moved, name
    resumed = InProcess(config_for(folder, tmp_path, **flags, load=str(tmp_path / "ckpt")))
    assert resumed.start == 2
    assert same(weights_after(resumed, 2), whole)


def adam(parameter: torch.nn.Parameter, **changes: Any) -> StreamedAdam:
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "on_host": False}
    options |= {"dtypes": (torch.bfloat16, torch.bfloat16)} | changes
    return StreamedAdam([{"params": [parameter], "weight_decay": 0.01}], **options)


def test_stochastic_rounding_accumulates_small_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def second_moment() -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.zeros(1024))
        optimizer = adam(parameter)
        for _ in range(600):
            parameter.grad = torch.full((1024,), 3.0)
            optimizer.step()
        return optimizer.state[parameter]["exp_avg_sq"].float().mean()

    expected = 9 * (1 - 0.999**600)
    assert second_moment().item() == pytest.approx(expected, rel=0.01)
    monkeypatch.setattr(streamed_adam, "rounded", lambda values, first, salt: values.to(torch.bfloat16))
    assert second_moment().item() < 0.8 * expected  # round-to-nearest stalls when a step is below half a unit


def test_stochastic_rounding_is_unbiased_and_depends_on_position() -> None:
    for value in (1.0 + 2**-10, -3.0 - 2**-9, 1e-30, -0.0, 65504.123):
        values = torch.full((1 << 16,), value)
        found = rounded(values, 0, salt=5)
        below = (values.view(torch.int32) & -65536).view(torch.float32)
        above = ((values.view(torch.int32) & -65536) + 65536).view(torch.float32)
        assert ((found == below) | (found == above)).all()
        assert found.double().mean().item() == pytest.approx(values[0].double().item(), rel=1e-4)
        assert torch.equal(rounded(values[1000:], 1000, salt=5), found[1000:])
        assert value in (-0.0,) or not torch.equal(rounded(values, 0, salt=6), found)
    exact = torch.tensor([0.0, 1.5, -2.0, 3e38])
    assert torch.equal(rounded(exact[:3], 7, salt=1).float(), exact[:3])


def test_update_in_parts_matches_whole_update(monkeypatch: pytest.MonkeyPatch) -> None:
    def updated() -> torch.Tensor:
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(96, 32))
        optimizer = adam(parameter)
        for _ in range(3):
            parameter.grad = torch.randn(96, 32)
            optimizer.step()
        return parameter.detach().clone()

    whole = updated()
    monkeypatch.setattr(streamed_adam, "_PART", 1024)
    assert torch.equal(updated(), whole)
