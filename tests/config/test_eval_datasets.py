"""Evaluation datasets from flags and from a file: precedence of values, and one-sentence errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config, derive, resolve
from slime.config.datasets import eval_datasets
from slime.errors import UserError

YAML = """
eval:
  defaults: {n_samples_per_eval_prompt: 4, temperature: 0.6, rm_type: f1, custom_rm_path: m.f, top_p: null}
  datasets:
    - {name: a, path: a.jsonl, temperature: 0, rm_type: math, stop: [x], metadata_overrides: {k: 1}}
    - name: b
      path: b.jsonl@[0:2]
      max_response_len: 9
      apply_chat_template: true
      repetition_penalty: 1.1
"""
TOML = """
[eval.defaults]
n_samples_per_eval_prompt = 2
[eval.datasets]
short = "s.jsonl"
[eval.datasets.long]
path = "l.jsonl"
input_key = "q"
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str, name: str = "eval.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def config(**flags: Any) -> Config:
    return derive(Config(rollout_batch_size=1, rollout_max_response_len=5, hf_checkpoint="m", **flags))


def test_dataset_values_override_defaults_flags_and_rollout_values(write: Any) -> None:
    file = write(YAML)
    flagged, a, b = eval_datasets(
        config(
            eval_config=file,
            eval_prompt_data=[("c", "c.jsonl")],
            eval_temperature=0.3,
            eval_top_p=0.8,
            rollout_top_k=7,
            rollout_stop=["end"],
            label_key="label",
        )
    )
    assert (a.name, a.path, a.temperature, a.n_samples_per_eval_prompt) == ("a", "a.jsonl", 0, 4)
    assert (a.rm_type, a.custom_rm_path) == ("math", None)  # rm_type of the dataset overrides the defaults
    assert (b.rm_type, b.custom_rm_path) == ("f1", "m.f")
    assert (a.stop, b.stop, a.metadata_overrides, b.metadata_overrides) == (["x"], ["end"], {"k": 1}, {})
    assert (b.temperature, b.top_p, b.top_k, b.max_response_len, a.max_response_len) == (0.6, 0.8, 7, 9, 5)
    assert (b.apply_chat_template, a.apply_chat_template, a.label_key) == (True, False, "label")
    assert (flagged.name, flagged.temperature, flagged.n_samples_per_eval_prompt, flagged.rm_type) == (
        "c",
        0.3,
        1,
        None,
    )
    params = b.sampling_params({"temperature": 1.0, "max_new_tokens": 5, "spaces_between_special_tokens": False})
    assert params == {
        "temperature": 0.6,
        "top_p": 0.8,
        "top_k": 7,
        "max_new_tokens": 9,
        "repetition_penalty": 1.1,
        "stop": ["end"],
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def test_accepts_toml_mapping_and_json_without_an_eval_section(write: Any) -> None:
    short, long = eval_datasets(config(eval_config=write(TOML, "eval.toml")))
    assert (short.name, short.path, short.n_samples_per_eval_prompt, short.input_key) == (
        "short",
        "s.jsonl",
        2,
        None,
    )
    assert (long.name, long.path, long.input_key) == ("long", "l.jsonl", "q")
    text = json.dumps({"datasets": [{"name": "a", "path": "a.jsonl"}]})
    assert [dataset.name for dataset in eval_datasets(config(eval_config=write(text, "eval.json")))] == ["a"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("eval: {}", "has no datasets: list them under eval: datasets, each with a name and a path"),
        ("eval: 3", ": eval must be a mapping, not 3"),
        ("eval: {dataset: []}", ": unknown key dataset: did you mean datasets?"),
        ("eval: {datasets: 3}", ": datasets must be a list or a mapping, not 3"),
        ("eval: {datasets: [{path: x}]}", ": dataset 1 has no name"),
        ("eval: {datasets: [{name: a}]}", ", dataset a: path is missing: name a .jsonl or .parquet file"),
        ("eval: {datasets: {a: {path: x, temprature: 1}}}", ", dataset a: unknown key temprature: did you mean temperature?"),
        ("eval: {datasets: {a: {path: x, temperature: hot}}}", ", dataset a: temperature must be a number, not 'hot'"),
        ("eval: {datasets: {a: {path: x, top_p: 2}}}", ", dataset a: top_p must be in (0, 1], not 2"),
        ("eval: {datasets: {a: {path: x, stop: y}}}", ", dataset a: stop must be a list of texts, not 'y'"),
        ("eval: {datasets: {a: {path: x, top_k: true}}}", ", dataset a: top_k must be an integer, not True"),
        ("eval: {datasets: {a: {path: x, rm_type: maths}}}", ", dataset a: rm_type must be one of math, "),
        ("eval: {defaults: {path: x}, datasets: {a: y}}", ": defaults: path belongs in the entry of a single dataset"),
        ("eval: {datasets: [{name: a, path: x}, {name: a, path: y}]}", " has two datasets named a: give each its own name"),
    ],
)  # fmt: skip
def test_invalid_eval_files_are_rejected_with_place_and_reason(write: Any, text: str, sentence: str) -> None:
    file = write(text)
    with pytest.raises(UserError) as caught:
        eval_datasets(config(eval_config=file))
    assert str(caught.value).startswith(
        f"--eval-config {file}{sentence}" if sentence[0] in ",: " else f"--eval-config {file} {sentence}"
    )


def test_resolve_checks_eval_config_and_the_files_in_it(valid: dict[str, Any], write: Any, prompts: Path) -> None:
    def sentence(text: str) -> str:
        with pytest.raises(UserError) as caught:
            resolve(Config(**valid, eval_interval=2, eval_config=write(text)))
        return str(caught.value)

    good = f"{{eval: {{datasets: {{a: {{path: {prompts}, n_samples_per_eval_prompt: 3}}}}}}}}"
    assert resolve(Config(**valid, eval_interval=2, eval_config=write(good))).eval_config is not None
    assert "dataset a: there is no file /no.jsonl" in sentence("{eval: {datasets: {a: /no.jsonl}}}")
    assert "no.py" in sentence(f"{{eval: {{datasets: {{a: {{path: {prompts}, custom_rm_path: no.py:f}}}}}}}}")
    with pytest.raises(UserError, match=r"--eval-config: there is no file /gone.yaml"):
        resolve(Config(**valid, eval_config="/gone.yaml"))
