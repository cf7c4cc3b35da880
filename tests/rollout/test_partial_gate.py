"""Groups of custom generate functions that outlive their rollout: held at the gate, then resumed in the next one."""

import asyncio
import gc
import logging

import pytest

from slime.data.sample import Sample
from slime.engine.http.protocol import sampling_seed
from slime.errors import UserError
from slime.rollout.base_types import leaves
from slime.rollout.gate import Gate, SampleClock, SampleTimeout, as_evaluation
from slime.rollout.sglang_rollout import generate_and_rm, generate_rollout
from tests.rollout.clocks import ClockAhead

STATUS = Sample.Status
ALWAYS = "def f(args, sample):\n    return 1.0\n"

TWO_TURNS = """
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
async def f(args, sample, sampling_params):
    encode = GenerateState(args).tokenizer.encode
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.tokens = encode(sample.prompt, add_special_tokens=False)
    for turn in range(2):
        if turn:
            sample.append_response_tokens(args, tokens=encode("?"), trainable=False, text="?")
        params = {**sampling_params, "sampling_seed": 5, "min_new_tokens": 3}
        answer = await post(url, {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True})
        meta_info = answer["meta_info"]
        log_probs, tokens, _ = zip(*meta_info["output_token_logprobs"])
        assert list(tokens) == answer["output_ids"], answer
        sample.append_response_tokens(
            args, tokens=tokens, log_probs=log_probs, meta_info=meta_info, text=answer["text"]
        )
        sample.metadata.setdefault("meta", []).append(meta_info)
    return sample
"""
ONE_CALL = """
from slime.rollout.sglang_rollout import generate
async def f(args, sample, sampling_params):
    return await generate(args, sample, sampling_params)
"""


@pytest.fixture
def say(engine, tokenizer):
    """`say(f)`: scripts the engine; `f` maps request text to answer text, and a trailing ~ holds it until an abort."""

    def script(reply):
        def respond(body):
            said = reply(tokenizer.decode(body["input_ids"]))
            return engine.held(said[:-1]) if isinstance(said, str) and said.endswith("~") else said

        engine.respond = respond

    return script


@pytest.fixture
def asked(engine, tokenizer):
    return lambda: [tokenizer.decode(request["input_ids"]) for request in engine.requests]


@pytest.fixture
def make_partial(engine, make_runtime, write_plugin):
    def make(generate=TWO_TURNS, **flags):
        return make_runtime(
            [engine.url],
            **{
                "rollout_batch_size": 1,
                "over_sampling_batch_size": 2,
                "partial_rollout": True,
                "custom_generate_function_path": write_plugin(generate, "generate"),
                "custom_rm_path": write_plugin(ALWAYS, "reward"),
            }
            | flags,
        )

    return make


def abort_second_turns_of_b(engine, n):
    """Abort the n second turns of b; the other requests finish once these are at the engine."""

    def reply(text):
        if text == "a7</s>?":
            return when_holding(engine, n)
        return {"a": "7</s>", "b": "1</s>", "b1</s>?": "23~"}[text]

    return reply


def when_holding(engine, n):
    """Return an answer once n requests are held."""
    return engine.when(lambda: engine.holding == n, "7</s>")


@pytest.mark.parametrize("masked", [False, True])
def test_aborted_second_turn_resumes_in_the_next_rollout(engine, make_partial, prompts, say, asked, tokenizer, masked):
    say(abort_second_turns_of_b(engine, 2))
    runtime = make_partial(mask_offpolicy_in_partial_rollout=masked)
    source = prompts(["a", "b"], n=2)
    output = generate_rollout(runtime.args, 3, source)
    assert [sample.prompt for sample in leaves(output.samples)] == ["a", "a"]
    assert (output.metrics["rollout/held_groups"], output.metrics["rollout/returned_groups"]) == (1.0, 0.0)
    assert output.metrics["rollout/thrown_away_tokens"] == 0.0
    assert source.groups == []
    assert len(runtime.state.held) == 1
    assert {one.task for one in runtime.state.held} == runtime.state.pendings
    assert not runtime.state.aborted

    engine.version = "2"
    engine.requests.clear()
    say(lambda text: {"b1</s>?23": "456</s>"}[text])
    output = generate_rollout(runtime.args, 4, source)
    assert asked() == ["b1</s>?23"] * 2
    for request in engine.requests:
        params = request["sampling_params"]
        assert (params["max_new_tokens"], params["min_new_tokens"]) == (6, 1)
        assert params["sampling_seed"] == sampling_seed(5, 2)
    ids = tokenizer.encode("b1</s>?23456</s>", add_special_tokens=False)
    for sample in leaves(output.samples):
        assert (sample.tokens, sample.response, sample.reward) == (ids, "1</s>?23456</s>", 1.0)
        assert (sample.status, sample.weight_versions) == (STATUS.COMPLETED, ["1", "2"])
        assert sample.version_spans == [["1", 2], [None, 1], ["1", 2], ["2", 4]]
        answered = [-t / 100 for t in ids]
        assert sample.rollout_log_probs == [*answered[1:3], 0.0, *answered[4:]]
        assert sample.loss_mask == ([0, 0, 0, 0, 0] if masked else [1, 1, 0, 1, 1]) + [1, 1, 1, 1]
        meta = sample.metadata["meta"][1]
        assert meta["weight_versions"] == [
            {"version": "1", "start": 0, "end": 2},
            {"version": "2", "start": 2, "end": 6},
        ]
        assert (meta["weight_version"], meta["finish_reason"]) == ("2", {"type": "stop"})
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (4, 6)
        assert meta.get("masked_until") == (2 if masked else None)
        assert sample.metadata["start_rollout_id"] == 3
    assert output.metrics["rollout/thrown_away_tokens"] == 0.0
    assert not runtime.state.held
    assert not runtime.state.pendings


