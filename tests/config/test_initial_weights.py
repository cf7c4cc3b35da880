"""Initial weights of actor, reference and critic, and errors for folders that cannot be read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config, resolve
from slime.config.initial_weights import (
    find_critic_weights,
    find_initial_weights,
    find_reference_weights,
    first_rollout_id,
    model_folders,
)
from slime.config.model_folder import LATEST
from slime.data.sample import Sample
from slime.data.source import RolloutDataSource
from slime.driver.plan.plan import Plan, make_plan
from slime.errors import UserError
from slime.train.samples.batch import flatten_samples, make_train_batch
from slime.train.samples.carryover import load_carried, save_carried
from tests.config.conftest import TINY_QWEN3
from tests.model_files import add_weights, write_safetensors


def rejection(valid: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(UserError) as caught:
        resolve(Config(**{**valid, **changes}))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def plan_for(valid: dict[str, Any], **changes: Any) -> Plan:
    return make_plan(resolve(Config(**{**valid, "label_key": "label", **changes})), device="cpu", gpu_count=0)


def rows(plan: Plan) -> dict[str, str]:
    return dict(dict(plan.sections)["Model"])


def torch_dist(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp", "common.pt", "metadata.json"):
        (folder / name).write_bytes(b"")
    return folder


def torch_format(folder: Path) -> Path:
    (folder / "mp_rank_00_000").mkdir(parents=True)
    (folder / "mp_rank_00_000" / "model_optim_rng.pt").write_bytes(b"")
    return folder


def empty(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def make_with_tracker(folder: Path, name: str, make: Callable[[Path], Path]) -> Path:
    make(folder / name)
    (folder / LATEST).write_text(name.removeprefix("iter_").lstrip("0") or "0")
    return folder


def checkpoint(folder: Path, number: int = 3) -> Path:
    """Create a folder with a checkpoint in slime's format."""
    one = folder / f"iter_{number:07d}"
    one.mkdir(parents=True)
    (one / "meta.json").write_text(json.dumps({"format": 1, "next_rollout_id": number + 1, "model": {}}))
    write_safetensors(one / "model-00001.safetensors")
    (folder / LATEST).write_text(str(number))
    return folder


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A second model folder of the same shape."""
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY_QWEN3))
    return add_weights(folder)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda path: make_with_tracker(path, "release", torch_dist), "release"),
        (lambda path: make_with_tracker(path, "iter_0000100", torch_dist), "iter_0000100"),
        (torch_dist, ""),
    ],
)
def test_run_starts_from_the_weights_of_a_megatron_checkpoint(
    valid: dict[str, Any], tmp_path: Path, make: Callable[[Path], Path], name: str
) -> None:
    folder = make(tmp_path / "megatron")
    shown = folder / name if name else folder
    plan = plan_for(valid, load=str(folder))
    assert rows(plan)["starts from"] == f"--load {shown}, weights only"
    assert f"--load {folder} is a Megatron checkpoint: only its weights are read; " in " ".join(plan.notes)
    plan = plan_for(valid, ref_load=str(folder), use_kl_loss=True)
    assert rows(plan)["starts from"] == f"--ref-load {shown}, weights only"
    assert rows(plan)["reference"] == f"--ref-load {shown}"
    ppo = resolve(Config(**valid, advantage_estimator="ppo", critic_load=str(folder)))
    assert find_critic_weights(ppo).megatron == shown
    start = find_initial_weights(resolve(Config(**valid, load=str(folder))))
    assert (start.megatron, start.checkpoint, start.resumes) == (shown, None, False)


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (lambda path: make_with_tracker(path, "release", torch_dist), "torch_dist, release"),
        (lambda path: make_with_tracker(path, "iter_0000100", torch_format), "torch, iter_0000100"),
        (lambda path: make_with_tracker(path, "release", empty), "release"),
        (torch_format, "torch, megatron"),
    ],
)
def test_unusable_megatron_checkpoints_are_rejected_with_their_format(
    valid: dict[str, Any], tmp_path: Path, make: Callable[[Path], Path], shown: str
) -> None:
    folder = make(tmp_path / "megatron")
    what = f"{folder} is a Megatron checkpoint ({shown})"
    for flag, others in (("hf_checkpoint", {}), ("opd_teacher_load", {"use_opd": True, "opd_type": "trainer"})):
        assert rejection(valid, **others, **{flag: str(folder)}) == (
            f"--{flag.replace('_', '-')} {what}, but a Hugging Face folder is needed: convert it with slime convert, "
            "or give it as --load or --ref-load"
        )
    if "torch_dist" in shown:
        (folder / "release" / ".metadata").unlink()
    for flag, others in (("load", {}), ("ref_load", {}), ("critic_load", {"advantage_estimator": "ppo"})):
        remedy = " without .metadata: it is incomplete, copy it again"
        if "torch," in shown:
            remedy = (
                " of pickled objects, which are never opened here: convert it with Megatron to torch_dist "
                "(--ckpt-convert-format torch_dist)"
            )
        assert rejection(valid, **others, **{flag: str(folder)}) == f"--{flag.replace('_', '-')} {what}{remedy}"


def test_actor_does_not_read_ref_load_once_load_has_a_checkpoint(valid: dict[str, Any], tmp_path: Path) -> None:
    """Upstream flags `--ref-load HF_torch_dist --load X --save X`, before and after the first checkpoint."""
    script = {
        "ref_load": str(make_with_tracker(tmp_path / "HF_torch_dist", "release", torch_dist)),
        "load": str(tmp_path / "X"),
        "save": str(tmp_path / "X"),
    }
    assert rows(plan_for(valid, **script))["starts from"] == f"--ref-load {script['ref_load']}/release, weights only"
    checkpoint(tmp_path / "X")
    plan = plan_for(valid, **script)
    assert rows(plan)["starts from"] == f"--load {tmp_path / 'X' / 'iter_0000003'}"
    (note,) = [note for note in plan.notes if "--ref-load" in note]
    assert note.startswith(f"--ref-load {script['ref_load']} is not read: the actor starts from --load ")
    assert rows(plan_for(valid, **script, use_kl_loss=True))["reference"] == f"--ref-load {script['ref_load']}/release"
    resolve(Config(**{**valid, **script, "debug_rollout_only": True, "load": None, "save": None}))


def test_actor_starts_from_ref_load_if_load_has_no_checkpoint(
    valid: dict[str, Any], other: Path, tmp_path: Path
) -> None:
    model, nowhere = valid["hf_checkpoint"], str(tmp_path / "nowhere")
    assert rows(plan_for(valid))["starts from"] == f"--hf-checkpoint {model}"
    plan = plan_for(valid, ref_load=str(other))  # also without a KL term
    assert rows(plan)["starts from"] == f"--ref-load {other}"
    assert "reference" not in rows(plan)
    assert not [note for note in plan.notes if "load" in note and "--save" not in note]
    plan = plan_for(valid, ref_load=str(other), use_kl_loss=True, load=nowhere)
    assert rows(plan)["starts from"] == f"--ref-load {other}"
    assert rows(plan)["reference"] == f"--ref-load {other}"
    assert f"--load {nowhere} has no checkpoint: the actor starts from --ref-load {other}" in plan.notes
    plan = plan_for(valid, ref_load=str(other), use_kl_loss=True, load=str(checkpoint(tmp_path / "saved")))
    assert rows(plan)["starts from"] == f"--load {tmp_path / 'saved' / 'iter_0000003'}"
    assert rows(plan)["reference"] == f"--ref-load {other}"
    plan = plan_for(valid, ref_load=str(other), load=model)
    assert rows(plan)["starts from"] == f"--load {model}"


def test_critic_starts_from_the_policy_weights_unless_it_has_a_model(valid: dict[str, Any], other: Path) -> None:
    ppo = Config(**valid, advantage_estimator="ppo", ref_load=str(other))
    assert find_critic_weights(resolve(ppo)).hf_folder == other
    own = resolve(ppo.replace(critic_hf_checkpoint=valid["hf_checkpoint"]))
    assert find_critic_weights(own).hf_folder is None
    assert model_folders(own) == {"--hf-checkpoint": valid["hf_checkpoint"], "--ref-load": str(other)}


@pytest.mark.parametrize("flag", ["load", "ref_load"])
@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"num_hidden_layers": 3}, "num_hidden_layers 3"),
        ({"rope_parameters": {"rope_theta": 5e6}}, "rope_theta 5"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type yarn"),
    ],
)
def test_weights_of_another_shape_are_rejected(
    valid: dict[str, Any], model_dir: Path, other: Path, flag: str, change: dict[str, Any], shown: str
) -> None:
    (model_dir / "config.json").write_text(json.dumps({**TINY_QWEN3, "rope_theta": 1e6}))
    (other / "config.json").write_text(json.dumps({**TINY_QWEN3, **change}))
    found = rejection(valid, **{flag: str(other)})
    same = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "sliding_window": None}
    assert found.startswith(f"--{flag.replace('_', '-')} {other} has {shown}")
    assert found.endswith(": give two folders of the same model")
    (other / "config.json").write_text(json.dumps({**TINY_QWEN3, **same}))  # as other versions of transformers write it
    resolve(Config(**valid, **{flag: str(other)}))


def test_reference_may_differ_in_shape_but_not_in_vocabulary(valid: dict[str, Any], other: Path) -> None:
    flags = {"use_kl_loss": True, "ref_load": str(other), "load": valid["hf_checkpoint"]}
    (other / "config.json").write_text(json.dumps({**TINY_QWEN3, "num_hidden_layers": 3}))
    resolve(Config(**valid, **flags))
    (other / "config.json").write_text(json.dumps({**TINY_QWEN3, "vocab_size": 130}))
    assert rejection(valid, **flags).startswith(f"--ref-load {other} has vocab_size 130, but ")


def test_loading_one_iteration_resumes_at_its_data_position(valid: dict[str, Any], tmp_path: Path) -> None:
    """Also loads pending rollouts and the critic's checkpoint of the same rollout."""
    saved = checkpoint(checkpoint(tmp_path / "saved", 3), 5)
    checkpoint(checkpoint(saved / "critic", 3), 5)
    for rollout_id, offset in ((3, 2), (5, 6)):
        source = RolloutDataSource(Config(**valid, save=str(saved), disable_rollout_global_dataset=True))
        source.sample_group_index = offset
        source.save(rollout_id)
    waiting = Sample(tokens=[1, 2, 3], response_length=1, reward=1.0, status=Sample.Status.COMPLETED)
    save_carried(saved, 3, make_train_batch(Config(**valid), flatten_samples([[waiting]])))
    flags = {"load": str(saved / "iter_0000003"), "advantage_estimator": "ppo"}
    config = resolve(Config(**valid, **flags))
    assert find_initial_weights(config).checkpoint == saved / "iter_0000003"
    assert find_critic_weights(config).checkpoint == saved / "critic" / "iter_0000003"
    start = first_rollout_id(config)
    source = RolloutDataSource(config.replace(disable_rollout_global_dataset=True))
    source.load(start - 1)
    assert (start, source.sample_group_index) == (4, 2)
    assert len(load_carried(config.load, start - 1) or ()) == 1
    assert resolve(config) == config
    alone = Path(shutil.copytree(saved / "iter_0000003", tmp_path / "alone" / "iter_0000003"))
    assert find_initial_weights(resolve(Config(**valid, load=str(alone)))).checkpoint == alone


