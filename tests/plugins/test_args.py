"""`args` of plugins: writable, shared, copyable, with upstream's names. The run's config stays unchanged."""

from __future__ import annotations

import argparse
import copy
import logging
import pickle
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config, derive
from slime.config.plugins.view import plugin_args, set_plugin_args, upstream_view, with_own_overlay
from slime.data.sample import Sample
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm

FLAGS = tomllib.loads((Path(__file__).parents[1] / "migration" / "flags.toml").read_text(encoding="utf-8"))["flag"]


def config_of(**flags: Any) -> Config:
    return derive(Config(rollout_batch_size=4, hf_checkpoint="nowhere", device="cpu", **flags))


def test_plugin_writes_are_visible_to_plugins_but_not_to_the_config() -> None:
    config = config_of(rollout_stop=["END"])
    args = plugin_args(config)
    args.my_state = {"seen": 1}
    args.rollout_stop.append("STOP")
    later = plugin_args(config.replace(num_rollout=7))
    assert later is args
    assert (later.my_state, later.num_rollout) == ({"seen": 1}, 7)
    assert (config.rollout_stop, args.rollout_stop) == (["END"], ["END", "STOP"])
    assert not hasattr(config, "my_state")
    assert not hasattr(plugin_args(with_own_overlay(config)), "my_state")


def test_writing_a_flag_warns_once_and_leaves_the_config_unchanged(caplog: pytest.LogCaptureFixture) -> None:
    config = config_of()
    args = plugin_args(config)
    with caplog.at_level(logging.WARNING):
        args.rollout_batch_size = 4  # unchanged value
        args.num_rollout = 100
        args.num_rollout = 200
    assert [record.getMessage() for record in caplog.records] == [
        "a plugin set args.num_rollout = 100: plugins see it, but the run keeps None; to change the run, "
        "give --num-rollout before it starts"
    ]
    assert (args.num_rollout, config.num_rollout) == (200, None)
    assert plugin_args(config.replace(num_rollout=3)).num_rollout == 200


def test_unknown_or_deleted_attribute_is_missing() -> None:
    args = plugin_args(config_of())
    assert not hasattr(args, "own_thing")
    assert getattr(args, "own_thing", 5) == 5
    with pytest.raises(AttributeError, match="args has no own_thing: it is neither a flag"):
        _ = args.own_thing
    del args.hf_checkpoint
    assert "hf_checkpoint" not in args


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "namespace": lambda args: argparse.Namespace(**vars(args)),
    "dict": lambda args: argparse.Namespace(**args.__dict__),
    "pickle": lambda args: pickle.loads(pickle.dumps(args)),
}


@pytest.mark.parametrize("how", COPIES)
def test_copy_of_args_is_an_independent_namespace(how: str, caplog: pytest.LogCaptureFixture) -> None:
    args = plugin_args(config_of(n_samples_per_prompt=2))
    args.mine = "x"
    twin = COPIES[how](args)
    twin.mine, twin.n_samples_per_prompt = "y", 9
    assert type(twin) is argparse.Namespace
    assert (args.mine, args.n_samples_per_prompt) == ("x", 2)
    assert not caplog.records
    assert vars(twin) == {**vars(args), "mine": "y", "n_samples_per_prompt": 9}


@pytest.mark.parametrize("how", COPIES)
def test_copy_of_args_finds_its_runtime_and_reaches_plugins(how: str, engine: Any, make_runtime: Any) -> None:
    seen = []

    async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        seen.append((args, args.note))
        sample.append_response_tokens(tokens=[5], log_probs=[-1.0], text="5")
        sample.status = Sample.Status.COMPLETED
        return sample

    async def reward(args: Any, sample: Sample) -> float:
        return float(len(args.note))

    runtime = make_runtime([engine.url], rm_type="random")
    other = make_runtime([engine.url], rm_type="random")
    runtime._functions[("--custom-generate-function-path", "mine.generate")] = generate
    twin = COPIES[how](runtime.plugin_args)
    assert GenerateState(twin) is runtime.state is not other.state
    twin.note = "four"
    twin.custom_generate_function_path = "mine.generate"  # for this call only
    sample = Sample(index=0, prompt="a", tokens=[4])
    made = runtime.run(generate_and_rm(twin, sample, {"max_new_tokens": 4}))
    assert made.tokens == [4, 5]
    assert [(args is twin, note) for args, note in seen] == [(True, "four")]
    assert runtime.args.custom_generate_function_path is None
    assert not hasattr(runtime.plugin_args, "note")


def test_plain_namespace_selects_the_running_runtime(engine: Any, make_runtime: Any) -> None:
    runtime = make_runtime([engine.url], rm_type="random")
    assert GenerateState(argparse.Namespace()) is runtime.state
    assert GenerateState(argparse.Namespace()).args is runtime.plugin_args
    assert runtime.plugin_args.sglang_router_port == int(engine.url.rpartition(":")[2])


def test_two_runtimes_of_one_config_have_separate_overlays(engine: Any, make_runtime: Any) -> None:
    from slime.rollout.runtime import RolloutRuntime

    first = make_runtime([engine.url])
    with RolloutRuntime(first.config, [engine.url], dispatch=None) as second:  # type: ignore[arg-type]
        second.plugin_args.mine = 1
        assert not hasattr(first.plugin_args, "mine")
        assert GenerateState(copy.copy(second.plugin_args)) is second.state


