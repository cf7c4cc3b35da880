"""Folders are found on a node or copied there as a whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from slime.cluster.remote.agent import OK, NodeAgent
from slime.cluster.remote.files import (
    CACHE_VARIABLE,
    CHUNK_BYTES,
    SMALL_BYTES,
    copy_code_to_node,
    copy_to_node,
    inventory,
)
from slime.errors import UserError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "here" / "model"
    (folder / "inner").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "inner" / "weights").write_bytes(os.urandom(2 * CHUNK_BYTES + 5))
    (folder / "empty").touch()
    return folder


class StubNode:
    """Stub of a node with its own folders: paths of the driver's machine are looked up below `root`."""

    def __init__(self, root: Path) -> None:
        self.agent = NodeAgent(os.getcwd())
        self.root = root
        self.calls: list[str] = []

    def call(self, method: str, *args: Any) -> Any:
        self.calls.append(method)
        if method in ("inventory", "code_inventory"):
            args = (str(self.root) + args[0],)
        kind, value = self.agent.call(method, *args)
        if kind == OK:
            return value
        raise UserError(value)


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StubNode:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return StubNode(tmp_path / "root")


def test_folder_with_the_same_content_on_the_node_is_not_copied(model: Path, there: StubNode) -> None:
    there.root = Path("/")
    assert copy_to_node(model, there.call) == str(model)
    assert there.calls == ["inventory"]


def test_missing_folder_is_copied_once(model: Path, there: StubNode, tmp_path: Path) -> None:
    copy = Path(copy_to_node(model, there.call))
    assert copy.is_relative_to(tmp_path / "cache")
    assert copy.name == "model"
    assert inventory(copy) == inventory(model)
    assert (copy / "inner" / "weights").read_bytes() == (model / "inner" / "weights").read_bytes()
    there.calls.clear()
    assert copy_to_node(model, there.call) == str(copy)
    assert there.calls == ["inventory", "arrive"]


def test_single_file_is_copied(model: Path, there: StubNode) -> None:
    copy = Path(copy_to_node(model / "config.json", there.call))
    assert copy.name == "config.json"
    assert copy.read_text() == "{}"


def test_folder_with_other_content_at_the_same_path_is_not_used(model: Path, there: StubNode, tmp_path: Path) -> None:
    other = Path(str(there.root) + str(model))
    (other / "inner").mkdir(parents=True)
    (other / "config.json").write_text("[]")
    (other / "inner" / "weights").write_bytes((model / "inner" / "weights").read_bytes())
    (other / "empty").touch()
    assert SMALL_BYTES > 2
    assert copy_to_node(model, there.call) != str(model)


def test_damaged_cache_is_copied_again(model: Path, there: StubNode) -> None:
    copy = Path(copy_to_node(model, there.call))
    (copy / "config.json").write_text("broken")
    assert inventory(Path(copy_to_node(model, there.call))) == inventory(model)


def test_python_modules_are_copied_and_added_to_pythonpath(
    there: StubNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    folder = tmp_path / "mine"
    for name in ("plain.py", "package/__init__.py", "package/part.py", "slime/__init__.py", "data/no_package.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("WORD = 1\n")
    (folder / "large.bin").write_bytes(b"no code")
    copy = Path(copy_code_to_node(folder, there.call))
    found = sorted(path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file())
    assert found == ["package/__init__.py", "package/part.py", "plain.py"]
    assert os.environ["PYTHONPATH"] == str(copy)


def test_missing_source_path_is_rejected(there: StubNode, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none is not there"):
        copy_to_node(tmp_path / "none", there.call)


def test_marker_file_shows_if_a_folder_is_shared(there: StubNode, tmp_path: Path) -> None:
    (tmp_path / "marker").write_text("word")
    assert there.call("sees", str(tmp_path / "marker"), "word")
    assert not there.call("sees", str(tmp_path / "marker"), "other")
    assert not there.call("sees", str(tmp_path / "nowhere" / "marker"), "word")
