"""Rollouts over several datasets: rewards, limits and metrics per dataset, also for returned and dropped groups."""

import json
from collections import Counter

import pytest

from slime.data.buffer import JournaledSource
from slime.data.sample import Sample
from slime.data.source import RolloutDataSourceWithBuffer
from slime.rollout.metrics import rollout_metrics
from slime.rollout.outcomes import leaves
from slime.rollout.sft_rollout import generate_rollout as supervised_rollout
from slime.rollout.sglang_rollout import generate_rollout
from tests.data.journal_samples import open_journal

LENGTH = "def f(args, sample):\n    return float(sample.response_length)\n"
SEVEN = "def f(args, sample):\n    return float(sample.response == '7')\n"
WEIGHTS = {"a": 2, "b": 1, "c": 1}


@pytest.fixture
def tasks(tmp_path, write_plugin):
    """`tasks(a={...}, ...)`: writes a config file of three datasets whose prompts begin with their names."""

    def write(**more):
        datasets = []
        for name, weight in WEIGHTS.items():
            file = tmp_path / f"{name}.jsonl"
            rows = ({"input": f"{name}{number}", "label": "7"} for number in range(5))
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            datasets.append({"name": name, "path": str(file), "weight": weight, **more.get(name, {})})
        (tmp_path / "tasks.json").write_text(json.dumps({"train": {"datasets": datasets}}))
        return {"prompt_config": str(tmp_path / "tasks.json"), "label_key": "label", "rollout_batch_size": 4}

    return write


@pytest.fixture
def answer(engine, tokenizer):
    """`answer(a="7</s>", ...)`: scripts the answer to the prompts of each dataset."""

    def script(**answers):
        def respond(body):
            said = answers[tokenizer.decode(body["input_ids"][:1])]
            return said(body) if callable(said) else said

        engine.respond = respond

    return script


def task_names(groups):
    return [next(leaves(group)).task for group in groups]


def test_datasets_have_own_rewards_limits_and_metrics(engine, make_runtime, tasks, answer, write_plugin, tokenizer):
    answer(a="7</s>", b="77777</s>", c="7</s>")
    flags = tasks(
        a={"rm_type": "f1"},
        b={"custom_rm_path": write_plugin(LENGTH, "length"), "max_response_len": 3, "stop": ["#"]},
    )
    runtime = make_runtime([engine.url], **flags, custom_rm_path=write_plugin(SEVEN, "seven"))
    output = generate_rollout(runtime.args, 0, RolloutDataSourceWithBuffer(runtime.plugin_args))
    assert task_names(output.samples) == ["a", "b", "a", "c"]
    assert [[sample.reward for sample in group] for group in output.samples] == [
        [1.0] * 2,
        [3.0] * 2,
        [1.0] * 2,
        [1.0] * 2,
    ]
    asked = {tokenizer.decode(request["input_ids"][:1]): request["sampling_params"] for request in engine.requests}
    assert {name: params["max_new_tokens"] for name, params in asked.items()} == {"a": 8, "b": 3, "c": 8}
    assert (asked["a"]["stop"], asked["b"]["stop"]) == (None, ["#"])
    found = output.metrics
    assert [found[f"rollout/{name}/share"] for name in "abc"] == [0.5, 0.25, 0.25]
    assert [found[f"rollout/{name}/raw_reward"] for name in "abc"] == [1.0, 3.0, 1.0]
    assert [found[f"rollout/{name}/truncated_ratio"] for name in "abc"] == [0.0, 1.0, 0.0]
    assert [found[f"rollout/{name}/zero_std/count"] for name in "abc"] == [2.0, 1.0, 1.0]
    assert [found[f"rollout/{name}/response_len/mean"] for name in "abc"] == [2.0, 3.0, 2.0]
    assert found["rollout/raw_reward"] == 1.5


def test_dataset_rm_type_overrides_custom_rm_path(engine, make_runtime, tasks, write_plugin):
    """The `rm_type` of a dataset overrides --custom-rm-path, which scores the other datasets."""
    engine.respond = lambda body: "77</s>"
    runtime = make_runtime([engine.url], **tasks(a={"rm_type": "f1"}), custom_rm_path=write_plugin(LENGTH))
    output = generate_rollout(runtime.args, 0, RolloutDataSourceWithBuffer(runtime.plugin_args))
    assert [group[0].reward for group in output.samples] == [0.0, 3.0, 0.0, 3.0]