def test_without_partial_rollout_aborted_prompts_start_over(engine, make_partial, prompts, say):
    say(abort_second_turns_of_b(engine, 1))
    runtime = make_partial(partial_rollout=False)
    source = prompts(["a", "b"], n=1)
    output = generate_rollout(runtime.args, 0, source)
    assert [(s.prompt, s.tokens, s.status) for s in leaves(source.groups)] == [("b", [], STATUS.PENDING)]
    assert output.metrics["rollout/thrown_away_tokens"] == 4.0  # 1</s> and 23; the ? between them is not sampled
    assert not runtime.state.held


def test_held_groups_are_resumed_before_new_ones_and_filtered(engine, make_partial, prompts, say, asked, write_plugin):
    say(abort_second_turns_of_b(engine, 2))
    keeps = "def f(args, samples):\n    return samples[0].prompt != 'b'\n"
    runtime = make_partial(dynamic_sampling_filter_path=write_plugin(keeps, "filter"), over_sampling_batch_size=2)
    source = prompts(["a", "b", "c", "d"], n=2)
    generate_rollout(runtime.args, 0, source)
    assert [next(leaves(one.group)).prompt for one in runtime.state.held] == ["b"]
    engine.requests.clear()
    source.asked.clear()
    say(lambda text: {"b1</s>?23": "4</s>"}.get(text, "7</s>"))
    output = generate_rollout(runtime.args, 1, source)
    assert asked()[:2] == ["b1</s>?23"] * 2
    assert source.asked == [2]  # only after the held group was dropped
    assert output.metrics["rollout/dynamic_filter/drop_unnamed"] == 1.0
    assert output.metrics["rollout/dropped_tokens"] == 2 * (2 + 4)
    assert output.metrics["rollout/thrown_away_tokens"] == 0.0
    assert len(output.samples) == 1


def test_tool_call_that_outlives_the_rollout_waits_at_the_gate(engine, make_partial, prompts, say, asked):
    tool = """
import asyncio
from slime.rollout.sglang_rollout import generate
async def f(args, sample, sampling_params):
    if sample.prompt == "b":
        await generate(args, sample, sampling_params)
        args.carried["at_tool"].set()
        await args.carried["tool"].wait()
        sample.append_response_tokens(args, tokens=[5], trainable=False, text="!")
        args.carried["has_result"].set()
    else:
        await args.carried["at_tool"].wait()
    return await generate(args, sample, sampling_params)
"""
    say(lambda text: {"a": "7</s>", "b": "1"}[text])
    done, at_tool, has_result = asyncio.Event(), asyncio.Event(), asyncio.Event()
    runtime = make_partial(tool, carried={"tool": done, "at_tool": at_tool, "has_result": has_result})
    source = prompts(["a", "b"], n=1)
    output = generate_rollout(runtime.args, 0, source)
    assert output.metrics["rollout/held_groups"] == 1.0
    engine.requests.clear()
    runtime.loop_thread.loop.call_soon_threadsafe(done.set)

    async def settled():
        await has_result.wait()
        await asyncio.sleep(0.05)

    runtime.run(settled(), 120)
    assert asked() == []  # it has the result, but must not send a request yet
    say(lambda text: "2</s>")
    [sample] = leaves(generate_rollout(runtime.args, 1, source).samples)
    assert len(asked()) == 1
    assert sample.response == "1!2"
    assert sample.loss_mask == [1, 0, 1, 1]


