from __future__ import annotations

import os.path
import sys
from pathlib import Path

import pytest

from slime.config.plugins import load_function
from slime.errors import UserError


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    (tmp_path / "neighbour_of_my_reward.py").write_text("SCALE = 3\n")
    file = tmp_path / "my_reward.py"
    file.write_text(
        "from neighbour_of_my_reward import SCALE\n"
        "calls = []\n"
        "NUMBER = 5\n"
        "def my_reward(args, sample): return SCALE * sample\n"
        "async def later(args, sample, sampling_params, evaluation=False): return sample\n"
        "def flexible(*args, **kwargs): return args\n"
        "class Source:\n    def __init__(self, args): self.args = args\n"
    )
    return file


def rejection(path: str, params: tuple[str, ...] | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load_function(path, what="--custom-rm-path", params=params)
    return str(caught.value)


def test_loads_dotted_and_colon_paths() -> None:
    assert load_function("os.path.join", what="x") is os.path.join
    assert load_function("os.path:join", what="x") is os.path.join


def test_loads_functions_and_classes_from_files(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_function(str(plugin), what="x", params=("args", "sample"))(None, 2) == 6
    assert load_function(f"{plugin}:flexible", what="x", params=("a", "b", "c"))(1) == (1,)
    assert load_function(f"{plugin}:Source", what="x", params=("args",))(4).args == 4
    monkeypatch.chdir(plugin.parent)
    assert load_function("my_reward.py:later", what="x") is load_function(f"{plugin}:later", what="x")


def test_modules_in_the_working_directory_are_importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reward_in_cwd_1.py").write_text("def reward(args, sample): return 7\n")
    monkeypatch.chdir(tmp_path)
    assert load_function("reward_in_cwd_1.reward", what="x")(None, None) == 7


def test_invalid_function_paths_are_rejected_with_a_remedy(plugin: Path, tmp_path: Path) -> None:
    assert rejection("justaname").endswith("write it as package.module.function or file.py:function")
    assert rejection("no_such_pkg_q.mod.f").startswith("--custom-rm-path no_such_pkg_q.mod.f: module no_such_pkg_q.mod")
    assert "is it installed" in rejection("no_such_pkg_q.mod.f")
    assert rejection(f"{tmp_path}/none.py:f") == f"--custom-rm-path: there is no file {tmp_path}/none.py"
    assert rejection("os.path.jion").endswith("has no jion: did you mean join?")
    assert rejection(f"{plugin}:my_rewards").endswith("has no my_rewards: did you mean my_reward?")
    assert rejection(f"{plugin}:zzzz").endswith("it defines my_reward, later, flexible, Source")
    assert rejection(f"{plugin}:NUMBER").endswith("is a int, not a function: name a callable")
    assert rejection(f"{plugin}:my_reward", ("args", "sample", "extra")) == (
        f"--custom-rm-path {plugin}:my_reward is called with (args, sample, extra), but its signature is "
        "(args, sample): change it"
    )


def test_import_error_message_includes_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken_plugin.py"
    broken.write_text("import no_such_dependency_q\n")
    sentence = f"{broken} could not be imported (ModuleNotFoundError: No module named 'no_such_dependency_q')"
    assert rejection(f"{broken}:f") == f"--custom-rm-path: {sentence}"
    for line, remedy in (
        (
            "from megatron.core import mpu",
            "or drop the import, which slime.backends.megatron_utils does not need)",
        ),
        (
            "import ray",
            "plugins are called in the processes of the run and do not need it; drop the import, or pip install 'slime[ray]')",
        ),
    ):
        monkeypatch.setitem(sys.modules, line.split()[1].partition(".")[0], None)  # simulates a missing package
        broken.write_text(f"{line}\n")
        assert rejection(f"{broken}:f").endswith(remedy)
    broken.write_text("def f(args, sample): return 1\n")
    assert load_function(f"{broken}:f", what="x")(None, None) == 1
    syntax = tmp_path / "syntax_plugin.py"
    syntax.write_text("def f(:\n")
    assert "SyntaxError" in rejection(f"{syntax}:f")


def test_paths_of_earlier_versions_load_the_moved_functions() -> None:
    for path, name in (
        ("slime.agent.live.service.generate", "generate"),
        ("slime.agent.live.baseline.traffic_baseline", "traffic_baseline"),
    ):
        found = load_function(path, what="--custom-generate-function-path")
        assert (found.__module__, found.__name__) == ("slime.agent.online", name)
