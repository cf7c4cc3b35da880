"""Start-up checks of folders: inputs are never overwritten, and outputs must be writable."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config, resolve
from slime.config.initial_weights import LATEST
from slime.config.paths import RolloutPath
from slime.errors import UserError
from slime.storage.files import mark_written
from tests.model_files import add_weights
from tests.small_disk import small_disk


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rejection(valid: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(UserError) as caught:
        resolve(Config(**{**valid, **changes}))
    return str(caught.value)


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return add_weights(folder)


def make_checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text('{"format": 1, "model": {}}')
    add_weights(folder).joinpath("model.safetensors").rename(folder / "model-00001.safetensors")
    return folder


PPO = {"advantage_estimator": "ppo"}
OPD = {"use_opd": True, "opd_type": "engine"}


@pytest.mark.parametrize(
    ("reads", "writes", "more"),
    [
        ("hf_checkpoint", "save_hf", {}),
        ("hf_checkpoint", "save", {}),
        ("hf_checkpoint", "output_dir", {}),
        ("hf_checkpoint", "update_weight_disk_dir", {}),
        ("hf_checkpoint", "update_weight_local_checkpoint_dir", {}),
        ("ref_load", "save_hf", {"use_kl_loss": True}),
        ("opd_teacher_load", "save_hf", OPD),
        ("critic_hf_checkpoint", "save_hf", PPO),
        ("load", "save_hf", {}),
        ("load", "output_dir", {}),
    ],
)
@pytest.mark.parametrize("how", ["plainly", "by another name", "through a link"])
def test_rejects_writing_into_a_model_folder_that_is_read(
    valid: dict[str, Any], work: Path, reads: str, writes: str, more: dict[str, Any], how: str
) -> None:
    folder = make_model(work / "base")
    (folder / "precious").mkdir()
    (work / "link").symlink_to(folder)
    named = {"plainly": "base", "by another name": "link/../base/.", "through a link": "link"}[how]
    flags = {**more, reads: str(folder), writes: named}
    flag = "--" + writes.replace("_", "-")
    read = "--" + reads.replace("_", "-")
    before = tree(work)
    sentence = f"{flag} {named} would write into the model folder that {read} {folder} reads: choose another folder"
    assert rejection(valid, **flags) == sentence
    assert tree(work) == before


@pytest.mark.parametrize(
    ("save_hf", "fine"),
    [
        ("base/trained", False),
        ("base/step_{rollout_id}", False),
        ("models", False),
        (".", False),
        ("models/step_{rollout_id}", False),
        ("models/step_{rollout_id}/x", False),
        ("models/other_{rollout_id}", True),
        ("models/step_{rollout_id:05d}", True),  # step_00003 differs from step_3
        ("linked_{rollout_id}", False),
        ("linked_{rollout_id}/deeper", False),
        ("base_new", True),
    ],
)
def test_rejects_save_hf_that_overlaps_folders_that_are_read(
    valid: dict[str, Any], work: Path, save_hf: str, fine: bool
) -> None:
    make_model(work / "base")
    make_model(work / "models/step_3")
    (work / "linked_7").symlink_to(work / "base")
    flags = {"hf_checkpoint": str(work / "base"), "ref_load": str(work / "models/step_3"), "use_kl_loss": True}
    flags |= {"save_hf": save_hf}
    before = tree(work)
    if fine:
        assert resolve(Config(**{**valid, **flags})).save_hf == save_hf
    else:
        assert rejection(valid, **flags).startswith(f"--save-hf {save_hf} ")
    assert tree(work) == before


@pytest.mark.parametrize(
    ("flags", "lost"),
    [
        ({"save": "run", "save_hf": "run"}, "--output-dir"),
        ({"save": "run/ckpt", "save_hf": "run", "output_dir": "out"}, "--save run/ckpt"),
        ({"output_dir": "out/a", "save_hf": "out"}, "--output-dir out/a"),
        ({"save_hf": "data"}, "--prompt-data data/p.jsonl"),
        ({"save_hf": "to_{rollout_id}"}, "--prompt-data data/p.jsonl"),
        (
            {"save_hf": "dumps", "save_debug_rollout_data": "dumps/{rollout_id}.jsonl"},
            "--save-debug-rollout-data dumps",
        ),
        ({"update_weight_local_checkpoint_dir": "out", "output_dir": "out"}, "--output-dir out"),
    ],
)
def test_rejects_replaced_folders_that_contain_other_paths_of_the_run(
    valid: dict[str, Any], work: Path, flags: dict[str, str], lost: str
) -> None:
    (work / "data").mkdir()
    (work / "data/p.jsonl").write_text('{"input": "a"}\n')
    (work / "to_2").symlink_to(work / "data")
    options = {**valid, "prompt_data": "data/p.jsonl@[:1]", **flags}
    if "save" in flags and "output_dir" not in flags:
        del options["output_dir"]
    assert f"is replaced as a whole, and {lost}" in rejection(options)


def test_save_hf_may_be_inside_the_run_folder(valid: dict[str, Any], work: Path) -> None:
    flags = {"save": "run", "load": "run", "save_hf": "run/hf_{rollout_id}", "output_dir": "run"}
    assert resolve(Config(**{**valid, **flags})).save_hf == "run/hf_{rollout_id}"
    assert not (work / "run").exists()


def test_save_hf_replaces_only_folders_that_a_run_wrote(valid: dict[str, Any], work: Path) -> None:
    folder = make_model(work / "hf_3")
    assert rejection(valid, save_hf="hf_{rollout_id}") == (
        f"--save-hf hf_{{rollout_id}} would replace {folder}, which holds what no run saved (config.json): choose "
        "another folder, or move that away"
    )
    mark_written(folder)
    resolve(Config(**{**valid, "save_hf": "hf_{rollout_id}"}))
    (folder / "mine").mkdir()
    assert "(mine)" in rejection(valid, save_hf="hf_{rollout_id}")
    resolve(Config(**{**valid, "save_hf": "hf_{rollout_id}", "num_rollout": 2}))  # the run ends before rollout 3
    (work / "file").touch()
    assert "is a file, but a folder is needed" in rejection(valid, save_hf="file")


def test_rejects_save_that_would_overwrite_checkpoints_of_another_run(valid: dict[str, Any], work: Path) -> None:
    make_checkpoint(work / "run/iter_0000001")
    make_checkpoint(work / "run/iter_0000004")
    (work / "run" / LATEST).write_text("4\n")
    sentence = (
        "--save run holds the checkpoints of an earlier run (up to iter_0000004), which this one would overwrite: add "
        "--load run to resume from them, or choose another folder"
    )
    assert rejection(valid, save="run") == sentence
    for load in ("run", "run/iter_0000001", str(work / "run")):
        resolve(Config(**{**valid, "save": "run", "load": load}))
    (work / "run/iter_0000002").mkdir()
    (work / "run/iter_0000002/mp_rank_00").mkdir()
    assert "has a checkpoint that this slime did not write" in rejection(valid, save="run", load="run")


def test_rejects_critic_save_equal_to_save(valid: dict[str, Any], work: Path) -> None:
    assert "--critic-save and --save are both run" in rejection(valid, **PPO, save="run", critic_save="./run")


def test_rejects_weight_sync_folders_with_files_that_no_run_wrote(valid: dict[str, Any], work: Path) -> None:
    version = make_model(work / "versions/weight_v000002")
    assert "no run wrote it" in rejection(valid, update_weight_disk_dir="versions")
    mark_written(version)
    flags = {"update_weight_disk_dir": "versions", "update_weight_transport": "disk"}
    resolve(Config(**{**valid, **flags}))
    assert "that this run removes: copy it elsewhere first" in rejection(valid, **flags, hf_checkpoint=str(version))
    (work / "local").mkdir()
    flags = {"update_weight_local_checkpoint_dir": "local"}
    resolve(Config(**{**valid, **flags}))
    (work / "local/thesis.txt").touch()
    assert "holds files that no run wrote" in rejection(valid, **flags)
    (work / "local/.weight_sync").mkdir()
    (work / "local/.weight_sync/files.json").write_text("[]")
    resolve(Config(**{**valid, **flags}))


@pytest.mark.parametrize("flag", ["save_debug_rollout_data", "save_debug_train_data"])
def test_debug_dumps_may_overwrite_only_debug_dumps(valid: dict[str, Any], work: Path, flag: str) -> None:
    (work / "d").mkdir()
    (work / "d/1.jsonl").write_text(json.dumps({"format": "slime-rollout"}) + "\n")
    (work / "d/notes.jsonl").write_text("{}\n")
    resolve(Config(**{**valid, flag: "d/{rollout_id}.jsonl"}))
    (work / "d/eval_2.jsonl").write_text('{"input": "a"}\n')
    assert f"would overwrite {work}/d/eval_2.jsonl, which no run wrote" in rejection(
        valid, **{flag: "d/{rollout_id}.jsonl"}
    )
    flags = {flag: "d/eval_{rollout_id}.jsonl", "prompt_data": "d/eval_2.jsonl"}
    assert "would overwrite --prompt-data d/eval_2.jsonl" in rejection(valid, **flags)
    if flag == "save_debug_rollout_data":
        (work / "d/0.jsonl").write_text(json.dumps({"format": "slime-rollout"}) + "\n")
        flags = {flag: "d/{rollout_id}.jsonl", "load_debug_rollout_data": "./d/{rollout_id}.jsonl"}
        (work / "d/eval_2.jsonl").unlink()
        assert "the dump would overwrite itself" in rejection(valid, **flags)


def test_rejects_output_dir_with_run_files_that_no_run_wrote(valid: dict[str, Any], work: Path) -> None:
    (work / "out").mkdir()
    (work / "out/notes.md").touch()
    resolve(Config(**valid))
    (work / "out/config.yaml").write_text("lr: 1e-6  # mine\n")
    assert "has a config.yaml that no run wrote and this one would overwrite" in rejection(valid)
    (work / "out/config.yaml").unlink()
    (work / "out/reward.png").touch()
    assert "has a reward.png that no run wrote" in rejection(valid)
    (work / "out/.lock").touch()
    resolve(Config(**valid))
    (work / "out/.lock").unlink()
    (work / "out/config.yaml").write_text("# The resolved config of a run; start it again with --config x\n")
    resolve(Config(**valid))
    assert "is outside the run folder" in rejection(valid, tb_project_name=str(work))
    assert "is outside the run folder" in rejection(valid, tb_project_name="ok", tb_experiment_name="../../tb")


@pytest.mark.parametrize(
    "flag", ["save", "save_hf", "output_dir", "update_weight_disk_dir", "save_debug_rollout_data", "critic_save"]
)
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_read_only_file_system_is_detected_by_a_trial_write(valid: dict[str, Any], work: Path, flag: str) -> None:
    mount = work / "disk"
    (mount / "there").mkdir(parents=True)
    path = "disk/there/x/{rollout_id}.jsonl" if flag.startswith("save_debug") else "disk/there/x"
    flags = {**(PPO if flag == "critic_save" else {}), flag: path}
    resolve(Config(**{**valid, **flags}))
    assert list((mount / "there").iterdir()) == []
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", mount], check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        assert rejection(valid, **flags) == (
            f"--{flag.replace('_', '-')} disk/there/x cannot be written (Read-only file system in {mount}): choose another folder"
        )
    finally:
        subprocess.run(["umount", mount], check=True)


def test_full_disk_is_detected_before_the_start(valid: dict[str, Any], work: Path) -> None:
    with small_disk(work / "disk") as disk:
        (disk / "filler").write_bytes(bytes(64 * 1024))
        assert rejection(valid, save_hf="disk/hf") == (
            f"--save-hf disk/hf cannot be written (No space left on device in {disk}): choose another folder"
        )
        assert [path.name for path in disk.iterdir()] == ["filler"]


def test_rollout_path_parses_ids_and_lists_existing_paths(work: Path) -> None:
    one = RolloutPath("a/b")
    assert (one.is_one, one.real, one.fixed_folder) == (True, str(work / "a/b"), work / "a")
    many = RolloutPath("a/{rollout_id}_of_{rollout_id}/x")
    assert (many.is_one, many.fixed_folder) == (False, work / "a")
    assert many.rollout_of(work / "a/12_of_12/x") == 12
    assert many.rollout_of(work / "a/12_of_x/x") is None
    braces = RolloutPath("a/{{set}}_{rollout_id}")
    (work / "a/{set}_5").mkdir(parents=True)
    (work / "a/{set}_mine").mkdir()
    assert list(braces.present()) == [(5, work / "a/{set}_5")]