def test_evaluation_runs_while_groups_are_held(engine, make_partial, prompts, say, asked):
    say(abort_second_turns_of_b(engine, 1))
    runtime = make_partial(sglang_server_concurrency=2)
    source = prompts(["a", "b"], n=1)
    generate_rollout(runtime.args, 0, source)
    assert runtime.state.held
    say(lambda text: "9</s>")

    async def evaluated():
        with as_evaluation():
            return await asyncio.gather(
                *(generate_and_rm(runtime.args, Sample(prompt="e"), {"max_new_tokens": 8}, True) for _ in range(5))
            )

    engine.requests.clear()
    samples = runtime.run(evaluated(), 120)
    assert {sample.response for sample in samples} == {"9</s>?9</s>"}
    assert set(asked()) == {"e", "e9</s>?"}
    say(lambda text: "4</s>")
    [sample] = leaves(generate_rollout(runtime.args, 1, source).samples)
    assert sample.response == "1</s>?234</s>"
    assert runtime.semaphore._value == 2


def test_group_with_one_custom_sample_is_held_as_a_whole(engine, make_partial, prompts, say, write_plugin):
    say(lambda text: "12~" if text == "b" else when_holding(engine, 2))
    runtime = make_partial(custom_generate_function_path=None)
    source = prompts(["a", "b"], n=2)
    source.groups[1][0].generate_function_path = write_plugin(ONE_CALL, "one")
    output = generate_rollout(runtime.args, 0, source)
    assert (output.metrics["rollout/held_groups"], source.groups) == (1.0, [])
    say(lambda text: {"b12": "3</s>"}[text])
    output = generate_rollout(runtime.args, 1, source)
    assert [sample.response for sample in leaves(output.samples)] == ["123"] * 2


class JournalDouble:
    """Records the journal calls made during generation."""

    def __init__(self):
        self.progress, self.drops = [], []

    async def record_progress(self, sample):
        self.progress.append((sample.prompt, sample.response))

    def drop(self, groups):
        self.drops += [next(leaves(group)).prompt for group in groups]

    async def record(self, dispatched, produced):
        pass


JUDGES_C = """
from pathlib import Path
def f(args, samples):
    if samples[0].prompt == "c":
        Path({seen!r}).touch()
    return samples[0].prompt != "c"
"""


def test_journal_records_partial_progress_and_dropped_groups(
    engine, make_partial, prompts, say, write_plugin, tmp_path
):
    seen = tmp_path / "c was dropped"

    async def when_b_is_asked_and_c_dropped():
        while len(engine.requests) < 3 or not seen.exists():  # noqa: ASYNC110 - polls a file and a list
            await asyncio.sleep(0.005)
        return "7</s>"

    say(lambda text: when_b_is_asked_and_c_dropped() if text == "a" else {"b": "12~", "c": "1</s>"}[text])
    keeps = write_plugin(JUDGES_C.format(seen=str(seen)), "filter")
    runtime = make_partial(
        custom_generate_function_path=None, dynamic_sampling_filter_path=keeps, over_sampling_batch_size=3
    )
    runtime.journal = JournalDouble()
    generate_rollout(runtime.args, 0, prompts(["c", "b", "a"], n=1))
    assert runtime.journal.progress == [("b", "12")]
    assert runtime.journal.drops == ["c"]
    say(lambda text: {"a": "7</s>", "b": "12~"}[text])
    custom = make_partial(ONE_CALL)
    custom.journal = JournalDouble()
    generate_rollout(custom.args, 0, prompts(["a", "b"], n=1))
    assert custom.journal.progress == []


def test_closing_the_runtime_cancels_held_tasks_without_warnings(engine, make_partial, prompts, say, caplog, recwarn):
    say(abort_second_turns_of_b(engine, 2))
    runtime = make_partial()
    generate_rollout(runtime.args, 0, prompts(["a", "b"], n=2))
    [held] = runtime.state.held
    gc.collect()  # flush warnings about tasks that other tests left behind
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        runtime.close()
        task = held.task
        del held
        gc.collect()
    assert task.cancelled()
    assert caplog.records == []
    assert [str(warning.message) for warning in recwarn if "never" in str(warning.message)] == []