def test_load_step_applies_to_critic_load_unless_it_names_one_iteration(
    valid: dict[str, Any], other: Path, tmp_path: Path
) -> None:
    """Covers --ckpt-step and a --load that names a single iteration."""
    saved = checkpoint(checkpoint(tmp_path / "saved", 3), 5)
    checkpoint(checkpoint(saved / "critic", 3), 5)
    another = checkpoint(tmp_path / "another", 7)
    ppo = {**valid, "advantage_estimator": "ppo"}
    for load in ({"load": str(saved / "iter_0000003")}, {"load": str(saved), "ckpt_step": 3}):
        for one in (saved / "critic" / "iter_0000003", another / "iter_0000007"):
            config = resolve(Config(**ppo, **load, critic_load=str(one)))
            assert find_critic_weights(config).checkpoint == one
        assert find_critic_weights(resolve(Config(**ppo, **load, critic_load=str(other)))).hf_folder == other
        assert rejection(ppo, **load, critic_load=str(another)) == (
            f"--critic-load {another} has no iteration 3: choose another one"
        )


def test_ckpt_step_flags_select_a_checkpoint(valid: dict[str, Any], other: Path, tmp_path: Path) -> None:
    saved = checkpoint(checkpoint(tmp_path / "saved", 3), 5)
    config = resolve(Config(**valid, load=str(saved), ckpt_step=3, ref_load=str(saved), ref_ckpt_step=5))
    assert find_initial_weights(config).checkpoint == saved / "iter_0000003"
    assert find_initial_weights(config).resumes
    assert find_reference_weights(config).checkpoint == saved / "iter_0000005"
    fresh = resolve(Config(**valid, ref_load=str(saved), ref_ckpt_step=3))
    assert find_initial_weights(fresh).checkpoint == saved / "iter_0000003"
    assert not find_initial_weights(fresh).resumes
    assert rejection(valid, load=str(saved), ckpt_step=4).startswith(f"--load {saved} has no iteration 4")
    assert "is not a folder of checkpoints to pick iteration 3 from" in rejection(
        valid, ref_load=str(other), ref_ckpt_step=3
    )
    assert rejection(valid, ref_ckpt_step=3) == (
        "--ref-ckpt-step 3 selects a checkpoint of --ref-load: give --ref-load, or drop --ref-ckpt-step"
    )
    ppo = rejection(valid, ref_load=str(saved), advantage_estimator="ppo")
    assert ppo.endswith("which a critic cannot start from: give --critic-hf-checkpoint")
