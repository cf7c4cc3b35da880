"""Over-sampling, dynamic filters, aborts and partial rollouts: the final place of every group."""

import asyncio
import gc
import weakref
from contextlib import nullcontext

import pytest

from slime.data.buffer import JournaledSource
from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.base_types import RolloutFnTrainOutput, leaves
from slime.rollout.filter_hub.base_types import DynamicFilterOutput, call_dynamic_filter
from slime.rollout.filter_hub.dynamic_sampling_filters import (
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
)
from slime.rollout.outcomes import RolloutFailed
from slime.rollout.pipeline import RolloutMaker
from slime.rollout.sglang_rollout import generate_rollout
from tests.data.journal_samples import open_journal

STATUS = Sample.Status
NONZERO_STD = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
LENGTH = "def f(args, sample):\n    return float(len(sample.response))\n"


@pytest.fixture
def answer(engine, tokenizer):
    """`answer(a="7</s>", ...)`: scripts the answer to each one-letter prompt, independent of tokens sampled so far."""

    def script(**answers):
        def respond(body):
            said = answers[tokenizer.decode(body["input_ids"][:1])]
            return said(body) if callable(said) else said

        engine.respond = respond

    return script


def prompts_of(groups):
    return [next(leaves(group)).prompt for group in groups]


def test_only_samples_to_train_on_are_stored_for_the_trainers(
    engine, make_runtime, prompts, answer, write_plugin, monkeypatch
):
    answer(a="7</s>", b="8</s>", c="9</s>")
    reward = write_plugin("def f(args, sample):\n    return 1 / (5 - sample.index)\n")
    only = write_plugin("def f(args, samples):\n    return samples[0].prompt != 'b'\n", "only")
    runtime = make_runtime([engine.url], custom_rm_path=reward, dynamic_sampling_filter_path=only)
    taken = []

    def keep(arrays):
        taken.append([array.tolist() for array in arrays])
        return [array.copy() for array in arrays]

    runtime.keep = keep
    looked_at = []
    monkeypatch.setattr("slime.rollout.metrics.has_repetition", lambda text: bool(looked_at.append(text)))
    groups = generate_rollout(runtime.args, 0, prompts(["a", "b", "c"], n=2)).samples
    assert sorted(looked_at) == ["7", "7", "9"], "each response once, when it was there"
    assert prompts_of(groups) == ["a", "c"]
    scored = [sample for sample in leaves(groups) if sample.status is not STATUS.FAILED]
    assert len(scored) == 3
    assert sorted(taken) == sorted([sample.tokens, sample.rollout_log_probs] for sample in scored)


def test_aborted_groups_return_to_the_source_as_prompts(engine, make_runtime, prompts, answer):
    hold = lambda body: engine.held("12")  # noqa: E731
    end = lambda body: engine.when(lambda: engine.holding == 4, "7</s>")  # noqa: E731
    answer(a=end, b=hold, c=end, d=hold)
    runtime = make_runtime([engine.url], over_sampling_batch_size=4, rm_type="random")
    source = prompts(["a", "b", "c", "d", "e"], n=2)
    output = generate_rollout(runtime.args, 3, source)
    assert prompts_of(output.samples) == ["a", "c"]
    assert prompts_of(source.groups) == ["b", "d", "e"]
    assert source.asked == [4]
    for sample in leaves(source.groups):
        assert (sample.status, sample.tokens, sample.response, sample.metadata) == (STATUS.PENDING, [], "", {})
    assert engine.aborts[0] == {"abort_all": True}
    assert (output.metrics["rollout/surplus_groups"], output.metrics["rollout/returned_groups"]) == (0.0, 2.0)
    assert output.metrics["rollout/thrown_away_tokens"] == 8.0  # four samples were aborted after "12"
    assert output.metrics["rollout/dropped_tokens"] == 0.0
    assert not runtime.state.pendings
    assert not runtime.state.aborted


