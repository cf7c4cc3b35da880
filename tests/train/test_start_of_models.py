"""Tests the initial weights of actor and reference for the load flags."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slime.driver.convert import Conversion
from slime.errors import UserError
from tests.train.in_process import InProcess, config_for
from tests.train.tiny_training import build_model, make_samples

Weights = dict[str, torch.Tensor]
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1, "micro_batch_size": 3}


@pytest.fixture(scope="module")
def other(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the same model with other weights."""
    folder = tmp_path_factory.mktemp("other")
    build_model("qwen3", seed=5).save_pretrained(folder)
    return folder


def start(run: InProcess) -> tuple[Weights, Weights]:
    return run.weights, dict(run.trainer.actor.backend.full_parameters("ref"))


def same(one: Weights, two: Weights) -> bool:
    assert one.keys() == two.keys()
    return all(torch.equal(one[name], two[name]) for name in one)


def test_ref_load_sets_actor_and_reference_and_survives_resume(
    model_folder: Callable[[str], Path], other: Path, tmp_path: Path
) -> None:
    model, saved = model_folder("qwen3"), str(tmp_path / "saved")
    theirs = {name: tensor.detach() for name, tensor in build_model("qwen3", seed=5).named_parameters()}
    flags = {**KL, "ref_load": str(other), "load": saved, "save": saved}
    first = InProcess(config_for(model, tmp_path, **flags))
    assert [same(found, theirs) for found in start(first)] == [True, True]
    metrics = first.train(0, make_samples(3, 3))["metrics"][0]
    assert metrics["train/kl_loss"] == pytest.approx(0, abs=1e-8)
    first.trainer.save(0)
    trained = first.weights
    assert not same(trained, theirs)

    resumed = InProcess(config_for(model, tmp_path, **flags))
    actor, reference = start(resumed)
    assert (resumed.start, same(actor, trained), same(reference, theirs)) == (1, True, True)

    # a checkpoint as --ref-load of another run, which starts at 0 with a new optimizer
    second = InProcess(config_for(model, tmp_path, **KL, ref_load=saved))
    assert (second.start, [same(found, trained) for found in start(second)]) == (0, [True, True])
    assert not list(second.trainer.actor.backend.state_parts(["optim"]))


def test_actor_and_reference_start_from_a_megatron_checkpoint(
    model_folder: Callable[[str], Path], other: Path, tmp_path: Path
) -> None:
    model = model_folder("qwen3")
    theirs = {name: tensor.detach() for name, tensor in build_model("qwen3", seed=5).named_parameters()}
    release = Conversion(other, tmp_path / "release", "float32", format="torch_dist").run()
    run = InProcess(config_for(model, tmp_path, **KL, ref_load=str(release)))
    assert [same(found, theirs) for found in start(run)] == [True, True]
    run = InProcess(config_for(model, tmp_path, load=str(release)))
    assert (run.start, same(run.weights, theirs)) == (0, True)


def test_rejects_reference_checkpoint_of_another_model(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    run = InProcess(config_for(model_folder("llama"), tmp_path, save=str(tmp_path / "llama")))
    run.trainer.save(0)
    with pytest.raises(UserError, match=r"--ref-load .*iter_0000000 holds a llama model of .*: load one of the same"):
        InProcess(config_for(model_folder("qwen3"), tmp_path, ref_load=str(tmp_path / "llama")))