def test_state_written_by_generate_is_read_by_reward_and_filter(
    engine: Any, make_runtime: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The generate function keeps its state in `args`, as upstream's do; reward and filter read it."""
    (tmp_path / "stateful_plugin.py").write_text(
        "from copy import deepcopy\n"
        "from slime.rollout.sglang_rollout import GenerateState\n"
        "async def generate(args, sample, sampling_params):\n"
        "    args.turns = getattr(args, 'turns', 0) + 1\n"
        "    args.sampling_params, args.tokenizer = sampling_params, GenerateState(args).tokenizer\n"
        "    own = deepcopy(args)\n"
        "    own.results = [own.tokenizer.decode([4])]\n"
        "    sample.append_response_tokens(own, tokens=[4], log_probs=[-1.0], text=own.results[0])\n"
        "    sample.status = sample.Status.COMPLETED\n"
        "    return sample\n"
        "async def reward(args, sample):\n"
        "    return float(args.turns)\n"
        "def keep(args, samples):\n"
        "    args.filtered = True\n"
        "    return args.turns == 1\n"
    )
    from slime.rollout.filters import GroupFilter
    from slime.rollout.sglang_rollout import generate_and_rm_group

    file = tmp_path / "stateful_plugin.py"
    runtime = make_runtime(
        [engine.url],
        custom_generate_function_path=f"{file}:generate",
        custom_rm_path=f"{file}:reward",
        dynamic_sampling_filter_path=f"{file}:keep",
    )
    group = [Sample(index=0, group_index=0, prompt="a", tokens=[4])]
    made = runtime.run(generate_and_rm_group(runtime.args, group, {"max_new_tokens": 4}))
    assert [sample.reward for sample in made] == [1.0]
    judge = GroupFilter(runtime, "rollout 0")
    assert judge.keeps(made, runtime.run(judge.verdict(made)), insufficient=False)
    assert runtime.plugin_args.filtered is True
    assert not caplog.records


def test_args_have_every_upstream_flag_with_its_default() -> None:
    view = vars(plugin_args(config_of(rollout_max_response_len=8)))
    opposite = {"no_offload_train": "offload_train", "no_offload_rollout": "offload_rollout"}
    opposite["disable_wandb_random_suffix"] = "wandb_random_suffix"
    trainers = {name for name in view if name.endswith("_parallel_size")} | {"attention_dropout", "hidden_dropout"}
    for row in FLAGS:
        name = row["name"].replace("-", "_")
        assert opposite.get(name, name) in view, f"args.{name}"
        if (
            row["verdict"] != "same" and "default" in row and name not in {*opposite, *trainers}
        ):  # these depend on the run
            is_same = (view[name] or None) == (row["default"] or None)
            assert is_same or "default_here" in row, f"args.{name} is {view[name]}"


def test_args_have_the_values_that_upstream_derives(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers": 3, "hidden_size": 16, "vocab_size": 99, "num_experts_per_tok": 2, '
        '"rope_parameters": {"rope_theta": 5e5}}'
    )
    config = derive(
        Config(
            rollout_batch_size=4,
            n_samples_per_prompt=2,
            num_rollout=10,
            hf_checkpoint=str(tmp_path),
            device="cpu",
            advantage_estimator="ppo",
            rollout_max_context_len=64,
            disable_grpo_std_normalization=True,
            eval_prompt_data=[("aime", "aime.jsonl")],
            actor_num_gpus_per_node=2,
            carried={"tensor_model_parallel_size": 2, "hidden_dropout": 0.0, "my_flag": 3},
        )
    )
    view = upstream_view(config)
    expected = {
        "rollout_global_dataset": True,
        "rewards_normalization": True,
        "grpo_std_normalization": False,
        "compute_advantages_and_returns": True,
        "eval_max_context_len": 64,
        "use_critic": True,
        "offload_train": False,
        "offload_rollout": False,
        "world_size": 2,
        "actor_num_gpus": 2,
        "data_parallel_size": 2,
        "rollout_num_engines": 2,
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "num_layers": 3,
        "hidden_size": 16,
        "vocab_size": 99,
        "padded_vocab_size": 99,
        "moe_router_topk": 2,
        "seq_length": 4096,
        "eval_prompt_data": ["aime", "aime.jsonl"],
        "train_iters": 10,
        "wandb_random_suffix": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "rotary_base": 5e5,
        "my_flag": 3,
        "rank": 0,
        "ci_test": False,
        "debug_rollout_only": False,
    }
    assert {name: view[name] for name in expected} == expected
    (dataset,) = view["eval_datasets"]
    assert (dataset.name, dataset.path, dataset.n_samples_per_eval_prompt) == ("aime", "aime.jsonl", 1)
    assert dataset.inject_metadata({"a": 1}) == {"a": 1}
    set_plugin_args(config, rank=1)
    assert plugin_args(config.replace(lr=0.5)).rank == 1  # also with another copy of the config


def test_data_source_may_write_args_and_built_in_source_ignores_writes(tmp_path: Path) -> None:
    from slime.data.custom_source import make_data_source

    (tmp_path / "source.py").write_text(
        "class Source:\n"
        "    def __init__(self, args):\n"
        "        args.num_rollout = 3\n"
        "        args.source_is = self\n"
        "    def get_samples(self, n):\n"
        "        return []\n"
    )
    config = config_of(data_source_path=f"{tmp_path / 'source.py'}:Source")
    source = make_data_source(config, plugin_args(config))
    assert plugin_args(config).source_is is source.source
    own = config_of(disable_rollout_global_dataset=True, n_samples_per_prompt=2)
    source = make_data_source(own, plugin_args(own))
    plugin_args(own).n_samples_per_prompt = 5
    assert [len(group) for group in source.get_samples(2)] == [2, 2]
    assert source.plugin_args is plugin_args(own)
