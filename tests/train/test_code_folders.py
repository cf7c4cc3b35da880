"""Tests plugin paths on nodes that receive copies of the plugin files."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.cluster.local import LocalNode
from slime.config import Config
from slime.train.node_paths import code_folders, config_for_node


class RemoteNode(LocalNode):
    is_here = False

    def path(self, path: str) -> str:
        return f"/there{path}"


def test_plugin_paths_are_mapped_to_the_remote_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "rewards.py").write_text("def reward(): ...\n")
    (tmp_path / "modules" / "package").mkdir(parents=True)
    (tmp_path / "modules" / "package" / "__init__.py").touch()
    (tmp_path / "modules" / "package" / "losses.py").write_text("def loss(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    rewards = str(tmp_path / "files" / "rewards.py")
    config = Config(
        hf_checkpoint="/model",
        custom_rm_path=f"{rewards}:reward",
        custom_loss_function_path="package.losses.loss",
        custom_generate_function_path="numpy.sum",
        save="/saved",
    )
    assert sorted(code_folders(config)) == [str(tmp_path / "files"), str(tmp_path / "modules")]
    there = config_for_node(RemoteNode(), config)
    assert there.custom_rm_path == f"/there{rewards}:reward"
    assert there.custom_loss_function_path == "package.losses.loss"
    assert (there.hf_checkpoint, there.save) == ("/there/model", "/there/saved")
    assert config_for_node(LocalNode(), config) is config