@pytest.mark.parametrize("masked", [False, True])
def test_partial_response_is_continued_from_its_tokens(engine, make_runtime, prompts, answer, tokenizer, masked):
    answer(a=lambda body: engine.when(lambda: engine.holding == 2, "7</s>"), b=lambda body: engine.held("12"))
    runtime = make_runtime(
        [engine.url],
        rollout_batch_size=1,
        over_sampling_batch_size=2,
        partial_rollout=True,
        mask_offpolicy_in_partial_rollout=masked,
        rm_type="random",
    )
    source = prompts(["a", "b"], n=2)
    output = generate_rollout(runtime.args, 3, source)
    assert output.metrics["rollout/thrown_away_tokens"] == 0.0
    for sample in leaves(source.groups):
        assert (sample.status, sample.response, sample.response_length) == (STATUS.ABORTED, "12", 2)
        assert (sample.metadata, sample.reward) == ({"start_rollout_id": 3}, None)
    engine.version = "2"
    engine.requests.clear()
    answer(b="345</s>")
    output = generate_rollout(runtime.args, 4, source)
    ids = tokenizer.encode("b12345</s>", add_special_tokens=False)
    assert [request["input_ids"] for request in engine.requests] == [ids[:3], ids[:3]]
    assert [request["sampling_params"]["max_new_tokens"] for request in engine.requests] == [6, 6]
    for sample in leaves(output.samples):
        assert (sample.tokens, sample.response, sample.status) == (ids, "12345", STATUS.COMPLETED)
        assert sample.rollout_log_probs == [-t / 100 for t in ids[1:]]
        assert sample.loss_mask == ([0, 0] if masked else [1, 1]) + [1] * 4
        assert sample.weight_versions == ["1", "2"]
        assert sample.metadata == {"start_rollout_id": 3}
    assert source.groups == []


def test_surplus_groups_are_used_first_without_regeneration(
    engine, make_runtime, prompts, answer, write_plugin, tokenizer
):
    end = lambda body: engine.when(lambda: engine.holding == 2, "7</s>")  # noqa: E731
    answer(a=end, b=lambda body: engine.held("77</s>", finish="stop"))
    runtime = make_runtime(
        [engine.url], rollout_batch_size=1, over_sampling_batch_size=2, custom_rm_path=write_plugin(LENGTH)
    )
    source = prompts(["a", "b", "c"], n=2)
    output = generate_rollout(runtime.args, 0, source)
    assert (output.metrics["rollout/surplus_groups"], output.metrics["rollout/returned_groups"]) == (1.0, 0.0)
    kept = source.groups[0]
    assert [(sample.response, sample.reward, sample.status) for sample in kept] == [("77", 2.0, STATUS.COMPLETED)] * 2
    engine.requests.clear()
    answer(c=lambda body: engine.held("7"))
    output = generate_rollout(runtime.args, 1, source)
    assert output.samples == [kept]
    assert {tokenizer.decode(request["input_ids"]) for request in engine.requests} <= {"c"}
    assert prompts_of(source.groups) == ["c"]


def test_dropped_groups_are_replaced_by_new_prompts(engine, make_runtime, prompts, answer, write_plugin):
    answer(a="7", b="77", c="777", d="7777", e="77777")
    keeps_long = (
        "from slime.rollout.filter_hub.base_types import DynamicFilterOutput\n"
        "def f(args, samples):\n"
        "    n = len(samples[0].response)\n"
        "    if n == 1:\n        return False\n"
        "    return DynamicFilterOutput(n > 2, reason=f'short_{n}')\n"
    )
    process = "def f(args, all_groups, data_source):\n    data_source.seen = all_groups\n"
    runtime = make_runtime(
        [engine.url],
        dynamic_sampling_filter_path=write_plugin(keeps_long, "keeps_long"),
        rollout_all_samples_process_path=write_plugin(process, "process"),
        rm_type="random",
    )
    source = prompts(["a", "b", "c", "d", "e"], n=2)
    output = generate_rollout(runtime.args, 0, source)
    assert prompts_of(output.samples) == ["c", "d"]
    assert source.asked == [2, 2]
    assert prompts_of(source.groups) == ["e"]
    assert prompts_of(source.seen) == ["a", "b", "c", "d"]
    dropped = {name: value for name, value in output.metrics.items() if "dynamic_filter" in name}
    assert dropped == {
        "rollout/dynamic_filter/drop_unnamed": 1.0,
        "rollout/dynamic_filter/drop_short_2": 1.0,
    }
    assert output.metrics["rollout/dropped_tokens"] == 2 * (1 + 2)
    assert output.metrics["rollout/thrown_away_tokens"] == 0.0


def test_fallback_filter_keeps_equal_reward_groups_when_needed(engine, make_runtime, prompts, write_plugin):
    differs = "def f(args, sample):\n    return float(sample.prompt == 'b' and sample.index % 2)\n"
    runtime = make_runtime(
        [engine.url],
        rollout_batch_size=2,
        over_sampling_batch_size=3,
        sglang_server_concurrency=1,
        dynamic_sampling_filter_path=NONZERO_STD + "_with_fallback",
        custom_rm_path=write_plugin(differs),
    )
    source = prompts(["a", "b", "c", "d"], n=2)
    output = generate_rollout(runtime.args, 0, source)
    assert source.asked == [3]
    assert prompts_of(output.samples) == ["b", "c"]  # a is dropped while three groups are in flight, c is needed
    assert output.metrics["rollout/dynamic_filter/drop_zero_std_0.0"] == 1.0


