"""Stages of one config file: values, folders, and errors found before the first stage starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slime import cli
from slime.config.plugins.view import plugin_args
from slime.driver.stages import read_stages
from slime.errors import UserError
from tests.tiny_models import make_model_folder

FILE = """\
hf_checkpoint: {model}
prompt_data: {prompts}
rm_type: random
rollout_batch_size: 4
rollout_max_response_len: 8
device: cpu
output_dir: {out}
custom: {{pass_rate_most: 0.7, other: [1, 2]}}
stages:
  - name: short
    num_rollout: 3
    n_samples_per_prompt: 2
  - name: long-1
    num_rollout: 2
    n_samples_per_prompt: 4
    rollout_max_response_len: 16
    custom: {{pass_rate_most: 0.8}}
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that writes FILE with one text replaced."""
    make_model_folder(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"input": "hi"}\n')

    def make(old: str = "", new: str = "") -> Path:
        text = FILE.format(model=tmp_path / "model", prompts=tmp_path / "prompts.jsonl", out=tmp_path / "out")
        assert old in text
        file = tmp_path / "stages.yaml"
        file.write_text(text.replace(old, new, 1) if old else text)
        return file

    return make


def test_stage_has_its_own_values_and_loads_the_previous_stage(write: Callable[..., Path], tmp_path: Path) -> None:
    short, long = read_stages(write(), ["--lr", "3e-4"])
    assert [stage.heading for stage in (short, long)] == ["stage 1 of 2: short", "stage 2 of 2: long-1"]
    first, second = short.config(), long.config()
    assert (first.num_rollout, second.num_rollout) == (3, 5)  # numbered across stages
    assert (first.n_samples_per_prompt, second.n_samples_per_prompt) == (2, 4)
    assert (first.rollout_max_response_len, second.rollout_max_response_len) == (8, 16)
    assert first.lr == second.lr == 3e-4
    folders = [str(tmp_path / "out" / name) for name in ("1-short", "2-long-1")]
    assert [first.output_dir, first.save, first.load] == [folders[0]] * 3
    assert [second.output_dir, second.save, second.load] == [folders[1], folders[1], folders[0]]
    for config, most, name in ((first, 0.7, "short"), (second, 0.8, "long-1")):
        args = plugin_args(config)
        assert (args.pass_rate_most, args.other, args.stage) == (most, [1, 2], name)


def test_stage_resumes_from_its_own_checkpoint(write: Callable[..., Path], tmp_path: Path) -> None:
    _, long = read_stages(write())
    own = tmp_path / "out" / "2-long-1"
    (own / "iter_0000003").mkdir(parents=True)
    (own / "iter_0000003" / "meta.json").write_text('{"next_rollout_id": 4}')
    (own / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(UserError, match=r"2-long-1/iter_0000003 has no weights"):  # the damaged checkpoint is chosen
        long.config()


def test_first_stage_may_load_a_checkpoint(write: Callable[..., Path], tmp_path: Path) -> None:
    first, _ = read_stages(write("    num_rollout: 3\n", f"    num_rollout: 3\n    load: {tmp_path / 'old'}\n"))
    assert first.config().load == str(tmp_path / "old")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("stages:", "steps:", "unknown key|must have a list `stages`"),
        ("name: short", "name: ../short", "stage 1 of .* needs a name of letters, digits, - and _"),
        ("    num_rollout: 2\n", "", "stage 2 of .* needs num_rollout"),
        (
            "    num_rollout: 2\n",
            "    num_rollout: 2\n    save: there\n",
            "stage 2 of .*: save follows from the stages",
        ),
        (
            "    num_rollout: 2\n",
            "    num_rollout: 2\n    load: there\n",
            "stage 2 of .*: load follows from the stages",
        ),
        ("    num_rollout: 2\n", "    num_rolout: 2\n", "unknown key num_rolout in .*: did you mean num_rollout"),
        ("other: [1, 2]", "lr: 1", "custom.lr has a meaning already"),
        ("other: [1, 2]", "stage: mine", "custom.stage has a meaning already"),
    ],
)
def test_rejects_invalid_stage_files(write: Callable[..., Path], old: str, new: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_stages(write(old, new))


def test_dry_run_plans_every_stage(write: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stages", str(write()), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "stage 1 of 2: short\n" in shown
    assert "4 prompts x 2 samples" in shown
    assert shown.index("4 prompts x 4 samples") > shown.index("stage 2 of 2: long-1\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "slime stages needs the config file first"),
        (["FILE", "--config", "x.yaml"], "--config cannot be combined with"),
        (["FILE", "--lrr", "1"], "unknown flag --lrr"),
    ],
)
def test_command_line_errors_are_one_line(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert cli.main(["stages", *(str(write()) if word == "FILE" else word for word in words)]) == 2
    captured = capsys.readouterr().err
    assert said in captured
    assert captured.count("\n") == 1
