"""A user mistake gives one error line and exit code 2, and creates no output folder."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from slime import cli
from tests.e2e.conftest import grpo_flags
from tests.model_files import add_weights

FLAGS = [*grpo_flags(), "--num-rollout", "1", "--output-dir", "bad"]


@pytest.fixture(scope="module")
def bad_files(place: Path) -> Path:
    rows = (place / "sums.jsonl").read_text().splitlines()
    (place / "broken.jsonl").write_text("\n".join([*rows[:2], '{"messages": [', *rows[2:]]) + "\n")
    (place / "empty.jsonl").write_text("")
    long = {"messages": [{"role": "user", "content": "the quick fox " * 300}], "label": "1"}
    (place / "long.jsonl").write_text(rows[0] + "\n" + json.dumps(long) + "\n")
    (place / "raises.py").write_text("import nothing_of_this_name\n")
    (place / "no_config").mkdir()
    martian = place / "martian"
    martian.mkdir()
    (martian / "config.json").write_text(json.dumps({"model_type": "martian", "hidden_size": 8}))
    add_weights(martian)
    narrow = place / "narrow"
    shutil.copytree(place / "model", narrow)
    (narrow / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 100}))
    return place


MISTAKES = {
    "missing file": (["--prompt-data", "nowhere.jsonl"], "--prompt-data: there is no file nowhere.jsonl"),
    "broken line": (["--prompt-data", "broken.jsonl"], "broken.jsonl:3"),
    "broken line of an evaluation": (
        ["--eval-prompt-data", "held-out", "broken.jsonl", "--skip-eval-before-train"],
        "broken.jsonl:3",
    ),
    "missing key": (["--input-key", "question"], "question"),
    "missing label": (["--label-key", "answer"], "answer"),
    "empty data": (["--prompt-data", "empty.jsonl"], "empty.jsonl"),
    "unknown flag": (["--rollout-batchsize", "4"], "did you mean --rollout-batch-size?"),
    "batch arithmetic": (["--global-batch-size", "7"], "7"),
    "long prompt": (["--prompt-data", "long.jsonl"], "long.jsonl:2"),
    "no config": (["--hf-checkpoint", "no_config"], "no_config has no config.json"),
    "unknown architecture": (["--hf-checkpoint", "martian"], "unknown model_type 'martian'"),
    "reference of an unknown architecture": (
        ["--use-kl-loss", "--ref-load", "martian"],
        "--ref-load martian has model_type martian, but --hf-checkpoint model",
    ),
    "weights of another model": (
        ["--hf-checkpoint", "narrow"],
        "vocab_size 100, but the embedding in the weights has 320",
    ),
    "no such module": (["--custom-rm-path", "nowhere.reward"], "--custom-rm-path nowhere.reward"),
    "failing module": (["--custom-rm-path", "raises.py:reward"], "nothing_of_this_name"),
    "no such function": (["--custom-rm-path", "plugins.py:token_sun"], "did you mean token_sum?"),
    "wrong signature": (["--custom-rm-path", "plugins.py:no_parameters"], "called with (args, sample)"),
    "no such reference": (["--ref-load", "nowhere"], "there is no model folder nowhere: --ref-load takes"),
}


def assert_one_sentence(code: int, out: str, err: str, said: str) -> None:
    assert code == 2, err
    assert err.startswith("error: "), err
    assert err.count("\n") == 1, err
    assert said in err
    assert out in ("", "checking the model and the prompts; the run's files go to bad\n")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_one_error_line_and_exit_code_2(
    mistake: str, bad_files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(bad_files)
    words, said = MISTAKES[mistake]
    code = cli.main(["train", *FLAGS, *words])
    captured = capsys.readouterr()
    assert_one_sentence(code, captured.out, captured.err, said)
    assert not Path("bad").exists()


def test_port_in_use_is_one_error_line(
    bad_files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(bad_files)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = cli.main(["train", *FLAGS, "--engine-port", str(port)])
    captured = capsys.readouterr()
    assert_one_sentence(code, captured.out, captured.err, f"port {port} on 127.0.0.1 is in use")
    assert not Path("bad").exists()