class EndlessSource:
    """A data source that never ends."""

    def __init__(self):
        self.handed_out = 0

    def get_samples(self, count):
        self.handed_out += count
        return [[Sample(prompt="a", index=0, group_index=0)] for _ in range(count)]


def test_filter_that_drops_200_groups_in_a_row_fails_the_rollout(engine, make_runtime, write_plugin):
    path = write_plugin("def f(args, samples):\n    return False\n")
    runtime = make_runtime([engine.url], dynamic_sampling_filter_path=path, rm_type="random")
    source = EndlessSource()
    with pytest.raises(RolloutFailed, match=r"rollout 5: .* dropped 200 groups in a row \(unnamed: 200\): use prompts"):
        generate_rollout(runtime.args, 5, source)
    assert 200 <= source.handed_out <= 202
    assert not runtime.state.pendings


def test_failed_samples_are_not_reported_as_zero_std(make_runtime):
    runtime = make_runtime(["http://127.0.0.1:9"], dynamic_sampling_filter_path=NONZERO_STD, rm_type="random")
    source = EndlessSource()
    with pytest.raises(RolloutFailed, match=r"rollout 0: all 2 samples failed; the first one: engine: EngineUnreach"):
        generate_rollout(runtime.args, 0, source)


def test_dynamic_filter_skips_failed_samples(engine, make_runtime, prompts, write_plugin):
    reward = (
        "def f(args, sample):\n    if sample.index == 0:\n        raise ValueError('x')\n    return sample.index % 2\n"
    )
    runtime = make_runtime(
        [engine.url],
        rollout_batch_size=1,
        n_samples_per_prompt=3,
        dynamic_sampling_filter_path=NONZERO_STD,
        custom_rm_path=write_plugin(reward),
    )
    output = generate_rollout(runtime.args, 0, prompts(["a"], n=3))
    assert [sample.reward for sample in leaves(output.samples)] == [None, 1.0, 0.0]


@pytest.mark.parametrize(
    ("rewards", "keep", "reason"),
    [
        ([1.0, 0.0], True, None),
        ([0.3, 0.3 + 3e-6], True, None),
        ([0.3, 0.3 + 1e-7], False, "zero_std_0.3"),
        ([1.0, 1.0, 1.0], False, "zero_std_1.0"),
        ([1.0], False, "zero_std_1.0"),
        ([None, None], False, "no_reward"),
        ([None, 1.0, 0.0], True, None),
    ],
)
def test_nonzero_std_filter_keeps_groups_with_differing_rewards(make_runtime, engine, rewards, keep, reason):
    args = make_runtime([engine.url]).args
    samples = [Sample(reward=reward) for reward in rewards]
    assert check_reward_nonzero_std(args, samples) == DynamicFilterOutput(keep, reason)
    assert check_reward_nonzero_std_with_fallback(args, samples) == DynamicFilterOutput(keep, reason, True)


def test_filter_that_returns_none_is_rejected(make_runtime, engine):
    args = make_runtime([engine.url], dynamic_sampling_filter_path="mine.f").args
    assert call_dynamic_filter(None, args, []).keep
    with pytest.raises(UserError, match=r"--dynamic-sampling-filter-path mine.f returned None: it must return a bool"):
        call_dynamic_filter(lambda args, samples: None, args, [])


OWN_CLIENT_FAN_OUT = """
import copy
import aiohttp
async def f(args, sample, sampling_params):
    sample.metadata["touched"] = True
    sample.tokens = [ord(sample.prompt) - ord("a") + 4]
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    body = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        answer = await response.json()
    log_probs, tokens, _ = zip(*answer["meta_info"]["output_token_logprobs"])
    sample.append_response_tokens(
        args, tokens=tokens, log_probs=log_probs, meta_info=answer["meta_info"], text=answer["text"]
    )
    return [sample, copy.deepcopy(sample)]
"""


