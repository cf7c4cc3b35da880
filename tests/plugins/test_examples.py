"""Every file of examples/plugins, found by its flag and called as a run calls it."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest
import torch

from slime.config import Config
from slime.config.config import FLAG_SPECS
from slime.config.plugins import CONTRACTS, contract_of, load_plugin
from slime.config.plugins.view import check_plugins
from slime.data.custom_source import make_data_source
from slime.data.sample import Sample
from slime.rollout.base_types import call_rollout_fn, leaves
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.async_utils import run

EXAMPLES = Path(__file__).parents[2] / "examples" / "plugins"
FLAG_OF = {
    "advantage": "--custom-advantage-function-path",
    "all_samples_process": "--rollout-all-samples-process-path",
    "before_log_prob": "--custom-megatron-before-log-prob-hook-path",
    "before_train_step": "--custom-megatron-before-train-step-hook-path",
    "buffer_filter": "--buffer-filter-path",
    "class_reward": "--custom-rm-path",
    "convert_samples": "--custom-convert-samples-to-train-data-path",
    "data_postprocess": "--rollout-data-postprocess-path",
    "data_source": "--data-source-path",
    "dynamic_filter": "--dynamic-sampling-filter-path",
    "eval_function": "--eval-function-path",
    "eval_log": "--custom-eval-rollout-log-function-path",
    "fan_out_generate": "--custom-generate-function-path",
    "generate": "--custom-generate-function-path",
    "group_reward": "--custom-rm-path",
    "live_filter": "--live-filter-path",
    "live_judge": "--live-judge-path",
    "loss": "--custom-loss-function-path",
    "megatron_init": "--custom-megatron-init-path",
    "model_provider": "--custom-model-provider-path",
    "multi_turn_generate": "--custom-generate-function-path",
    "pg_loss_reducer": "--custom-pg-loss-reducer-function-path",
    "post_write": "--custom-update-weight-post-write-path",
    "reward": "--custom-rm-path",
    "reward_post_process": "--custom-reward-post-process-path",
    "rollout_function": "--rollout-function-path",
    "rollout_log": "--custom-rollout-log-function-path",
    "sample_filter": "--rollout-sample-filter-path",
    "sample_hook": "--rollout-sample-hook-path",
    "tis": "--custom-tis-function-path",
}


def path_of(name: str) -> str:
    return str(EXAMPLES / f"{name}.py")


def load_example(name: str):
    return load_plugin(path_of(name), FLAG_OF[name])


def test_every_flag_has_an_example_and_every_example_a_flag():
    assert set(FLAG_OF) == {file.stem for file in EXAMPLES.glob("*.py")}
    assert set(FLAG_OF.values()) == {contract.flag for contract in CONTRACTS}


@pytest.mark.parametrize("name", sorted(FLAG_OF))
def test_examples_are_short_valid_and_state_their_flag(name):
    flag = FLAG_OF[name]
    field = contract_of(flag).field_name
    value = [path_of(name)] if FLAG_SPECS[field].info.repeat else path_of(name)
    check_plugins(Config(rollout_batch_size=1, **{field: value}))
    text = Path(path_of(name)).read_text()
    assert f"{flag} examples/plugins/{name}.py" in text
    assert len(text.splitlines()) <= 45


@pytest.fixture
def answers(engine, make_runtime):
    """Return a function that makes a runtime; flags that end in `_path` take names of examples."""

    def make(**flags):
        engine.respond = lambda body: "7</s>"
        paths = {
            key: path_of(value) for key, value in flags.items() if key.endswith("_path") and isinstance(value, str)
        }
        return make_runtime([engine.url], **{"rm_type": "random", **flags, **paths})

    return make


def test_generate_example_records_tokens_and_log_probs(answers, prompts, engine, tokenizer):
    runtime = answers(custom_generate_function_path="generate")
    samples = list(leaves(generate_rollout(runtime.args, 0, prompts(["1+1=", "2+2="], n=2)).samples))
    assert [tokenizer.decode(sample.tokens) for sample in samples] == ["1+1=7</s>"] * 2 + ["2+2=7</s>"] * 2
    for sample in samples:
        assert sample.loss_mask == [1, 1]
        assert sample.rollout_log_probs == [-token / 100 for token in sample.tokens[-2:]]
        assert (sample.status, sample.weight_versions) == (Sample.Status.COMPLETED, ["1"])


def test_multi_turn_example_masks_the_inserted_text(answers, prompts, engine, tokenizer):
    runtime = answers(custom_generate_function_path="multi_turn_generate", max_turns=2)
    [sample] = leaves(generate_rollout(runtime.args, 0, prompts(["1+1="], n=1)).samples)
    note = " Are you sure? "
    assert tokenizer.decode(sample.tokens) == f"1+1=7</s>{note}7</s>"
    assert sample.loss_mask == [1, 1] + [0] * len(note) + [1, 1]
    first, second = (request["sampling_params"]["sampling_seed"] for request in engine.requests)
    assert second != first  # otherwise both turns would sample with the same random numbers


def test_fan_out_samples_share_the_rollout_id(answers, prompts, tokenizer):
    runtime = answers(custom_generate_function_path="fan_out_generate")
    [[one], [two]] = generate_rollout(runtime.args, 0, prompts(["a", "b"], n=1)).samples
    assert [tokenizer.decode(sample.tokens) for sample in one] == ["a7</s>", "In one word: a7</s>"]
    assert [[sample.rollout_id for sample in rollout] for rollout in (one, two)] == [[0, 0], [1, 1]]


def test_reward_examples_score_samples():
    samples = [
        Sample(prompt="q", response="the sum is 7", response_length=4, label="7"),
        Sample(response="x", label="7"),
    ]

    def config(name, **flags):
        return Config(rollout_batch_size=1, custom_rm_path=path_of(name), **flags)

    assert run(batched_async_rm(config("reward"), samples)) == [1.0, 0.0]
    assert run(batched_async_rm(config("group_reward", group_rm=True), samples)) == [1.0, 0.0]
    words = {"wanted_words": ["sum", "total"]}
    assert run(batched_async_rm(config("class_reward", carried=words), samples)) == [0.5, 0.0]
    assert run(async_rm(config("class_reward"), Sample(response="my answer"))) == 1.0


def test_reward_post_process_example_centers_rewards():
    samples = [Sample(reward=1.0), Sample(reward={"score": 4.0}), Sample(reward=None)]
    raw, rewards = load_example("reward_post_process")(Config(rollout_batch_size=1, reward_key="score"), samples)
    assert raw == [1.0, 4.0, 0.0]
    assert rewards == pytest.approx([-2 / 3, 7 / 3, -5 / 3])


def test_filter_hook_and_all_samples_examples_in_one_rollout(answers, prompts, engine, tmp_path):
    flags = {
        "custom_rm_path": "reward",
        "dynamic_sampling_filter_path": "dynamic_filter",
        "rollout_sample_filter_path": "sample_filter",
        "rollout_all_samples_process_path": "all_samples_process",
        "rollout_sample_hook_path": [path_of("sample_hook")],
    }
    runtime = answers(**flags, rm_type=None, output_dir=str(tmp_path), rollout_batch_size=1, over_sampling_batch_size=2)

    one_is_there, finished = threading.Event(), runtime.pulse.finished
    runtime.pulse.finished = lambda tokens: (finished(tokens), one_is_there.set())

    async def respond(body):
        if len(body["input_ids"]) == 1:
            return "<think>7</think>8</s>"
        await asyncio.to_thread(one_is_there.wait)  # this response fills the batch and would abort the other one
        return "7777777777777"

    engine.respond = respond
    output = generate_rollout(runtime.args, 4, prompts(["a", "bb"], n=1, labels=["7", "7"]))
    [sample] = leaves(output.samples)
    assert sample.prompt == "bb"  # the other label is only in the thinking part: reward 0, group dropped
    assert (sample.reward, sample.status, sample.remove_sample) == (1.0, Sample.Status.TRUNCATED, True)
    assert sample.metadata == {"whole_response": "7777777777777", "sampled_in": 4}
    assert output.metrics["rollout/dynamic_filter/drop_hopeless"] == 1.0
    seen = [json.loads(line) for line in (tmp_path / "all_samples.jsonl").read_text().splitlines()]
    assert [(line["index"], line["reward"]) for line in seen] == [(0, 0.0), (1, 1.0)]


def test_data_source_and_buffer_filter_examples():
    config = Config(
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        data_source_path=path_of("data_source"),
        buffer_filter_path=path_of("buffer_filter"),
        disable_rollout_global_dataset=True,
    )
    source = make_data_source(config)
    groups = source.get_samples(2) + source.get_samples(1)
    assert [[(sample.prompt, sample.label) for sample in group] for group in groups] == [
        [(f"what is {n}+{n}?", str(2 * n))] * 2 for n in (1, 2, 3)
    ]
    assert [sample.index for group in groups for sample in group] == [0, 1, 2, 3, 4, 5]
    buffered = RolloutDataSourceWithBuffer(config)
    buffered.add_samples(groups)
    assert buffered.get_samples(2) == [groups[2], groups[1]]
    assert buffered.buffer == [groups[0]]


def test_rollout_and_eval_function_examples(answers, prompts, engine):
    runtime = answers(custom_rm_path="reward", rollout_function_path="rollout_function", rollout_batch_size=1)
    source = prompts(["a", "b"], n=2, labels=["8", "7"])
    output = call_rollout_fn(load_example("rollout_function"), runtime.args, 0, source, evaluation=False)
    assert [sample.prompt for sample in leaves(output.samples)] == ["b", "b"]
    assert output.metrics["rollout/retried"] == 1.0
    evaluated = call_rollout_fn(load_example("eval_function"), runtime.args, 0, source, evaluation=True)
    assert evaluated.data["lengths"]["rewards"] == [2.0] * 3
    assert [request["sampling_params"]["temperature"] for request in engine.requests[-3:]] == [0.0] * 3


def test_log_examples_write_json_records(tmp_path):
    args = Config(rollout_batch_size=1, output_dir=str(tmp_path))
    samples = [Sample(response="a"), Sample(response=" \n")]
    assert load_example("rollout_log")(3, args, samples, {"rollout/raw_reward": 1.0}, 2.5) is False
    assert json.loads((tmp_path / "rollouts.jsonl").read_text()) == {
        "rollout_id": 3,
        "empty": 1,
        "samples": 2,
        "seconds": 2.5,
    }
    assert load_example("eval_log")(3, args, {"sums": {"rewards": [0.0, 1.0]}}, {}) is False
    assert json.loads((tmp_path / "evaluations.jsonl").read_text()) == {"rollout_id": 3, "best": {"sums": 1.0}}


def test_advantage_and_data_postprocess_examples():
    data = {"rewards": [3.0, -1.0], "response_lengths": [3, 1]}
    load_example("advantage")(Config(rollout_batch_size=1), data)
    assert torch.equal(data["advantages"][0], 3.0 * 0.99 ** torch.tensor([2.0, 1.0, 0.0]))
    assert data["returns"][1].tolist() == [-1.0]
    load_example("data_postprocess")(Config(rollout_batch_size=1), 0, data)
    assert [values.tolist() for values in data["advantages"]] == [[2.0] * 3, [-1.0]]


def test_loss_example_matches_the_reinforce_formula():
    torch.manual_seed(0)
    logits = torch.randn(1, 7, 5, dtype=torch.float64, requires_grad=True)
    tokens = [torch.tensor([1, 2, 3, 4]), torch.tensor([0, 4, 2])]
    batch = {
        "unconcat_tokens": tokens,
        "response_lengths": [2, 1],
        "advantages": [torch.tensor([1.0, 2.0]), torch.tensor([-1.0])],
    }
    value, metrics = load_example("loss")(Config(rollout_batch_size=1), batch, logits, torch.sum)
    log_probs = logits[0].detach().float().log_softmax(-1)
    expected = -(log_probs[1, 3] * 1.0 + log_probs[2, 4] * 2.0 - log_probs[5, 2])
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    assert metrics["reinforce_loss"].item() == value.item()
    value.backward()
    assert logits.grad is not None
    assert logits.grad[0, [0, 3, 4, 6]].abs().sum() == 0


def test_tis_and_pg_loss_reducer_examples():
    losses, masks, metrics = load_example("tis")(
        Config(rollout_batch_size=1, tis_clip=2.0),
        pg_loss=torch.ones(3),
        train_log_probs=[torch.tensor([0.0, -2.0]), torch.tensor([0.5])],
        rollout_log_probs=[torch.tensor([0.0, 0.0]), torch.tensor([0.0])],
        loss_masks=[torch.ones(2), torch.zeros(1)],
        total_lengths=[3, 2],
        response_lengths=[2, 1],
    )
    assert [mask.tolist() for mask in masks] == [[1.0, 0.0], [0.0]]
    assert losses.tolist() == pytest.approx([1.0, 0.1353353, 1.6487213])
    assert torch.equal(metrics["own_ratio"], losses)
    reduce = load_example("pg_loss_reducer")(
        [3, 2], [2, 1], [torch.ones(2), torch.zeros(1)], calculate_per_token_loss=False
    )
    assert reduce(torch.tensor([2.0, 3.0, 100.0])).item() == pytest.approx(0.005)


def test_post_write_example_records_version_and_bytes(tmp_path: Path):
    folder = tmp_path / "weight_v000003"
    folder.mkdir()
    (folder / "model-00001-of-00001.safetensors").write_bytes(b"12345")
    load_example("post_write")(Config(rollout_batch_size=1, output_dir=str(tmp_path)), str(folder), [])
    assert json.loads((tmp_path / "versions.jsonl").read_text()) == {"version": "weight_v000003", "bytes": 5}


def test_convert_samples_example_drops_samples_without_reward():
    config = Config(rollout_batch_size=1)
    samples = [
        Sample(index=4, tokens=[1, 2, 3], response_length=2, rollout_log_probs=[-1.0, -2.0], reward=1.0),
        Sample(index=5, reward=None),
        Sample(
            index=6, rollout_id=2, tokens=[1, 2], response_length=1, loss_mask=[0], rollout_log_probs=[0.0], reward=0
        ),
    ]
    made = load_example("convert_samples")(config, samples)
    assert {len(column) for column in made.values()} == {2}
    assert (made["tokens"], made["rewards"], made["rollout_ids"]) == ([[1, 2, 3], [1, 2]], [1.0, 0], [4, 2])
    assert (made["loss_masks"], made["prompt_lengths"]) == ([[1, 1], [0]], [1, 1])
