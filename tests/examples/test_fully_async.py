"""examples/fully_async: notes, the impatient pupil, read delays, the tool, and learning while weights change."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from slime.agent.tools import ToolOutcome
from slime.config.plugins import load_function
from tests.examples.conftest import EXAMPLES, Ran

HERE = EXAMPLES / "fully_async"


def load(name: str, file: str = "task.py") -> Any:
    return load_function(f"{HERE / file}:{name}", what=name)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_chain_leads_through_notes_to_a_value() -> None:
    chain = load("chains").__globals__["Chain"](("47", "08", "15"), "42")
    assert chain.contents() == {"47": "see 08", "08": "see 15", "15": "=42"}
    source = load("chains")(random.Random(1))
    drawn = [next(source) for _ in range(500)]
    assert len(set(drawn)) == 500
    assert {len(chain.notes) for chain in drawn} == {2, 3}
    assert all(len({*chain.notes, chain.value}) == len(chain.notes) + 1 for chain in drawn), "no number twice in a task"


def test_pupil_follows_notes_but_often_stops_early(tmp_path: Path) -> None:
    files, shown = load("write_files")(tmp_path, demonstrations=600, training=10, held_out=5, seed=3)
    assert rows(files.demonstrations) == shown
    early = 0
    for row in shown:
        question, *said, last = row["messages"]
        at = question["content"]
        for call, told in zip(said[::2], said[1::2], strict=True):
            assert call["tool_calls"][0]["function"] == {"name": "read", "arguments": {"note": at}}
            at = told["content"].removeprefix("see ").removeprefix("=")
        assert last["content"] == at
        early += said[-1]["content"].startswith("see ")
    assert 0.55 < early / len(shown) < 0.75  # two chances to stop early in a chain of three


def test_tasks_contain_their_notes_and_read_delay(tmp_path: Path) -> None:
    files, _ = load("write_files")(tmp_path, demonstrations=10, training=400, held_out=50, seed=3)
    training, held_out = rows(files.training), rows(files.held_out)
    assert (len(training), len(held_out)) == (400, 50)
    for row in training + held_out:
        at = row["prompt"][0]["content"]
        while (text := row["metadata"]["notes"][at]).startswith("see "):
            at = text.removeprefix("see ")
        assert text == "=" + row["label"]
    seconds = sorted(row["metadata"]["read_s"] for row in training)
    assert seconds[0] >= 0.05
    assert seconds[-1] == 2.0
    assert seconds[200] < 0.2
    assert 0.04 < sum(one > 1 for one in seconds) / len(seconds) < 0.15
    assert {row["metadata"]["read_s"] for row in held_out} == {0.0}


def test_tool_reads_only_the_notes_of_its_task() -> None:
    environment = load("generate", "generate.py").__globals__["environment"]
    sample = SimpleNamespace(metadata={"notes": {"47": "see 08"}, "read_s": 0.0})

    async def calls() -> list[tuple[ToolOutcome, str]]:
        async with environment.open(sample) as box:
            results = [await box.call("read", {"note": note}) for note in ("47", "08")]
            return [(result.outcome, result.text) for result in results]

    assert asyncio.run(calls()) == [(ToolOutcome.OK, "see 08"), (ToolOutcome.ERROR, "Error: no note 08")]


def test_reward_compares_the_final_answer() -> None:
    right_answer = load("right_answer")
    assert right_answer(None, SimpleNamespace(metadata={"answer": " 42\n"}, label="42")) == 1.0
    assert right_answer(None, SimpleNamespace(metadata={"answer": "=42"}, label="42")) == 0.0
    assert right_answer(None, SimpleNamespace(metadata={}, label="42")) == 0.0


def figures(**changed: float) -> Any:
    kind = load_function(f"{EXAMPLES / 'side_by_side.py'}:Figures", what="Figures")
    return kind(*[0.0] * 7, before=0.1, after=0.95)._replace(**changed)


@pytest.mark.parametrize(
    ("one", "code", "said"),
    [
        (figures(oldest=3, samples_per_s=40.0), 0, "It learned to read on: 95.0% of the held-out tasks"),
        (figures(oldest=4), 1, "a sample that was 4 versions behind, and 3 are allowed"),
        (figures(after=0.3), 1, "full did not learn enough (50% is expected): 30.0% of the held-out tasks"),
    ],
)
def test_verdict_checks_learning_and_the_staleness_bound(
    one: Any, code: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "task", ModuleType("task"))  # several examples have a module "task"
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert load("verdict", "run.py")({"full": one}, 3) == code
    assert said in capsys.readouterr().out


@pytest.mark.examples
@pytest.mark.timeout(1800)
def test_agent_learns_while_weights_change_during_sessions(run_example: Callable[..., Ran]) -> None:
    ran = run_example("fully_async/run.py", "--modes", "full", "--warm-up-steps", "100", "--steps", "10")
    before, after = ran.series("eval/held-out", "full")
    assert after > before + 0.15, (before, after)
    assert max(ran.series("rollout/staleness/max", "full")) <= 3
    assert sum(ran.series("rollout/mixed_version_frac", "full")) > 0, "weights changed under open sessions"
    assert not any(ran.series("agent/retokenised_tokens", "full"))
    assert not any(ran.series("rollout/thrown_away_tokens", "full"))
    assert sum(ran.series("agent/tool_calls", "full")) > 10 * 128
    assert (ran.folder / "modes.png").stat().st_size < 60_000
