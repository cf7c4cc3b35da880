"""The datasets of `--prompt-config`: precedence of values, one-sentence errors, and conflicting flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.cli import main
from slime.config import Config, derive, resolve
from slime.config.datasets import eval_datasets, prompt_files, train_datasets
from slime.config.plugins.view import plugin_args
from slime.errors import UserError

BOTH = """
train:
  defaults: {label_key: answer, custom_rm_path: m.f, max_prompt_len: 7}
  datasets:
    - {name: a, path: a.jsonl, weight: 2, rm_type: math, max_response_len: 9, stop: [x], min_new_tokens: 2}
    - {name: b, path: "b.jsonl@[0:2]", input_key: q, stop_token_ids: [3], metadata_overrides: {k: 1}}
eval:
  datasets: {a: held_out.jsonl}
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str, name: str = "tasks.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def config(**flags: Any) -> Config:
    return derive(Config(rollout_batch_size=1, rollout_max_response_len=16, hf_checkpoint="m", **flags))


def test_one_file_defines_training_and_evaluation_datasets(write: Any) -> None:
    file = write(BOTH)
    flags = config(prompt_config=file, eval_config=file, tool_key="t", rollout_max_prompt_len=3)
    a, b = train_datasets(flags)
    assert (a.name, a.path, a.weight, a.label_key, a.input_key, a.tool_key) == (
        "a",
        "a.jsonl",
        2,
        "answer",
        None,
        "t",
    )
    assert (b.path, b.weight, b.input_key, b.max_prompt_len) == ("b.jsonl@[0:2]", 1.0, "q", 7)
    assert (a.rm_type, a.custom_rm_path, b.rm_type, b.custom_rm_path) == ("math", None, None, "m.f")
    assert a.sampling_params == {"max_new_tokens": 9, "min_new_tokens": 2, "stop": ["x"]}
    assert (b.sampling_params, b.metadata_overrides) == ({"stop_token_ids": [3]}, {"k": 1})
    assert prompt_files(flags) == ["a.jsonl", "b.jsonl@[0:2]"]
    assert [(one.name, one.path) for one in eval_datasets(flags)] == [("a", "held_out.jsonl")]
    assert plugin_args(flags).train_datasets == [a, b]
    assert (train_datasets(config()), prompt_files(config(prompt_data="p"))) == ([], ["p"])


def test_accepts_toml_mapping_and_json_without_a_train_section(write: Any) -> None:
    toml = write(
        '[train.datasets]\nshort = "s.jsonl"\n[train.datasets.long]\npath = "l.jsonl"\nweight = 0.5\n', "t.toml"
    )
    assert [(one.name, one.weight) for one in train_datasets(config(prompt_config=toml))] == [
        ("short", 1.0),
        ("long", 0.5),
    ]
    bare = write(json.dumps({"datasets": [{"name": "a", "path": "a.jsonl"}]}), "t.json")
    assert [one.name for one in train_datasets(config(prompt_config=bare))] == ["a"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("train: {}", " has no datasets: list them under train: datasets, each with a name and a path"),
        ("eval: {datasets: {a: x}}", " has no section train, only eval: list its datasets under train: datasets"),
        ("train: {datasets: [{path: x}]}", ": dataset 1 has no name"),
        ("train: {datasets: {a: {path: x, weigth: 1}}}", ", dataset a: unknown key weigth: did you mean weight?"),
        ("train: {datasets: {a: {path: x, weight: 0}}}", ", dataset a: weight must be a number greater than 0, not 0"),
        ("train: {datasets: {a: {path: x, weight: -2}}}", ", dataset a: weight must be a number greater than 0, not -2"),
        ("train: {datasets: {a: {path: x, weight: .inf}}}", ", dataset a: weight must be a number greater than 0, not inf"),
        ("train: {datasets: {a: {path: x, weight: much}}}", ", dataset a: weight must be a number, not 'much'"),
        ("train: {datasets: {a: {path: x, temperature: 1}}}", ", dataset a: temperature is one value for all of training, because the trainer computes with it: give --rollout-temperature instead"),
        ("train: {datasets: {a: {path: x, n_samples_per_prompt: 1}}}", ", dataset a: n_samples_per_prompt is one value for all datasets: give --n-samples-per-prompt instead"),
        ("train: {datasets: [{name: a, path: x}, {name: a, path: y}]}", " has two datasets named a: give each its own name"),
    ],
)  # fmt: skip
def test_invalid_dataset_files_are_rejected_in_one_sentence(write: Any, text: str, sentence: str) -> None:
    file = write(text)
    with pytest.raises(UserError) as caught:
        train_datasets(config(prompt_config=file))
    assert str(caught.value) == f"--prompt-config {file}{sentence}"


@pytest.mark.parametrize(
    ("entries", "flags", "sentence"),
    [
        ("{path: PROMPTS}", {}, None),
        ("{path: /no.jsonl}", {}, "dataset a: there is no file /no.jsonl"),
        ("{path: PROMPTS, custom_rm_path: no.py:f}", {}, "no.py"),
        ("{path: PROMPTS}", {"prompt_data": "PROMPTS"}, "--prompt-data and --prompt-config both name prompts"),
        ("{path: PROMPTS}", {"disable_rollout_global_dataset": True}, "--disable-rollout-global-dataset reads no prompts"),
        ("{path: PROMPTS, max_response_len: 17}", {}, "max_response_len 17 is more than --rollout-max-response-len 16"),
        ("{path: PROMPTS, max_response_len: 9}", {"overlong_buffer_len": 4}, "cannot be used with --overlong-buffer-len"),
    ],
)  # fmt: skip
def test_resolve_checks_datasets_and_conflicting_flags(
    valid: dict[str, Any], write: Any, prompts: Path, entries: str, flags: dict[str, Any], sentence: str | None
) -> None:
    file = write(f"train: {{datasets: {{a: {entries.replace('PROMPTS', str(prompts))}}}}}")
    given = {name: str(prompts) if value == "PROMPTS" else value for name, value in flags.items()}
    wanted = Config(**{**valid, "prompt_data": None, **given}, prompt_config=file)
    if sentence is None:
        assert resolve(wanted).prompt_config == file
        return
    with pytest.raises(UserError) as caught:
        resolve(wanted)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_invalid_file_makes_the_plan_command_exit_with_2(
    valid_argv: list[str], write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write("train: {datasets: {a: {path: x, weight: 0}}}")
    place = valid_argv.index("--prompt-data")
    words = [*valid_argv[:place], *valid_argv[place + 2 :], "--prompt-config", file]
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["plan", *words]))
    assert ended.value.code == 2
    assert "dataset a: weight must be a number greater than 0, not 0" in capsys.readouterr().err
