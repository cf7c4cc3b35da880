"""The standard tool loop runs the model's calls and sends the results until there is no call or a limit ends it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from slime.agent.messages import Message, ToolCall, messages_of
from slime.agent.tools import PythonInterpreter, ToolEnvironment, ToolFailure, ToolOutcome, run_with_tools
from slime.data.sample import Sample
from slime.errors import UserError
from tests.agent.scripted_engine import Turn

PARAMS = {"temperature": 1.0, "max_new_tokens": 400, "sampling_seed": 7, "stop": None, "stop_token_ids": None}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def sample_of(prompt: Any = "what is 12+34?", **fields: Any) -> Sample:
    return Sample(prompt=prompt, index=3, group_index=1, **fields)


async def add(a: int, b: int) -> int:
    return a + b


def test_calls_run_in_order_until_the_model_makes_none(play, agent_tokenizer, agent_runtime) -> None:
    turns = [
        Turn.of(agent_tokenizer, call("python", '{"code": "x = 6"}') + call("add", '{"a": 12, "b": 34}')),
        Turn.of(agent_tokenizer, call("python", '{"code": "x * 7"}') + call("fly", "{}")),
        Turn.of(agent_tokenizer, "46 and 42"),
    ]
    engine, url = play(turns)
    runtime = agent_runtime(url, max_turns=5)
    environment = ToolEnvironment([PythonInterpreter(spare=0, sandbox="subprocess", timeout_s=60), add])
    [sample] = runtime.run(run_with_tools(runtime.plugin_args, sample_of(), PARAMS, environment))
    prompts = [agent_tokenizer.decode(request.input_ids) for request in engine.requests]
    assert len(prompts) == 3
    assert '"name": "python"' in prompts[0]
    assert prompts[1].index("tool\n<|im_end|>") < prompts[1].index("tool\n46<|im_end|>")
    assert prompts[2].index("tool\n42<|im_end|>") < prompts[2].index("there is no tool 'fly'; there are: python, add")
    assert sample.status is Sample.Status.COMPLETED
    assert sample.metadata["answer"] == "46 and 42"
    assert sample.metadata["round_number"] == 3
    tools = dict(sample.metadata["tool_calls"])
    assert tools.pop("seconds") > 0
    assert tools == {"calls": 4, "ok": 3, "unknown_tool": 1}
    assert sum(sample.loss_mask) == sum(len(turn.ids) for turn in turns)


def test_attempt_at_its_turn_limit_is_truncated_without_an_answer(play, agent_tokenizer, agent_runtime) -> None:
    turns = [Turn.of(agent_tokenizer, "well" + call("add", '{"a": 1, "b": 2}')) for _ in range(3)]
    _, url = play(turns)
    runtime = agent_runtime(url, max_turns=2)
    [sample] = runtime.run(run_with_tools(runtime.plugin_args, sample_of(), PARAMS, ToolEnvironment([add])))
    assert sample.status is Sample.Status.TRUNCATED
    assert sample.metadata["answer"] == ""
    assert sample.metadata["round_number"] == 2
    assert sum(sample.loss_mask) == len(turns[0].ids) + len(turns[1].ids)


def test_outcome_that_fails_the_sample_is_not_sent_to_the_model(play, agent_tokenizer, agent_runtime) -> None:
    turns = [
        Turn.of(agent_tokenizer, call("python", '{"code": "import os; os._exit(3)"}')),
        Turn.of(agent_tokenizer, "x"),
    ]
    engine, url = play(turns)
    runtime = agent_runtime(url, max_turns=2)
    environment = ToolEnvironment(
        [PythonInterpreter(spare=0, sandbox="subprocess", timeout_s=60)], fails_sample=[ToolOutcome.CRASHED]
    )
    with pytest.raises(ToolFailure, match=r"tool python: crashed: Error: the interpreter died during the call"):
        runtime.run(run_with_tools(runtime.plugin_args, sample_of(), PARAMS, environment))
    assert len(engine.requests) == 1


def test_closing_the_runtime_closes_the_tools_once(play, agent_tokenizer, agent_runtime) -> None:
    _, url = play([Turn.of(agent_tokenizer, "nothing to do")])
    runtime = agent_runtime(url)
    closed: list[asyncio.AbstractEventLoop] = []

    class Watched(PythonInterpreter):
        async def aclose(self) -> None:
            closed.append(asyncio.get_running_loop())
            await super().aclose()

    environment = ToolEnvironment([Watched(spare=1)])
    runtime.run(run_with_tools(runtime.plugin_args, sample_of(), PARAMS, environment))
    runtime.run(run_with_tools(runtime.plugin_args, sample_of(), PARAMS, environment))
    assert not closed
    runtime.close()
    assert closed == [runtime.loop_thread.loop]


def test_rejects_a_rendered_prompt_unless_messages_are_given(play, agent_tokenizer, agent_runtime) -> None:
    _, url = play([Turn.of(agent_tokenizer, "x")])
    runtime = agent_runtime(url, apply_chat_template=True)
    with pytest.raises(UserError, match="--apply-chat-template renders every prompt to text"):
        runtime.run(run_with_tools(runtime.plugin_args, sample_of("<|im_start|>user"), PARAMS, ToolEnvironment([add])))
    given = [Message("user", "hello")]
    run = run_with_tools(runtime.plugin_args, sample_of("x"), PARAMS, ToolEnvironment([add]), messages=given)
    assert runtime.run(run)[0].metadata["answer"] == "x"


def test_prompts_are_converted_to_messages() -> None:
    assert messages_of("hello") == [Message("user", "hello")]
    function = {"name": "add", "arguments": {"a": 1}}
    given = [
        {"role": "developer", "content": "be brief"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "function": function}, {"function": function}],
        },
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ]
    calls = (ToolCall("c", "add", '{"a": 1}'), ToolCall("call_1_1", "add", '{"a": 1}'))
    assert messages_of(given) == [
        Message("system", "be brief"),
        Message("assistant", tool_calls=calls),
        Message("tool", "1", tool_call_id="c"),
    ]
    with pytest.raises(UserError, match="message 0 of a prompt has the role 'narrator'"):
        messages_of([{"role": "narrator", "content": "x"}])
    with pytest.raises(UserError, match=r"message 0 of a prompt has the content \[1\]; it must be text"):
        messages_of([{"role": "user", "content": [1]}])