def test_custom_client_fan_out_keeps_finished_and_restarts_aborted_samples(
    engine, make_runtime, prompts, answer, write_plugin, monkeypatch
):
    monkeypatch.setattr("slime.rollout.inflight.OWN_CLIENT_GRACE_S", 120.0)
    monkeypatch.setattr("slime.rollout.inflight.ABORT_DEADLINE_S", 120.0)
    calls = []

    def half(body):
        calls.append(body)
        return "77</s>" if len(calls) == 1 else engine.held("1")

    answer(a=lambda body: engine.when(lambda: engine.holding == 1 and len(calls) == 2, "7</s>"), b=half)
    runtime = make_runtime(
        [engine.url],
        rollout_batch_size=1,
        over_sampling_batch_size=2,
        partial_rollout=True,
        custom_generate_function_path=write_plugin(OWN_CLIENT_FAN_OUT, "fan"),
        custom_rm_path=write_plugin("def f(args, samples):\n    return [1.0] * len(samples)\n", "reward"),
        dynamic_sampling_filter_path=write_plugin("def f(args, samples):\n    return len(samples) == 4\n", "filter"),
    )
    source = prompts(["a", "b"], n=2)
    output = generate_rollout(runtime.args, 0, source)
    assert [len(member) for member in output.samples[0]] == [2, 2]
    assert output.metrics["rollout/thrown_away_tokens"] == 2.0  # both siblings contained the aborted token
    done, cut_off = sorted(source.groups[0], key=lambda member: isinstance(member, Sample))
    assert [(sample.response, sample.reward) for sample in done] == [("77</s>", 1.0)] * 2
    assert (cut_off.tokens, cut_off.metadata, cut_off.status) == ([], {}, STATUS.PENDING)
    answer(b="777</s>")
    output = generate_rollout(runtime.args, 1, source)
    assert sorted(sample.response for sample in leaves(output.samples)) == ["777</s>"] * 2 + ["77</s>"] * 2
    assert source.groups == []


def test_generate_function_that_ignores_an_abort_is_cancelled(engine, make_runtime, prompts, write_plugin, monkeypatch):
    monkeypatch.setattr("slime.rollout.inflight.ABORT_DEADLINE_S", 0.1)
    stubborn = (
        "import asyncio\nfrom slime.rollout.sglang_rollout import generate\nBEGUN = asyncio.Event()\n"
        "async def f(args, sample, sampling_params):\n"
        "    if sample.prompt == 'b':\n"
        "        sample.tokens += [1, 2]\n        sample.response_length = 2\n"
        "        sample.metadata['tool'] = 'running'\n        BEGUN.set()\n"
        "        await asyncio.sleep(3600)\n"
        "    await BEGUN.wait()\n"
        "    return await generate(args, sample, sampling_params)\n"
    )
    runtime = make_runtime(
        [engine.url],
        rollout_batch_size=1,
        over_sampling_batch_size=2,
        custom_generate_function_path=write_plugin(stubborn),
        rm_type="random",
    )
    source = prompts(["a", "b"], n=1)
    output = generate_rollout(runtime.args, 0, source)
    assert [(s.prompt, s.tokens, s.metadata, s.status) for s in leaves(source.groups)] == [
        ("b", [], {}, STATUS.PENDING)
    ]
    assert output.metrics["rollout/thrown_away_tokens"] == 2.0


def test_group_rewards_wait_for_the_whole_group(engine, make_runtime, prompts, answer, write_plugin):
    calls = []

    def half(body):
        calls.append(body)
        return "77</s>" if len(calls) == 1 else engine.held("1")

    answer(a=lambda body: engine.when(lambda: engine.holding == 1 and len(calls) == 2, "7</s>"), b=half)
    runtime = make_runtime(
        [engine.url],
        rollout_batch_size=1,
        over_sampling_batch_size=2,
        partial_rollout=True,
        group_rm=True,
        custom_rm_path=write_plugin("def f(args, samples):\n    return [float(len(samples))] * len(samples)\n"),
    )
    source = prompts(["a", "b"], n=2)
    generate_rollout(runtime.args, 0, source)
    assert {(sample.status, sample.reward) for sample in leaves(source.groups)} == {
        (STATUS.COMPLETED, None),
        (STATUS.ABORTED, None),
    }
    answer(b="2</s>")
    output = generate_rollout(runtime.args, 1, source)
    assert [sample.reward for sample in leaves(output.samples)] == [2.0, 2.0]
    assert sorted(sample.response for sample in leaves(output.samples)) == ["12", "77"]


@pytest.mark.parametrize(("reward", "said"), [("float('nan')", "nan"), ("float('inf')", "inf")])
def test_non_finite_reward_stops_the_rollout(engine, make_runtime, prompts, write_plugin, reward, said):
    path = write_plugin(
        "async def f(args, sample, sampling_params):\n"
        f"    sample.tokens, sample.reward = [1], {reward} if sample.index == 3 else 1.0\n"
        "    sample.status = sample.Status.COMPLETED\n    return sample\n"
    )
    runtime = make_runtime([engine.url], custom_generate_function_path=path)
    with pytest.raises(UserError) as caught:
        generate_rollout(runtime.args, 0, prompts(["a", "b"], n=2))
    assert str(caught.value).startswith(f"sample 3: the generate function {path} gave the reward {said}, which would")