@pytest.mark.parametrize("partial", [False, True])
def test_returned_groups_are_generated_again_and_shares_hold(engine, make_runtime, tasks, answer, tmp_path, partial):
    """Requests of `b` are aborted in the first batch, which the other datasets fill."""
    end = lambda body: engine.when(lambda: engine.holding == 4, "7</s>")  # noqa: E731
    answer(a=end, b=lambda body: engine.held("12"), c=end)
    runtime = make_runtime(
        [engine.url],
        **tasks(b={"max_response_len": 6}),
        rm_type="f1",
        over_sampling_batch_size=8,
        partial_rollout=partial,
    )
    journal = runtime.journal = open_journal(tmp_path)
    source = JournaledSource(RolloutDataSourceWithBuffer(runtime.plugin_args), journal)
    source.resume(0)
    first = generate_rollout(runtime.args, 0, source)
    assert "b" not in task_names(first.samples)
    assert first.metrics["rollout/a/share"] + first.metrics["rollout/c/share"] == 1.0
    waiting = task_names(source.source.buffer)
    assert waiting.count("b") == 2
    assert Counter(task_names(first.samples) + waiting) == {"a": 4, "b": 2, "c": 2}

    b = engine.encode("b")[0]
    asked = lambda: sum(request["input_ids"][0] == b for request in engine.requests)  # noqa: E731
    end = lambda body: engine.when(lambda: asked() == 6, "7</s>")  # noqa: E731
    answer(a=end, b="3</s>", c=end)
    engine.requests.clear()
    second = generate_rollout(runtime.args, 1, source)
    limits = {
        len(request["input_ids"]): request["sampling_params"]["max_new_tokens"]
        for request in engine.requests
        if request["input_ids"][0] == b
    }
    assert limits == ({2: 6, 4: 4} if partial else {2: 6})  # two of the 6 allowed tokens exist
    everything = [*first.samples, *second.samples, *source.source.buffer]
    assert sorted(group[0].group_index for group in everything) == list(range(12))
    assert Counter(task_names(everything)) == {"a": 6, "b": 3, "c": 3}


def test_dynamic_filter_does_not_change_the_dataset_mixture(engine, make_runtime, tasks, answer, write_plugin):
    answer(a="7</s>", b="7</s>", c="7</s>")
    flags = tasks(a={"custom_rm_path": write_plugin("def f(args, sample):\n    return float(sample.index % 2)\n")})
    runtime = make_runtime(
        [engine.url],
        **flags,
        rm_type="f1",
        dynamic_sampling_filter_path="slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
    )
    source = RolloutDataSourceWithBuffer(runtime.plugin_args)
    output = generate_rollout(runtime.args, 0, source)
    assert task_names(output.samples) == ["a"] * 4  # all responses of `b` and `c` have the reward 1
    assert output.metrics["rollout/a/share"] == 1.0
    assert {name: one["given"] for name, one in source.state_dict()["mixture"].items()} == {"a": 4, "b": 2, "c": 2}


def test_sample_created_by_a_generate_function_keeps_its_dataset(engine, make_runtime, tasks, write_plugin):
    anew = (
        "from slime.utils.types import Sample\n\n\n"
        "async def f(args, sample, sampling_params):\n"
        "    return Sample(tokens=[5, 6], response='7', response_length=1, loss_mask=[1], rollout_log_probs=[-0.1])\n"
    )
    runtime = make_runtime([engine.url], **tasks(b={"custom_generate_function_path": write_plugin(anew)}), rm_type="f1")
    output = generate_rollout(runtime.args, 0, RolloutDataSourceWithBuffer(runtime.plugin_args))
    assert task_names(output.samples) == ["a", "b", "a", "c"]
    assert [sample.tokens for sample in output.samples[1]] == [[5, 6]] * 2


def test_sft_rollout_mixes_datasets_by_weight(make_runtime, tasks):
    flags = tasks()
    runtime = make_runtime([], **{**flags, "rollout_batch_size": 8}, loss_type="sft_loss", n_samples_per_prompt=1)
    output = supervised_rollout(runtime.args, 0, RolloutDataSourceWithBuffer(runtime.plugin_args))
    assert [output.metrics[f"rollout/{name}/share"] for name in "abc"] == [0.5, 0.25, 0.25]
    assert "rollout/a/raw_reward" not in output.metrics
    assert Counter(task_names(output.samples)) == {"a": 4, "b": 2, "c": 2}


def test_samples_without_a_dataset_are_excluded_from_dataset_metrics(make_runtime):
    runtime = make_runtime([])
    done = Sample.Status.COMPLETED
    samples = [
        Sample(group_index=0, index=0, tokens=[1, 2], response_length=1, reward=1.0, status=done),
        Sample(group_index=1, index=1, tokens=[1, 2], response_length=1, reward=0.0, status=done, task="a"),
        Sample(group_index=1, index=2, status=Sample.Status.FAILED, task="a"),
    ]
    found = rollout_metrics(runtime.args, samples, 1.0)
    of_tasks = {name: value for name, value in found.items() if name.startswith("rollout/a/")}
    assert of_tasks == {
        "rollout/a/share": 1.0,
        "rollout/a/raw_reward": 0.0,
        "rollout/a/zero_std/count": 0.0,
        "rollout/a/response_len/mean": 1.0,
        "rollout/a/truncated_ratio": 0.0,
    }
