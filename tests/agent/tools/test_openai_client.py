"""The OpenAI client of the examples: attempts of an agent on the official SDK become samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.agent.tools import PythonInterpreter, ToolEnvironment
from slime.config.plugins import load_function
from slime.data.sample import Sample
from tests.agent.scripted_engine import Turn

pytestmark = pytest.mark.processes

FILE = Path(__file__).resolve().parents[3] / "examples/openai_client.py"
PARAMS = {"temperature": 1.0, "max_new_tokens": 400, "sampling_seed": 7, "stop": None, "stop_token_ids": None}


def call(code: str) -> str:
    return f'<tool_call>{{"name": "python", "arguments": {{"code": "{code}"}}}}</tool_call>'


def attempt(runtime: Any) -> Sample:
    run_as_client = load_function(f"{FILE}:run_as_client", what="run_as_client")
    environment = ToolEnvironment([PythonInterpreter(spare=0, sandbox="subprocess", timeout_s=60)])
    sample = Sample(prompt=[{"role": "user", "content": "6*7+1"}], index=3, group_index=1)
    [made] = runtime.run(run_as_client(runtime.plugin_args, sample, PARAMS, environment))
    return made


def test_client_with_tools_becomes_a_completed_sample(play, agent_tokenizer, agent_runtime) -> None:
    turns = [Turn.of(agent_tokenizer, text) for text in (call("6*7"), call("_+1"), "43")]
    engine, url = play(turns)
    sample = attempt(agent_runtime(url, max_turns=4))
    assert "tool\n43<|im_end|>" in agent_tokenizer.decode(engine.requests[2].input_ids)
    assert sample.metadata["answer"] == "43"
    assert sample.metadata["tool_calls"]["ok"] == 2
    assert sample.metadata["session"]["retokenised_tokens"] == 0
    assert sum(sample.loss_mask) == sum(len(turn.ids) for turn in turns)
    assert sample.status is Sample.Status.COMPLETED


def test_client_at_its_turn_limit_becomes_a_truncated_sample(play, agent_tokenizer, agent_runtime) -> None:
    _, url = play([Turn.of(agent_tokenizer, call("1")) for _ in range(3)])
    sample = attempt(agent_runtime(url, max_turns=2))
    assert sample.metadata["answer"] == ""
    assert sample.status is Sample.Status.TRUNCATED