def test_error_for_a_non_numeric_reward_names_the_function(engine, make_runtime, prompts, write_plugin):
    runtime = make_runtime(
        [engine.url],
        custom_rm_path=write_plugin("def f(args, sample):\n    return {'score': 'good'}\n"),
        reward_key="score",
    )
    with pytest.raises((UserError, RolloutFailed), match=r"plugin\.py:f"):
        generate_rollout(runtime.args, 0, prompts(["a", "b"], n=2))


@pytest.mark.parametrize("is_asked_for", [False, True])
def test_dropped_groups_are_freed_unless_a_process_function_needs_them(
    engine, make_runtime, prompts, write_plugin, tmp_path, is_asked_for
):
    """A strict filter may drop a hundred batches; their samples must not stay in memory."""
    only_z = "def f(args, samples):\n    return samples[0].prompt == 'z'\n"
    count = "def f(args, all_groups, data_source):\n    data_source.seen = [g[0].prompt for g in all_groups]\n"
    flags = {"rollout_all_samples_process_path": write_plugin(count, "count")} if is_asked_for else {}
    runtime = make_runtime(
        [engine.url],
        rm_type="random",
        rollout_batch_size=1,
        n_samples_per_prompt=1,
        dynamic_sampling_filter_path=write_plugin(only_z, "filter"),
        **flags,
    )
    source, held = prompts(list("abcdz"), n=1), []
    dropped = [weakref.ref(sample) for group in source.groups[:4] for sample in group]
    runtime.journal = open_journal(tmp_path)

    async def respond(body):
        is_last = body["input_ids"] == engine.encode("z")
        for _ in range(200 if is_last and not is_asked_for else 1):  # groups judged last may still be referenced
            gc.collect()
            if (count := sum(one() is not None for one in dropped)) <= 1:
                break
            await asyncio.sleep(0.05)
        held.append(count)
        return "7</s>"

    engine.respond = respond
    output = generate_rollout(runtime.args, 0, JournaledSource(source, runtime.journal))
    assert output.metrics["rollout/dynamic_filter/drop_unnamed"] == 4.0
    assert output.metrics["rollout/dropped_tokens"] == 8.0
    if is_asked_for:
        assert source.seen == list("abcdz")
        assert held[-1] == 4
    else:
        assert held[-1] <= 1  # the group judged last may still be referenced
    assert list(leaves(runtime.journal.recover(0).groups)) == list(leaves(output.samples))
    runtime.journal.close()


def test_observe_samples_receives_dropped_groups_when_the_batch_is_made(
    engine, make_runtime, prompts, answer, write_plugin, tmp_path
):
    class Observing(prompts):
        seen = ()

        def observe_samples(self, rollout_id, groups):
            self.seen = [(rollout_id, group[0].prompt, group[0].reward) for group in groups]

    answer(a="7</s>", b="77</s>", c="777</s>", d="7777</s>")
    judged, respond = tmp_path / "judged", engine.respond
    judged.touch()

    async def last(body):
        while body["input_ids"] == engine.encode("d") and len(judged.read_text()) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return respond(body)

    engine.respond = last
    only = write_plugin(
        "def f(args, samples):\n"
        f"    with open({str(judged)!r}, 'a') as file:\n        file.write(samples[0].prompt)\n"
        "    return samples[0].prompt in 'bd'\n",
        "only",
    )
    runtime = make_runtime(
        [engine.url],
        custom_rm_path=write_plugin(LENGTH, "length"),
        dynamic_sampling_filter_path=only,
        n_samples_per_prompt=1,
    )
    inner = Observing(list("abcd"), n=1)
    runtime.journal = open_journal(tmp_path)
    source = JournaledSource(inner, runtime.journal)
    maker = RolloutMaker(runtime, None, source, log=lambda *_: False, at_work=nullcontext)
    groups = generate_rollout(runtime.args, 3, source).samples
    assert prompts_of(groups) == ["b", "d"]
    finished = prompts_of(runtime.journal.recover(0).groups)
    assert (inner.seen, finished) == ((), list("abcd"))  # a crash at this point would recover all of them
    maker.get(3, lambda: RolloutFnTrainOutput(groups, {}))
    kept, dropped = inner.seen[:2], inner.seen[2:]
    assert kept == [(3, "b", 2.0), (3, "d", 4.0)]
    assert sorted(dropped) == [(3, "a", 1.0), (3, "c", 3.0)]
    assert runtime.journal.recover(0).groups == []
    runtime.journal.close()
