"""`slime.utils.external_utils.command_utils`: runs commands of launch scripts without a shell and without Ray."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import slime.utils.external_utils.command_utils as U
from slime.errors import UserError
from slime.utils.external_utils.command_utils import parsed_env, shown, words_of

SCRIPT = """\
import json, os, sys
print(json.dumps([sys.argv[1:], os.environ.get("A"), os.environ.get("B")]))
sys.exit(3 if "--fail" in sys.argv else 0)
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--a 1  --b\n --c", ["--a", "1", "--b", "--c"]),
        ("--a \\\n 1 # not this\n", ["--a", "1"]),
        ('--json \'{"x": "$A"}\' --two "one word"', ["--json", '{"x": "$A"}', "--two", "one word"]),
        ('--a $A --b ${B} --c "$A$NONE!" --d it\\\'s', ["--a", "1 2", "--b", "b", "--c", "1 2!", "--d", "it's"]),
        (
            "--x $(touch here) ; rm `ls` | cat > out &",
            ["--x", "$(touch", "here)", ";", "rm", "`ls`", "|", "cat", ">", "out", "&"],
        ),
    ],
)
def test_splits_command_lines_without_a_shell(text: str, words: list[str], tmp_path: Path) -> None:
    assert words_of(text, {"A": "1 2", "B": "b"}) == words
    assert not list(tmp_path.iterdir())


def test_parses_env_hides_secrets_and_rejects_malformed_text() -> None:
    with pytest.raises(UserError, match="close its quotes"):
        words_of("--a 'b", {})
    assert parsed_env('{"A": 1}') == parsed_env(" A=1 ") == {"A": "1"}
    assert parsed_env("") == {}
    with pytest.raises(UserError, match=r"B has no value: write NAME=value"):
        parsed_env("A=1 B")
    assert shown(["python", "--wandb-key", "secret", "a b"]) == "python --wandb-key ... 'a b'"


def test_execute_train_passes_model_flags_and_own_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SCRIPT)
    order: list[str] = []
    U.execute_train(
        "--lr $A --save 'a folder'",
        8,
        "qwen3-4B",
        train_script="mine.py",
        before_ray_job_submit=lambda: order.append("before"),
        extra_env_vars={"A": 2},
        config=U.ExecuteTrainConfig(extra_env_vars="B=3"),
    )
    words, a, b = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert words[-4:] == ["--lr", "2", "--save", "a folder"]
    assert words[words.index("--num-layers") + 1] == "36"
    assert words[words.index("--hidden-size") + 1] == "2560"
    assert (a, b, order) == ("2", "3", ["before"])
    U.execute_train("--lr 1", 1, None, "mine.py")
    assert json.loads(capfd.readouterr().out.splitlines()[-1])[0] == ["--lr", "1"]
    with pytest.raises(subprocess.CalledProcessError) as caught:
        U.execute_train("--fail", 1, None, "mine.py")
    assert caught.value.returncode == 3
    with pytest.raises(UserError, match=r"no model script .*qwen9-1B\.sh: choose one of .*qwen3-4B"):
        U.execute_train("", 1, "qwen9-1B")
    with pytest.raises(UserError, match=r"there is no other\.py"):
        U.execute_train("", 1, None, "other.py")
    with pytest.raises(UserError, match="a run is on one machine"):
        U.execute_train("", 1, None, config=U.ExecuteTrainConfig(num_nodes=2))


def test_convert_checkpoint_links_the_hugging_face_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "hf" / "Qwen3-4B"
    with pytest.raises(UserError, match="is not a Hugging Face folder"):
        U.convert_checkpoint("Qwen3-4B", "qwen3-4B", 8, dir_dst=str(tmp_path), hf_checkpoint=str(model))
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    for _ in range(2):
        U.convert_checkpoint("Qwen3-4B", "qwen3-4B", 8, dir_dst=str(tmp_path), hf_checkpoint=str(model))
    assert (tmp_path / "Qwen3-4B_torch_dist").resolve() == model
    assert "nothing has to be converted" in capsys.readouterr().out


def test_command_env_and_temp_file_helpers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert U.exec_command("echo $((1 + 1)) && true", capture_output=True) == "2\n"
    assert U.exec_command(f"{sys.executable} --version") is None
    with pytest.raises(subprocess.CalledProcessError):
        U.exec_command("exit 4")
    assert re.fullmatch(r"\d{6}-\d{6}-\d{3}", U.create_run_id())
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert U.get_default_wandb_args("tests/test_x_y.py") == ""
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.delenv("GITHUB_COMMIT_NAME", raising=False)
    found = U.get_default_wandb_args("tests/test.py", run_name_prefix="p", run_id="1")
    assert found.split() == [
        "--use-wandb", "--wandb-project", "slime-tests_test", "--wandb-group", "p_1", "--disable-wandb-random-suffix",
    ]  # fmt: skip
    for text, expected in (("TRUE", True), ("1", True), ("no", False), ("", False)):
        monkeypatch.setenv("A_SWITCH", text)
        assert U.get_bool_env_var("A_SWITCH") is expected
    monkeypatch.delenv("A_SWITCH")
    assert U.get_bool_env_var("A_SWITCH", "true") is True
    path = U.save_to_temp_file("a: 1\n", "yaml")
    assert path.endswith(".yaml")
    assert Path(path).read_text() == "a: 1\n"
    Path(path).unlink()
    monkeypatch.setenv("SLIME_SCRIPT_NUM_NODES", "4")
    assert U.ExecuteTrainConfig().num_nodes == 4


@pytest.mark.parametrize("rsync", ["installed", "missing"])
def test_rsync_simple_copies_with_and_without_rsync(
    rsync: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rsync == "missing":
        monkeypatch.setenv("PATH", "")
    source, target = tmp_path / "a", tmp_path / "deep" / "b"
    (source / "inner").mkdir(parents=True)
    (source / "inner" / "file").write_text("1")
    U.rsync_simple(str(source), str(target))
    assert (target / "inner" / "file").read_text() == "1"
