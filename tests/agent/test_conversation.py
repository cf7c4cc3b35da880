"""Conversations in the driver: exactly the tokens that were sampled in each turn are trained on."""

import asyncio

import numpy as np
import pytest

from slime.agent.conversation import converse
from slime.agent.messages import Message
from slime.agent.session.limits import LimitReached
from slime.data.sample import Sample
from slime.rollout.outcomes import GivenUp
from slime.rollout.sample_pipeline import generate_and_rm
from tests.agent.scripted_engine import Turn, log_prob

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 12}}</tool_call>'
PARAMS = {"temperature": 1.0, "max_new_tokens": 400, "sampling_seed": 7, "stop": None, "stop_token_ids": None}


def sample_of(prompt="what is 12+34?", **fields):
    return Sample(prompt=prompt, index=3, group_index=1, **fields)


async def two_turns(args, sample, params, **options):
    async with converse(args, sample, params, tools=[TOOL], **options) as talk:
        reply = await talk.ask([Message("user", sample.prompt)])
        assert [(call.name, call.arguments) for call in reply.tool_calls] == [("add", '{"a": 12}')]
        assert reply.content == "the sum:"
        assert talk.last_turn.finish_reason == "tool_calls"
        answer = await talk.ask([Message("tool", "46", tool_call_id=reply.tool_calls[0].id)])
        assert answer.content == "the answer is 46"
        return talk.finish(reward=1.0, metadata={"task": 1})


def test_samples_have_the_tokens_that_the_engine_saw_and_sampled(play, agent_tokenizer, agent_runtime):
    turns = [
        Turn.of(agent_tokenizer, f"the sum:{CALL}", seed=1),
        Turn.of(agent_tokenizer, "the answer is 46", seed=2),
    ]
    engine, url = play(turns)
    runtime = agent_runtime(url)
    [sample] = runtime.run(two_turns(runtime.plugin_args, sample_of(), PARAMS))
    first, second = engine.requests
    assert sample.tokens == [*second.input_ids.tolist(), *turns[1].ids]
    assert second.input_ids[: len(first.input_ids)].tolist() == first.input_ids.tolist()
    sampled = np.array(sample.loss_mask, dtype=bool)
    response = np.array(sample.tokens[-sample.response_length :])
    assert response[sampled].tolist() == [*turns[0].ids, *turns[1].ids]
    expected = np.float32([log_prob(token) for token in response[sampled]])
    np.testing.assert_array_equal(np.float32(sample.rollout_log_probs)[sampled], expected)
    assert (sample.status, sample.reward, sample.index) == (Sample.Status.COMPLETED, 1.0, 3)
    assert sample.metadata["session"]["retokenised_tokens"] == 0
    assert sample.metadata["task"] == 1
    assert second.params["stop_token_ids"] == [agent_tokenizer.eos_token_id]


def test_conversation_ends_at_its_turn_limit(play, agent_tokenizer, agent_runtime):
    _, url = play([Turn.of(agent_tokenizer, f"the sum:{CALL}"), Turn.of(agent_tokenizer, "the answer is 46")])
    runtime = agent_runtime(url, max_turns=1)
    with pytest.raises(LimitReached, match="has reached its limit of 1 turns"):
        runtime.run(two_turns(runtime.plugin_args, sample_of(), PARAMS))
    [sample] = runtime.run(two_turns(runtime.plugin_args, sample_of(), PARAMS, max_turns=2))
    assert sample.status is Sample.Status.COMPLETED


def test_conversation_of_a_given_up_rollout_starts_over(play, agent_tokenizer, agent_runtime, tmp_path):
    engine, url = play([Turn.of(agent_tokenizer, "the answer is 46", hold_after=3)])
    (tmp_path / "plugin.py").write_text(
        "from slime.agent.conversation import converse\n"
        "from slime.agent.messages import Message\n"
        "async def f(args, sample, sampling_params):\n"
        "    async with converse(args, sample, sampling_params) as talk:\n"
        "        await talk.ask([Message('user', sample.prompt)])\n"
        "        return talk.finish(1.0)\n"
    )
    runtime = agent_runtime(url, custom_generate_function_path=f"{tmp_path}/plugin.py:f")

    async def cut_off():
        asking = asyncio.ensure_future(generate_and_rm(runtime, sample_of(), dict(PARAMS)))
        await asyncio.to_thread(engine.holding.wait)
        runtime.state.aborted = True
        await runtime.pool.broadcast("abort", abort_all=True)
        return await asking

    sample = runtime.run(cut_off())
    assert (sample.status, sample.response_length, sample.failure) == (Sample.Status.ABORTED, 0, None)
    runtime.state.aborted = False
    finished = runtime.run(generate_and_rm(runtime, sample, dict(PARAMS)))
    assert [one.status for one in finished] == [Sample.Status.COMPLETED]


def test_given_up_turn_is_counted_as_abandoned(play, agent_tokenizer, agent_runtime):
    engine, url = play([Turn.of(agent_tokenizer, "the answer is 46", hold_after=3)])
    runtime = agent_runtime(url)

    async def cut_off():
        async with converse(runtime.plugin_args, sample_of(), PARAMS) as talk:
            heard = []

            async def on_event(event):
                heard.append(event)

            asking = asyncio.ensure_future(talk.ask([Message("user", "hm?")], on_event=on_event))
            await asyncio.to_thread(engine.holding.wait)
            runtime.state.aborted = True
            await runtime.pool.broadcast("abort", abort_all=True)
            with pytest.raises(GivenUp):
                await asking
            return talk.session.counters, heard

    counters, heard = runtime.run(cut_off())
    assert (counters.turns, counters.abandoned, counters.abandoned_tokens) == (0, 1, 3)
    assert heard
