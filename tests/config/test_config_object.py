from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

import slime
from slime.config import Config, load_config, parse_args, resolve, save_config
from slime.config.config import FLAG_SPECS
from slime.config.help import format_markdown
from slime.config.parser import config_from_keywords, parse_flags
from slime.driver.keywords import format_stub
from slime.errors import UserError

RICH: dict[str, Any] = {
    "eval_prompt_data": [("a", "x.jsonl"), ("b", "y.jsonl@[0:3]")],
    "apply_chat_template_kwargs": {"enable_thinking": False, "nested": {"a": [1, 2.5, None]}},
    "rollout_stop": ["\n\n", "ünï: #"],
    "rollout_stop_token_ids": [1, 2],
    "lr": 1e-6,
    "clip_grad": 1e30,
    "carried": {"sglang_mem_fraction_static": 0.8, "swiglu": True, "spec": ["a", "b"], "note": "yes", "tag": "1e3"},
}


def test_dict_round_trip_is_exact_through_json() -> None:
    config = Config(rollout_batch_size=4, **RICH)
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    secrets = {spec.name for spec in FLAG_SPECS.values() if spec.info.secret}
    assert set(config.to_dict()) == {field.name for field in dataclasses.fields(Config)} - secrets - {"overlay"}


def test_from_dict_rejects_unknown_keys_and_wrong_types() -> None:
    with pytest.raises(UserError, match="unknown config key sed: did you mean seed"):
        Config.from_dict({"sed": 1})
    with pytest.raises(UserError, match="seed must be a whole number, not 'x'"):
        Config.from_dict({"seed": "x"})
    with pytest.raises(UserError) as caught:
        Config.from_dict({"sed": 1, "lr": 1.0, "learning_rate": 2.0})
    assert str(caught.value).splitlines() == [
        "2 keys are not known here:",
        "  unknown config key sed: did you mean seed?",
        "  learning_rate is a name of TRL: here it is lr",
    ]


def test_saved_config_loads_as_the_identical_config(valid: dict[str, Any], prompts: Path, tmp_path: Path) -> None:
    given = {**valid, **RICH, "eval_prompt_data": [("a", str(prompts))], "eval_interval": 3}
    config = resolve(Config(**given))
    file = tmp_path / "config.yaml"
    save_config(config, file)
    assert load_config(file) == config
    assert parse_args(["--config", str(file)]) == config
    assert parse_args(["--config", str(file), "--seed", "9"]) == config.replace(seed=9)


def test_saved_config_includes_values_of_the_custom_config_file(valid_argv: list[str], tmp_path: Path) -> None:
    own, saved = tmp_path / "mis.yaml", tmp_path / "config.yaml"
    own.write_text("use_tis: true\ntis_clip: 5.0\nn_samples_per_prompt: 4\nmine: 1\n")
    config = parse_args([*valid_argv, "--tis-clip", "3", "--custom-config-path", str(own)])
    assert (config.use_tis, config.tis_clip, config.rs_upper_bound, config.carried["mine"]) == (True, 5.0, 5.0, 1)
    assert config.global_batch_size == 32 * 4  # derived from n_samples_per_prompt of the file
    save_config(config, saved)
    assert parse_args(["--config", str(saved), "--custom-config-path", str(own)]) == config
    own.unlink()
    assert parse_args(["--config", str(saved)]) == config


def test_carried_flags_are_attributes_and_missing_ones_raise() -> None:
    config = Config(carried={"sglang_context_length": 10})
    assert config.sglang_context_length == 10
    with pytest.raises(AttributeError, match="--sglang-router-ip"):
        config.sglang_router_ip  # noqa: B018
    assert not hasattr(config, "nothing")


def test_config_is_frozen_copyable_and_hashable() -> None:
    config = Config(**RICH)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.lr = 1.0
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config
        assert hash(twin) == hash(config)
    assert config.replace(lr=2.0) != config
    assert Config().rollout_sample_hook_path is not Config().rollout_sample_hook_path


def test_every_flag_has_help_and_a_default_among_its_choices() -> None:
    for spec in FLAG_SPECS.values():
        assert spec.info.help
        if spec.default is None:
            assert spec.optional or spec.info.derived or spec.info.required, spec.name
        if spec.info.choices and spec.default is not None:
            assert spec.default in spec.info.choices


def test_flags_page_matches_the_flag_table() -> None:
    document = Path(__file__).parents[2] / "docs" / "flags.md"
    assert document.read_text() == format_markdown(), "run: slime flags --markdown > docs/flags.md"


def test_signature_and_stub_of_run_have_every_flag() -> None:
    stub = Path(slime.__file__).with_suffix(".pyi").read_text()
    assert stub == format_stub(), "run: slime flags --stub > slime/__init__.pyi"
    compile(stub, "__init__.pyi", "exec")
    parameters = inspect.signature(slime.run).parameters
    assert list(parameters) == ["reward", "config", "custom_config_path", *FLAG_SPECS, "others"]
    assert parameters["rollout_batch_size"].default == FLAG_SPECS["rollout_batch_size"].default
    assert "run" in dir(slime)
    with pytest.raises(AttributeError, match="no attribute 'runs'"):
        _ = slime.runs  # type: ignore[attr-defined]


def test_keywords_parse_like_command_line_flags(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("lr = 0.5\nrollout_batch_size = 7\nsglang_mem_fraction_static = 0.5\n")
    file = str(tmp_path / "run.toml")
    words = f"--config {file} --lr 0.25 --sglang-attention-backend triton --router-policy random --num-layers 2".split()
    own = {"sglang_attention_backend": "triton", "router_policy": "random", "num_layers": 2, "lr": 0.25}
    config = config_from_keywords({"config": file, **own})
    assert config == parse_flags(words)
    assert (config.rollout_batch_size, config.carried["sglang_mem_fraction_static"]) == (7, 0.5)
    assert config_from_keywords({"config": [tmp_path / "run.toml"], **own}) == config
    assert config_from_keywords({"carried": {"sglang_x": 1}, "router_y": 2}).carried == {"sglang_x": 1, "router_y": 2}
    with pytest.raises(UserError, match="unknown config key rollout_bach_size: did you mean rollout_batch_size"):
        config_from_keywords({"rollout_bach_size": 1})
    with pytest.raises(UserError, match="sglang_x has a value of type object"):
        config_from_keywords({"sglang_x": object()})


def test_keywords_accept_a_custom_config_file_like_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("search_url: http://here\nn_samples_per_prompt: 3\n")
    words = ["--rollout-batch-size", "5", "--n-samples-per-prompt", "2", "--custom-config-path", str(file)]
    keywords = {"rollout_batch_size": 5, "n_samples_per_prompt": 2, "custom_config_path": file}
    config = config_from_keywords(keywords)
    assert config == parse_flags(words)
    assert (config.search_url, config.n_samples_per_prompt, config.rollout_batch_size) == ("http://here", 3, 5)