def test_failed_rollout_cancels_the_held_groups(engine, make_partial, prompts, say, write_plugin):
    say(lambda text: "1~" if text == "b" else "7</s>")
    runtime = make_partial(rollout_batch_size=2, over_sampling_batch_size=3)
    source = prompts(["a", "b", "c", "d"], n=2)
    for sample in source.groups[3]:
        sample.custom_rm_path = write_plugin("def f(args, sample):\n    return float('nan')\n", "nan")
    generate_rollout(runtime.args, 0, source)
    [held] = runtime.state.held
    say(lambda text: "1~" if text.startswith("b") else "7</s>")
    with pytest.raises(UserError, match="is nan"):
        generate_rollout(runtime.args, 1, source)
    assert held.task.cancelled()
    assert (runtime.state.held, runtime.state.pendings) == ([], set())
    assert runtime.run(_generate_tasks(), 120) == []


async def _generate_tasks():
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task() and "generate" in repr(task)]


def test_failing_sample_filter_cancels_newly_held_groups(engine, make_partial, prompts, say, write_plugin):
    say(abort_second_turns_of_b(engine, 2))
    fails = write_plugin("def f(args, groups):\n    raise ValueError('bad filter')\n", "filter")
    runtime = make_partial(rollout_sample_filter_path=fails)
    with pytest.raises(ValueError, match="bad filter"):
        generate_rollout(runtime.args, 0, prompts(["a", "b"], n=2))
    assert (runtime.state.held, runtime.state.pendings) == ([], set())
    assert runtime.run(_generate_tasks(), 120) == []


def test_user_error_in_a_held_group_is_logged_and_ends_the_next_rollout(
    engine, make_partial, prompts, say, write_plugin, caplog
):
    late = """
import asyncio
from slime.errors import UserError
from slime.rollout.sglang_rollout import generate
async def f(args, sample, sampling_params):
    if sample.prompt == "b":
        await args.carried["tool"].wait()
        raise UserError("no such tool")
    return await generate(args, sample, sampling_params)
"""
    say(lambda text: "7</s>")
    tool = asyncio.Event()
    runtime = make_partial(late, carried={"tool": tool})
    source = prompts(["a", "b"], n=1)
    generate_rollout(runtime.args, 0, source)
    [held] = runtime.state.held
    runtime.loop_thread.loop.call_soon_threadsafe(tool.set)

    async def ended():
        await asyncio.wait([held.task])
        await asyncio.sleep(0)

    with caplog.at_level(logging.ERROR):
        runtime.run(ended(), 120)
    assert "a group that waits for the next rollout failed: no such tool" in caplog.text
    with pytest.raises(UserError, match="no such tool"):
        generate_rollout(runtime.args, 1, source)


def test_post_resumes_a_request_that_the_engine_aborted(engine, make_partial, prompts, asked):
    answers = [{"text": "12", "finish": "abort"}, {"text": "", "finish": "abort"}, "3</s>", "7</s>"]
    engine.respond = lambda body: answers.pop(0)
    for partial in (True, False):
        answers[:] = [{"text": "12", "finish": "abort"}, {"text": "", "finish": "abort"}, "3</s>", "7</s>"]
        engine.requests.clear()
        runtime = make_partial(
            partial_rollout=partial, over_sampling_batch_size=1, custom_rm_path=None, rm_type="random"
        )
        [sample] = leaves(generate_rollout(runtime.args, 0, prompts(["x"], n=1)).samples)
        assert asked() == ["x", "x12", "x12", "x123</s>?"]
        assert (sample.response, sample.status) == ("123</s>?7</s>", STATUS.COMPLETED)
        runtime.close()


def test_aborted_batched_request_is_resent_and_its_tokens_counted(engine, make_partial, prompts, write_plugin):
    batched = """
from slime.utils.http_utils import post
async def f(args, sample, sampling_params):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    params = {**sampling_params, "n": 2}
    [answer, _] = await post(url, {"input_ids": [ord(sample.prompt) - 93], "sampling_params": params})
    sample.tokens, sample.response, sample.status = [1], answer["text"], sample.Status.COMPLETED
    return sample
"""
    from aiohttp import web

    def many(text, finish):
        one = {"text": text, "meta_info": {"finish_reason": {"type": finish}, "completion_tokens": len(text)}}
        return web.json_response([one, one])

    async def respond(body):
        if body["input_ids"] == [ord("b") - 93] and len(engine.aborts) == 0:
            await engine.held("")
            return many("123", "abort")
        if not engine.aborts:
            await when_holding(engine, 1)
        return many("7", "stop")

    engine.respond = respond
    runtime = make_partial(batched)
    source = prompts(["a", "b"], n=1)
    first = generate_rollout(runtime.args, 0, source)
    second = generate_rollout(runtime.args, 1, source)
    assert [sample.response for sample in leaves(second.samples)] == ["7"]
    assert first.metrics["rollout/thrown_away_tokens"] + second.metrics["rollout/thrown_away_tokens"] == 6.0


