from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slime import cli
from tests.model_files import add_weights

ROOT = Path(__file__).parents[1]


@pytest.fixture
def command_line(tmp_path: Path) -> list[str]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 8}))
    add_weights(model)
    (tmp_path / "prompts.jsonl").write_text('{"input": "1", "answer": "1"}\n' * 9)
    return [
        *("--hf-checkpoint", str(model), "--prompt-data", str(tmp_path / "prompts.jsonl"), "--device", "cpu"),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--num-rollout", "3", "--rm-type", "math"),
        *("--label-key", "answer"),
        *("--rollout-max-response-len", "8", "--output-dir", str(tmp_path / "out")),
    ]


def test_dry_run_prints_the_plan_and_writes_no_output(
    command_line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *command_line, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "4 prompts x 2 samples = 8 samples" in printed
    assert not (tmp_path / "out").exists()
    assert cli.main(["plan", *command_line]) == 0
    assert _without_free_memory(capsys.readouterr().out) == _without_free_memory(printed)


def test_eval_plan_needs_no_prompts_and_no_trainer(
    command_line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*command_line[:2], "--device", "cpu", "--rm-type", "math", "--label-key", "answer", "--dry-run"]
    data = ["--eval-prompt-data", "own", str(tmp_path / "prompts.jsonl")]
    assert cli.main(["eval", *words, *data]) == 0
    plan = capsys.readouterr().out
    assert "evaluation alone: engines serve" in plan
    assert "trainer" not in plan.split("Processes")[1].split("Batches")[0]
    assert cli.main(["train", "--num-rollout", "0", *words, *data]) == 0
    assert _without_free_memory(capsys.readouterr().out) == _without_free_memory(plan)
    for wrong, sentence in (
        (words, "slime eval needs data: --eval-prompt-data NAME PATH"),
        ([*words, *data, "--num-rollout", "3"], "slime eval trains nothing: drop --num-rollout 3"),
    ):
        assert cli.main(["eval", *wrong]) == 2
        assert sentence in capsys.readouterr().err


def _without_free_memory(plan: str) -> list[str]:
    """Drops the lines about free memory, which other processes change between two calls."""
    return [line for line in plan.splitlines() if not line.startswith(("  available", "  each engine"))]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["train", "--rollout-batchsize", "3"],
            "error: unknown flag --rollout-batchsize: did you mean --rollout-batch-size?",
        ),
        (["plan"], "error: --hf-checkpoint DIR and --prompt-data PATH are missing: give all of them"),
        (["tarin"], "error: unknown command tarin: did you mean train?"),
        (
            [],
            "error: a command is missing: one of quickstart, train, train-async, eval, stages, plan, samples, serve, fleet, convert, models, flags, help, version",
        ),
        (
            ["flags", "lerning", "rate"],
            "error: no flag has 'lerning' in its name, help or group: did you mean learning?",
        ),
    ],
)
def test_usage_errors_are_one_line_and_exit_code_2(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(line)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    "words", [["--help"], ["train", "--help"], ["train", "-h"], ["flags"], ["flags", "slime"], ["version"]]
)
def test_help_and_version_go_to_stdout_with_exit_code_0(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    captured = capsys.readouterr()
    assert "slime" in captured.out
    assert captured.err == ""


def test_help_fits_a_screen_and_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["help"]) == 0
    text = capsys.readouterr().out
    assert cli.main(["--help"]) == 0
    assert capsys.readouterr().out == text
    assert len(text.splitlines()) <= 45
    assert max(map(len, text.splitlines())) <= 105
    assert [line.split()[0] for line in text.splitlines()[2:16]] == list(cli._COMMANDS)


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("optimizer", "--adam-beta1"),
        ("distillation", "--opd-kl-coef"),
        ("upstream", "without effect"),
        ("--lr", "peak learning rate"),
        ("rollout_batch_size", "--rollout-batch-size N"),
        ("samples", "usage: slime samples"),
        ("quickstart", "usage: slime quickstart"),
        ("temperature", "--rollout-temperature"),
    ],
)
def test_help_knows_topics_commands_flags_and_words(
    topic: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["help", topic]) == 0
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize("command", [name for name in cli._COMMANDS if name not in ("help", "version", "flags")])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    assert "usage: " in capsys.readouterr().out


def test_interrupt_exits_with_code_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(words: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_train_async", interrupted)
    assert cli.main(["train-async"]) == 130


def test_first_line_is_printed_before_the_driver_import(
    command_line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "slime.driver.loop", None)  # importing it raises
    with pytest.raises(ImportError):
        cli.main(["train", *command_line])
    line = f"checking the model and the prompts; the run's files go to {tmp_path / 'out'}\n"
    assert capsys.readouterr().out == line
    with pytest.raises(ImportError):
        cli.main(["train", *command_line, "--progress", "none"])
    assert capsys.readouterr().out == ""


def test_dry_run_and_flag_commands_do_not_import_torch(command_line: list[str]) -> None:
    program = (
        "import sys\n"
        "from slime import cli\n"
        f"assert cli.main(['train', *{command_line!r}, '--dry-run']) == 0\n"
        "assert cli.main(['train', '--lrr', '1']) == 2\n"
        "assert cli.main(['flags', '--markdown']) == 0\n"
        "assert cli.main(['flags', 'batch']) == 0\n"
        "import slime.driver.loop\n"  # first starts the processes that import torch, and defers its own import
        "heavy = {'torch', 'transformers', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if 'torch' in heavy or 'transformers' in heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.cold
def test_train_py_reports_flag_errors_like_slime_train(command_line: list[str]) -> None:
    command = [sys.executable, str(ROOT / "train.py"), *command_line, "--seed", "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (2, "error: --seed must be a whole number, not 'x'\n")


def test_models_command_lists_models_and_prints_configs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["models"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("qwen3-30B-A3B"))
    assert line.split() == ["qwen3-30B-A3B", "Qwen3-MoE", "30.53", "B", "3.35", "B", "48"]
    assert cli.main(["models", "qwen3-30B-A3B"]) == 0
    assert json.loads(capsys.readouterr().out)["num_experts"] == 128
    assert cli.main(["models", "qwen3-30B-A3B", "--args"]) == 0
    assert "--num-experts\n128\n" in capsys.readouterr().out
    assert cli.main(["models", "qwen3-4B", "--write", str(tmp_path / "m")]) == 0
    assert json.loads((tmp_path / "m" / "config.json").read_text())["hidden_size"] == 2560
    assert cli.main(["models", "qwen9"]) == 2
    assert "`slime models` lists them" in capsys.readouterr().err
