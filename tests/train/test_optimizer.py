"""Tests parameter freezing, Adam, stateless Adam and optimizer state on resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from slime.config import Config, derive
from slime.errors import UserError
from slime.train.backend import MOMENTS, STEP, choose_trainable, has_optimizer_state
from slime.train.backends.fsdp.optimizer import make_optimizer
from slime.train.checkpoints.rank_files import OPTIMIZER, SavedPart, write_parts
from slime.train.checkpoints.reader import SavedTensors
from slime.train.topology import Ranks
from tests.train.in_process import InProcess, config_for
from tests.train.tiny_training import make_samples


def choose(module: nn.Module, **patterns: list[str] | None) -> list[str]:
    """Choose what is trained on one rank, and return the names."""
    config = Config(**patterns)  # type: ignore[arg-type]
    choose_trainable(dict(module.named_parameters()), config, Ranks(0, 1, torch.device("cpu")), known="its names")
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def test_freezes_parameters_by_pattern() -> None:
    module = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)})
    assert choose(module, freeze_params_name_list=["first"]) == ["second.weight", "second.bias"]
    assert choose(module, only_train_params_name_list=["t.bias", "d.weight"]) == ["first.bias", "second.weight"]
    assert len(choose(module)) == 4
    with pytest.raises(UserError, match=r"--only-train.* leaves no parameter to train: check .* against its names"):
        choose(module, only_train_params_name_list=["third"])
    with pytest.raises(UserError, match=r"--freeze-params.* leaves no parameter to train"):
        choose(module, freeze_params_name_list=["first", "second"])
    with pytest.raises(UserError, match="exclude each other"):
        choose(module, only_train_params_name_list=["first"], freeze_params_name_list=["second"])


def test_freeze_indexer_adds_a_freeze_pattern() -> None:
    layer = nn.ModuleDict({"indexer": nn.ModuleDict({"wq": nn.Linear(2, 2)}), "q_proj": nn.Linear(2, 2)})
    module = nn.ModuleDict({"self_attn": layer})
    config = derive(
        Config(hf_checkpoint="m", rollout_batch_size=1, freeze_indexer=True, freeze_params_name_list=["q_proj.bias"])
    )
    assert choose(module, freeze_params_name_list=config.freeze_params_name_list) == ["self_attn.q_proj.weight"]
    assert derive(config).freeze_params_name_list == config.freeze_params_name_list


def test_adam_is_bitwise_equal_to_torch_adamw() -> None:
    config = Config(lr=1e-2, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-3)
    torch.manual_seed(0)
    ours, theirs = (nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    optimizer = make_optimizer(ours.parameters(), config)
    keywords = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-3, "fused": True}
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    wanted = torch.optim.AdamW(groups, **keywords)  # type: ignore[arg-type]
    for step in range(4):
        inputs = torch.randn(5, 4)
        for module, used in ((ours, optimizer), (theirs, wanted)):
            module.zero_grad()
            (module if step else module[0])(
                inputs
            ).square().sum().backward()  # in step 0 the second layer has no gradient
            used.step()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine, other)
            for name, moment in wanted.state[other].items():
                assert torch.equal(optimizer.state[mine][name], moment)


def test_stateless_adam_matches_a_fresh_adamw_each_step() -> None:
    """The reference is a new AdamW before each update."""
    config = Config(use_stateless_adam=True, lr=1e-2, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-3)
    torch.manual_seed(0)
    ours, theirs = nn.Linear(4, 3), nn.Linear(4, 3)
    theirs.load_state_dict(ours.state_dict())
    optimizer = make_optimizer(ours.parameters(), config)
    for step in range(4):
        fresh = make_optimizer(theirs.parameters(), config.replace(use_stateless_adam=False))
        for group in (*optimizer.param_groups, *fresh.param_groups):
            group["lr"] = 1e-2 * (step + 1)
        inputs = torch.randn(5, 4)
        for module, used in ((ours, optimizer), (theirs, fresh)):
            module.zero_grad()
            module(inputs).square().sum().backward()
            used.step()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(mine, other, rtol=1e-6, atol=1e-7)
    assert not optimizer.state


def test_stateless_adam_run_saves_and_resumes(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    flags = {"use_stateless_adam": True, "save": str(tmp_path / "c"), "load": str(tmp_path / "c")}
    first = InProcess(config_for(model_folder("qwen3"), tmp_path, **flags))
    first.train(0, make_samples(3, 3))
    first.trainer.save(0)
    assert not list((tmp_path / "c").rglob("optim-*.safetensors"))
    second = InProcess(config_for(model_folder("qwen3"), tmp_path, **flags))
    assert second.start == 1
    for run in (first, second):
        run.train(1, make_samples(3, 3))
    assert all(torch.equal(first.weights[name], tensor) for name, tensor in second.weights.items())


def test_no_load_optim_and_no_load_rng_skip_saved_state(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    flags = {"save": str(tmp_path / "c"), "load": str(tmp_path / "c")}
    first = InProcess(config_for(model_folder("qwen3"), tmp_path, **flags))
    first.train(0, make_samples(3, 3))
    torch.rand(3)  # as a plugin may do
    saved = torch.get_rng_state()
    first.trainer.save(0)
    for leaves in (False, True):
        config = config_for(model_folder("qwen3"), tmp_path, **flags, no_load_optim=leaves, no_load_rng=leaves)
        again = InProcess(config)
        assert again.start == 1
        assert bool(again.trainer.actor.backend.optimizer.state) is not leaves
        assert torch.equal(torch.get_rng_state(), saved) is not leaves
        assert all(torch.equal(first.weights[name], tensor) for name, tensor in again.weights.items())


def test_incomplete_optimizer_state_of_a_parameter_is_refused(tmp_path: Path) -> None:
    names = [f"{part}/{name}" for part in (*MOMENTS, STEP) for name in ("whole", "part")]
    names.remove("exp_avg_sq/part")
    write_parts(tmp_path, 0, [SavedPart(OPTIMIZER, name, torch.zeros(1), (1,), (0,)) for name in names])
    saved = SavedTensors(tmp_path, OPTIMIZER)
    assert has_optimizer_state(saved, ["whole"])
    assert not has_optimizer_state(saved, ["frozen"])
    for wanted in (["part"], ["part", "whole"]):
        with pytest.raises(UserError, match="is damaged: the optimizer state of part is incomplete"):
            has_optimizer_state(saved, wanted)