def test_groups_on_an_engine_that_ignores_aborts_return_to_the_source(
    engine, make_partial, prompts, monkeypatch, tokenizer
):
    monkeypatch.setattr("slime.rollout.inflight.ABORT_DEADLINE_S", 0.3)
    hung = []

    async def respond(body):
        if tokenizer.decode(body["input_ids"]) == "b" and not hung:
            hung.append(body)
            await asyncio.sleep(3600)
        return await engine.when(lambda: hung, "7</s>")

    engine.respond = respond
    runtime = make_partial(ONE_CALL)
    source = prompts(["a", "b"], n=1)
    output = generate_rollout(runtime.args, 0, source)
    assert (output.metrics["rollout/held_groups"], output.metrics["rollout/returned_groups"]) == (0.0, 1.0)
    [sample] = leaves(generate_rollout(runtime.args, 1, source).samples)
    assert (sample.prompt, sample.response) == ("b", "7")


def test_waiting_at_the_gate_releases_the_semaphore_slot():
    async def main():
        seats = asyncio.Semaphore(1)
        gate = Gate(seats)
        gate.close()

        async def seated():
            async with seats:
                return await gate.pass_through()

        waiting, cancelled = asyncio.create_task(seated()), asyncio.create_task(seated())
        await asyncio.sleep(0.01)
        assert not seats.locked()  # both wait, and a third task may acquire a slot
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        again = asyncio.create_task(seated())
        await asyncio.sleep(0.01)
        gate.open()
        assert await asyncio.gather(waiting, again) == [True, True]
        assert await seated() is False
        return seats._value

    assert asyncio.run(main()) == 1


def test_sample_deadline_pauses_while_waiting_at_the_gate():
    async def main():
        gate, clock = Gate(asyncio.Semaphore(1)), ClockAhead()
        gate.close()
        never = asyncio.Event()

        async def sample(is_slow):
            async with SampleClock(60).running("f"):
                await asyncio.gather(gate.pass_through(), gate.pass_through())
                if is_slow:
                    await never.wait()

        quick, slow = asyncio.create_task(sample(False)), asyncio.create_task(sample(True))
        await clock.put_forward(0)  # lets all four reach the gate
        await clock.put_forward(1000)
        gate.open()
        assert await quick is None
        assert not slow.done()
        await clock.put_forward(1000)
        with pytest.raises(SampleTimeout, match=r"^f did not end within 60 s \(--rollout-sample-timeout\)$"):
            await slow

    asyncio.run(main())


LATE_OWN_CLIENT = """
import aiohttp
from slime.rollout.sglang_rollout import generate
async def f(args, sample, sampling_params):
    if sample.prompt == "a" or sample.response_length:
        return await generate(args, sample, sampling_params)
    sample.tokens = args.carried["b"]
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    body = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        answer = await response.json()
    await args.carried["tool"].wait()
    log_probs, tokens, _ = zip(*answer["meta_info"]["output_token_logprobs"])
    sample.append_response_tokens(
        args, tokens=tokens, log_probs=log_probs, meta_info=answer["meta_info"], text=answer["text"]
    )
    return sample
"""


def test_late_aborted_sample_is_dispatched_again_in_the_next_rollout(
    engine, make_partial, prompts, say, asked, tokenizer, monkeypatch
):
    monkeypatch.setattr("slime.rollout.inflight.OWN_CLIENT_GRACE_S", 0.05)
    say(lambda text: "12~" if text == "b" else when_holding(engine, 1))
    tool = asyncio.Event()
    runtime = make_partial(LATE_OWN_CLIENT, carried={"b": tokenizer.encode("b"), "tool": tool})
    source = prompts(["a", "b"], n=1)
    generate_rollout(runtime.args, 0, source)
    [held] = runtime.state.held
    runtime.loop_thread.loop.call_soon_threadsafe(tool.set)
    runtime.run(asyncio.wait([held.task]), 120)
    engine.requests.clear()
    say(lambda text: {"b12": "3</s>"}[text])
    output = generate_rollout(runtime.args, 1, source)
    [sample] = leaves(output.samples)
    assert asked() == ["b12"]
    assert (sample.response, sample.status, sample.reward) == ("123", STATUS.COMPLETED, 1.0)
    assert output.metrics["rollout/thrown_away_tokens"] == 0.0
    assert source.asked == [2]
    assert runtime.state.remaining_batch_size == 0
