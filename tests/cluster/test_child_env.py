"""Children started in a folder with another `slime` import this package and still find the user's modules."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

import slime
from slime.cluster.child_env import module_command
from slime.config.plugins import load_function
from slime.data.prompts import PromptDataset
from slime.errors import UserError
from slime.rollout.rewards.worker_pool import GuardedPool

OURS = str(Path(slime.__file__).resolve().parent)
SAYS_WHICH = """
import json, multiprocessing, sys
import slime, slime.errors, neighbour
def package(_=None):
    import slime.errors
    return slime.errors.__file__
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(json.dumps([package(), pool.map(package, [0])[0], neighbour.NAME, sys.argv[1:]]))
"""


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with another `slime`, which must not be imported, and with modules of the user."""
    (tmp_path / "slime" / "rollout").mkdir(parents=True)
    (tmp_path / "slime" / "__init__.py").write_text("raise ImportError('this is another slime')\n")
    (tmp_path / "slime" / "rollout" / "theirs.py").write_text("def reward(args, sample): return 1.0\n")
    (tmp_path / "neighbour.py").write_text("NAME = 'the neighbour'\ndef reward(args, sample): return 1.0\n")
    (tmp_path / "says_which.py").write_text(SAYS_WHICH)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(Path(OURS).parent))])
    return tmp_path


def output(command: tuple[str, ...]) -> list[str]:
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_child_and_grandchild_import_this_slime_and_the_users_modules(upstream: Path) -> None:
    found = output((*module_command("says_which"), "--flag", "value"))
    assert found == [f"{OURS}/errors.py", f"{OURS}/errors.py", "the neighbour", ["--flag", "value"]]


def test_child_keeps_the_working_folder_first_on_sys_path(upstream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (upstream / "colorsys.py").write_text("")
    (upstream / "which_module.py").write_text("import colorsys, json; print(json.dumps(colorsys.__file__))")
    assert output(module_command("which_module")) != str(upstream / "colorsys.py")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert output(module_command("which_module")) == str(upstream / "colorsys.py")


def test_reward_workers_import_this_slime(upstream: Path) -> None:
    pool = GuardedPool("slime.rollout.rewards.math_worker", size=1)
    try:
        asked = {"prediction": "1/2", "boxed": True, "label": "0.5"}
        assert asyncio.run(pool.ask(asked)) == {"equal": True}
    finally:
        pool.close()


def test_prompt_workers_import_this_slime(upstream: Path) -> None:
    (upstream / "prompts.jsonl").write_text('{"input": "2+2="}\n{"input": "3+3="}\n')
    load_function("neighbour.reward", what="--custom-rm-path")  # adds the folder to the search path
    dataset = PromptDataset("prompts.jsonl", num_workers=1)
    assert [sample.prompt for sample in dataset] == ["2+2=", "3+3="]


def test_error_for_a_plugin_of_the_other_slime_names_both_packages(upstream: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_function("slime.rollout.theirs.reward", what="--custom-rm-path")
    assert str(caught.value) == (
        "--custom-rm-path slime.rollout.theirs.reward: module slime.rollout.theirs could not be imported "
        "(ModuleNotFoundError: No module named 'slime.rollout.theirs'): it is in slime of this folder, but the run "
        f"uses that of {Path(OURS).parent}; give its file instead"
    )
