"""Real agent programs end to end, in sandboxes, with a scripted engine behind the real endpoints.

The tests of their task pass, and the samples hold exactly the tokens of the script.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.agent.harness import HarnessResult, make_harness, run_agent
from slime.agent.remote_session import open_session
from slime.agent.sandbox import Snapshot, make_sandbox
from slime.data.sample import Sample
from tests.agent.scripted_engine import Play, Script, Turn, log_prob
from tests.agents_cli.scripts import AGENTS, FILES, TEST, Agent, call, thought

PARAMS = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 8192, "stop": None, "stop_token_ids": None}
PROMPT = "The tests of calc.py fail. Find the bug and fix it."
BUDGET_S = 120


@dataclass(frozen=True)
class Attempt:
    """One session of one agent."""

    result: HarnessResult
    turns: int
    test: tuple[int, str, str]
    samples: list[Sample]


def attempt(runtime: Any, agent: Agent, folder: Path, *, prompt: str = PROMPT, **options: Any) -> Attempt:
    """Run an agent on the task in a sandbox that sees only its program and the endpoints."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    program = agent.harness.host_program()
    assert program is not None, f"{agent.harness.package.missing()}: make test-agents (or test-agents-all) does it"

    async def run() -> Attempt:
        sample = Sample(prompt=prompt, index=0, group_index=0)
        async with (
            open_session(runtime.plugin_args, sample, PARAMS, **options) as session,
            make_sandbox("local", files=Snapshot(folder), visible=program.folders) as sb,
        ):
            result = await run_agent(
                agent.harness,
                sb,
                workdir=sb.workdir,
                session_id=session.key,
                adapter_url=await sb.reach(session.url),
                time_budget_sec=BUDGET_S,
                prompt=prompt,
                model_label=session.model,
            )
            said = await session.turns()
            turns = sum(message.role == "assistant" for message in said)
            test = await sb.exec(TEST)
            samples = await session.finish(float(test[0] == 0), metadata={"harness": result.to_metadata()})
            return Attempt(result, turns, tuple(test), samples)

    return runtime.run(run())


def chosen_agents() -> list[str]:
    everything = os.environ.get("SLIME_AGENTS_ALL") == "1"
    return [name for name, agent in AGENTS.items() if everything or not agent.more]


def set_scripts(served, *scripts):
    """Set the engine's scripts, clear its records, and return the runtime."""
    engine, runtime = served
    engine.script = Script(engine.script.tokenizer, scripts)
    engine.requests.clear()
    engine.complaints.clear()
    return runtime


def make_turns(tokenizer, texts, first_seed=1) -> list[Turn]:
    """Turns whose tokens differ from the encoding of their text."""
    turns = [Turn.of(tokenizer, text, seed=seed) for seed, text in enumerate(texts, first_seed)]
    for text, turn in zip(texts, turns, strict=True):
        assert tokenizer.decode(turn.ids, skip_special_tokens=False) == f"{text}<|im_end|>"
    assert any(list(turn.ids[:-1]) != tokenizer.encode(text) for text, turn in zip(texts, turns, strict=True))
    return turns


def sampled_in(sample: Sample) -> list[int]:
    """Trained tokens of a sample."""
    mask = np.array(sample.loss_mask, dtype=bool)
    return np.array(sample.tokens[-sample.response_length :])[mask].tolist()


def check_tokens(sample: Sample, turns: list[Turn]) -> None:
    """Check that the trained tokens are exactly those of these turns, with the engine's log-probs."""
    mask = np.array(sample.loss_mask, dtype=bool)
    expected = [token for turn in turns for token in turn.ids]
    assert sampled_in(sample) == expected
    np.testing.assert_allclose(np.array(sample.rollout_log_probs)[mask], [log_prob(t) for t in expected], rtol=1e-6)


def check_special_text(sample: Sample, tokenizer: Any) -> None:
    """Check that control tokens printed by a tool are plain text in the prompt."""
    tokens, text = sample.tokens, tokenizer.decode(sample.tokens, skip_special_tokens=False)
    starts, ends = (tokens.count(tokenizer.convert_tokens_to_ids(mark)) for mark in ("<|im_start|>", "<|im_end|>"))
    escaped = text.replace("\\u003c", "<").replace("\\u003e", ">")  # mini-swe-agent escapes them
    assert "a<|im_start|>b</think>" in escaped
    assert text.count("<|im_start|>") == starts + text.count("a<|im_start|>b")
    assert starts == ends


@pytest.mark.parametrize("name", chosen_agents())
def test_agent_fixes_the_bug_and_samples_hold_the_scripted_tokens(served, tokenizer, tmp_path, name):
    agent = AGENTS[name]
    turns = make_turns(tokenizer, agent.turns())
    done = attempt(set_scripts(served, turns), agent, tmp_path)
    engine, _ = served
    assert engine.complaints == []
    assert (done.result.outcome, done.result.exit_code) == ("finished", 0), done.result
    assert done.result.version[0].isdigit()
    assert done.test[:2] == (0, "the tests pass\n")
    assert "+    return a + b" in done.result.diff
    assert done.turns == 4
    [sample] = done.samples
    check_tokens(sample, turns)
    counters = sample.metadata["session"]
    assert {key: counters[key] for key in ("turns", "extended", "forked", "refused", "abandoned")} == {
        "turns": 4, "extended": 4, "forked": 0, "refused": 0, "abandoned": 0,
    }  # fmt: skip
    assert counters["retokenised_tokens"] == 0
    assert counters["trained_tokens"] == counters["sampled_tokens"] == sum(len(turn.ids) for turn in turns)
    assert sample.metadata["harness"]["version"] == done.result.version
    assert sample.reward == 1.0
    check_special_text(sample, tokenizer)


@pytest.mark.parametrize("name", chosen_agents())
def test_turn_limit_ends_the_session_without_a_timeout(served, tokenizer, tmp_path, name):
    agent = AGENTS[name]
    turns = make_turns(tokenizer, agent.turns())
    done = attempt(set_scripts(served, turns), agent, tmp_path, max_turns=2)
    assert done.result.outcome != "timeout", done.result
    assert done.turns == 2
    [sample] = done.samples
    check_tokens(sample, turns[:2])
    done.result.check(done.turns)


def test_claude_code_sub_agents_become_separate_samples(served, tokenizer, tmp_path):
    agent = Agent(make_harness("claude_code", tools=("Bash", "Agent")), AGENTS["claude_code"].shell)
    task = call("Agent", description="look", prompt="SUBTASK: list the files", subagent_type="general-purpose")
    main = make_turns(
        tokenizer, [thought("Somebody else shall look.") + task, "The tests were not touched.", "All done."]
    )
    sub = make_turns(tokenizer, [agent.shell("ls"), "There are two files in this folder."], first_seed=7)
    done = attempt(set_scripts(served, main, Play(sub, mark="SUBTASK")), agent, tmp_path)
    engine, _ = served
    assert engine.complaints == []
    assert done.result.outcome == "finished", done.result
    of_main, of_sub = ([token for turn in turns for token in turn.ids] for turns in (main[:2], sub))
    assert sorted(map(sampled_in, done.samples)) == sorted([of_main, of_sub])
    assert len({sample.rollout_id for sample in done.samples}) == 1
    assert done.samples[0].metadata["session"]["retokenised_tokens"] == 0
