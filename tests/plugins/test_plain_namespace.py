"""Functions that plugins and custom drivers call with a plain namespace, which has only the needed flags."""

from __future__ import annotations

import argparse
import asyncio
import copy
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config
from slime.config.plugins.view import as_config, plugin_args
from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.sglang_rollout import GenerateState, generate, get_model_url
from slime.utils.arguments import parse_args, slime_validate_args
from slime.utils.http_utils import get_rollout_num_engines, init_http_client
from slime.utils.processing_utils import load_tokenizer
from tests.model_files import add_weights


def test_rewards_need_only_rm_type_or_a_function(tmp_path: Path) -> None:
    dog = Sample(response="a red dog", label="red dog")
    assert asyncio.run(async_rm(Namespace(rm_type="f1", custom_rm_path=None), dog)) == 1.0
    assert asyncio.run(batched_async_rm(Namespace(rm_type="f1"), [dog, Sample(response="x", label="y")])) == [1.0, 0.0]
    (tmp_path / "mine.py").write_text("async def rm(args, sample):\n    return args.factor * len(sample.response)\n")
    args = Namespace(custom_rm_path=f"{tmp_path / 'mine.py'}:rm", factor=2)
    assert asyncio.run(async_rm(args, dog)) == 18.0


def test_data_source_needs_only_the_prompt_flags(tmp_path: Path, model_folder: str) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"input": "a", "label": "b"}\n')
    args = Namespace(prompt_data=str(tmp_path / "prompts.jsonl"), hf_checkpoint=model_folder, n_samples_per_prompt=2)
    ((first, second),) = RolloutDataSourceWithBuffer(args).get_samples(1)
    assert (first.prompt, first.index, second.index) == ("a", 0, 1)


def test_generate_state_and_generate_work_without_a_run(engine: Any, model_folder: str) -> None:
    host, port = engine.url.removeprefix("http://").split(":")
    args = Namespace(
        hf_checkpoint=model_folder,
        rollout_temperature=0.5,
        rollout_max_response_len=4,
        sglang_router_ip=host,
        sglang_router_port=int(port),
        my_own=object(),
    )
    state = GenerateState(args)
    try:
        assert GenerateState(args) is GenerateState(Namespace(**vars(args))) is state
        assert (
            state.tokenizer.decode(load_tokenizer(args.hf_checkpoint, trust_remote_code=True)("ab").input_ids) == "ab"
        )
        assert (state.sampling_params["temperature"], state.sampling_params["max_new_tokens"]) == (0.5, 4)
        sample = asyncio.run(generate(args, Sample(prompt="a"), dict(state.sampling_params)))
        assert (sample.response, sample.status, len(sample.rollout_log_probs or [])) == (
            "7",
            Sample.Status.COMPLETED,
            2,
        )
        assert get_model_url(args, "any", "/v1/models") == f"{engine.url}/v1/models"
    finally:
        from slime.rollout.runtime import runtime_for

        runtime_for(args).close()


def test_counts_engines_and_reports_a_missing_hf_checkpoint() -> None:
    args = Namespace(rollout_num_gpus=8, rollout_num_gpus_per_engine=2)
    init_http_client(args)
    assert get_rollout_num_engines(args) == 4
    assert get_rollout_num_engines(Namespace(rollout_external_engine_addrs=["a:1", "b:2", "c:3"])) == 3
    run = plugin_args(Config(rollout_num_gpus=6, rollout_num_gpus_per_engine=3))
    assert get_rollout_num_engines(run) == get_rollout_num_engines(copy.copy(run)) == run.rollout_num_engines == 2
    state = GenerateState(args)
    try:
        with pytest.raises(UserError, match=r"args\.hf_checkpoint must name its folder"):
            _ = state.tokenizer
    finally:
        from slime.rollout.runtime import runtime_for

        runtime_for(args).close()


def test_custom_driver_parses_changes_and_validates_flags(
    monkeypatch: pytest.MonkeyPatch, model_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--search-url", type=str, default="http://nowhere")
        group = parser.add_argument_group("tools")
        group.add_argument("--max-turns", type=int, default=3)
        group.add_argument("--tool-names", nargs="+", default=[])
        return parser

    (tmp_path / "p.jsonl").write_text('{"input": "a", "label": "b"}\n')
    model = add_weights(Path(shutil.copytree(model_folder, tmp_path / "model")))
    flags = {"hf_checkpoint": model, "prompt_data": tmp_path / "p.jsonl", "rollout_batch_size": 2, "num_rollout": 1}
    flags |= {"rollout_max_response_len": 8, "rm_type": "f1", "label_key": "label", "device": "cpu"}
    words = [word for name, value in flags.items() for word in ("--" + name.replace("_", "-"), str(value))]
    monkeypatch.setattr(sys, "argv", ["mine.py", *words, "--tool-names", "search", "python"])
    args = parse_args(add_arguments)
    assert (args.search_url, args.max_turns, args.tool_names) == ("http://nowhere", 3, ["search", "python"])
    assert (args.rollout_batch_size, args.rewards_normalization, args.rollout_top_p) == (2, True, 1.0)
    slime_validate_args(args)
    args.num_rollout, args.mine = 5, {"a": 1}
    config = as_config(args)
    assert (config.num_rollout, config.rollout_batch_size, config.max_turns) == (5, 2, 3)
    assert (config.carried["search_url"], config.carried["mine"]) == ("http://nowhere", {"a": 1})
    args.rollout_batch_size = "many"
    with pytest.raises(UserError, match=r"args\.rollout_batch_size"):
        slime_validate_args(args)
    monkeypatch.setattr(sys, "argv", ["mine.py", "--rollout-bach-size", "2"])
    with pytest.raises(SystemExit, match="2"):
        parse_args()
    assert capsys.readouterr().err == "error: unknown flag --rollout-bach-size: did you mean --rollout-batch-size?\n"
