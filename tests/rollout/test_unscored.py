"""Complete responses without a reward: kept when a rollout ends, and recovered after a kill."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from slime.data.buffer import Journal
from slime.data.sample import Sample
from slime.rollout.outcomes import leaves
from slime.rollout.sample_pipeline import generate_and_rm_group
from slime.rollout.sglang_rollout import generate_rollout

STATUS = Sample.Status

SLOW = """
import asyncio
from slime.rollout import inflight
JUDGING = asyncio.Event()
async def f(args, sample):
    while "{slow}" in sample.prompt:
        sample.metadata["half"] = "written"
        JUDGING.set()
        if all(one.response for one in args.carried.get("awaited", ())):
            inflight.ABORT_DEADLINE_S = 0.0
        await asyncio.sleep(0.005)
    if "{slow}" != "no":
        await JUDGING.wait()
    return float(len(sample.response))
"""
"""Never scores the slow prompt, and scores the others only once that call runs.

The abort deadline is set to 0 when all awaited responses exist.
"""
FAN_OUT = """
from slime.rollout.sglang_rollout import generate
from slime.utils.types import Sample
async def f(args, sample, sampling_params):
    whole = await generate(args, sample, sampling_params)
    other = Sample(tokens=list(whole.tokens), response="other", response_length=1, loss_mask=[1],
                   rollout_log_probs=[-1.0], status=whole.status)
    return [whole, other]
"""


def journal_at(folder: Path) -> Journal:
    return Journal(folder / "journal.sqlite", {"model": "tiny"}, keep=False)


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.rollout.inflight.ABORT_DEADLINE_S", 120.0)
    monkeypatch.setattr("slime.rollout.sample_pipeline.UNSCORED_AFTER_S", 0.0)


@pytest.mark.parametrize("fan_out", [False, True])
def test_unscored_response_is_kept_and_later_scored_without_generation(
    engine: Any, make_runtime: Any, prompts: Any, write_plugin: Any, fan_out: bool
) -> None:
    flags = {"custom_generate_function_path": write_plugin(FAN_OUT, "fan")} if fan_out else {}
    runtime = make_runtime(
        [engine.url], over_sampling_batch_size=3, custom_rm_path=write_plugin(SLOW.format(slow="c")), **flags
    )
    source = prompts(["a", "b", "c"], n=1)
    first = generate_rollout(runtime.args, 0, source)
    assert [next(leaves(group)).prompt for group in first.samples] == ["a", "b"]
    assert first.metrics["rollout/thrown_away_tokens"] == 0.0
    [kept] = source.groups
    samples = list(leaves(kept))
    assert [sample.response for sample in samples] == (["7", "other"] if fan_out else ["7"])
    assert all(sample.status is STATUS.COMPLETED and sample.reward is None for sample in samples)
    assert all("half" not in sample.metadata for sample in samples)
    assert len(engine.requests) == 3
    runtime.run(_score_group(runtime, write_plugin(SLOW.format(slow="no"), "quick"), kept))
    assert [sample.reward for sample in samples] == ([1.0, 5.0] if fan_out else [1.0])
    assert len(engine.requests) == 3  # not generated again


async def _score_group(runtime: Any, path: str, group: Any) -> None:
    for sample in leaves(group):
        sample.custom_rm_path = path
    for member in group:
        await generate_and_rm_group(runtime, [member] if isinstance(member, Sample) else member, {}, False)


@pytest.mark.parametrize("partial", [False, True])
def test_incomplete_group_starts_over_without_partial_rollout(
    engine: Any, make_runtime: Any, prompts: Any, write_plugin: Any, tokenizer: Any, partial: bool
) -> None:
    first_of_c = True

    def respond(body: Any) -> Any:
        nonlocal first_of_c
        if tokenizer.decode(body["input_ids"]) != "c":
            return engine.when(lambda: engine.holding == 1, "7</s>")
        is_first, first_of_c = first_of_c, False
        return "7</s>" if is_first else engine.held("12")

    engine.respond = respond
    reward = write_plugin(SLOW.format(slow="c"))
    source = prompts(["a", "b", "c"], n=2)
    runtime = make_runtime(
        [engine.url],
        over_sampling_batch_size=3,
        partial_rollout=partial,
        custom_rm_path=reward,
        carried={"awaited": source.groups[2]},
    )
    metrics = generate_rollout(runtime.args, 0, source).metrics
    [kept] = source.groups
    found = sorted((sample.status.value, sample.response, sample.reward) for sample in kept)
    if partial:
        assert found == [("aborted", "12", None), ("completed", "7", None)]
    else:
        assert found == [("pending", "", None)] * 2
    assert metrics["rollout/thrown_away_tokens"] == (0.0 if partial else 4.0)


def test_resumed_run_scores_journaled_responses_without_generation(
    engine: Any, make_runtime: Any, prompts: Any, write_plugin: Any, tmp_path: Path
) -> None:
    runtime = make_runtime([engine.url], custom_rm_path=write_plugin(SLOW.format(slow="a")))
    journal = journal_at(tmp_path)
    journal.recover(0)
    runtime.journal = journal
    [group] = prompts(["a"], n=2).get_samples(1)
    journal.hand_out([group], None)

    async def until_generated() -> None:
        [task] = runtime.state.submit_generate_tasks([group])
        while _statuses(journal) != ["generated"] * 2:  # noqa: ASYNC110 - polls a file
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    copied = tmp_path / "killed"
    copied.mkdir()
    runtime.run(until_generated(), 120)
    for file in tmp_path.glob("journal.sqlite*"):
        if not file.name.endswith("-shm"):
            shutil.copy(file, copied)
    journal.close()
    assert len(engine.requests) == 2

    again = journal_at(copied)
    [found] = again.recover(0).groups
    assert [(sample.status, sample.reward, sample.response) for sample in found] == [(STATUS.COMPLETED, None, "7")] * 2
    assert [sample.tokens for sample in found] == [sample.tokens for sample in group]
    quick = make_runtime([engine.url], custom_rm_path=write_plugin(SLOW.format(slow="no"), "quick"))
    quick.journal = again
    again.hand_out([found], None)
    [scored] = quick.run(_dispatch_group(quick, found), 120)
    assert [sample.reward for sample in scored] == [1.0, 1.0]
    assert len(engine.requests) == 2  # not generated again
    assert _statuses(again) == ["completed"] * 2
    assert again.recover(0).groups == [scored]
    again.close()


@pytest.mark.parametrize("given_up", [False, True])
def test_when_recorded_callback_runs_after_the_journal_write(
    engine: Any, make_runtime: Any, prompts: Any, write_plugin: Any, tmp_path: Path, given_up: bool
) -> None:
    runtime = make_runtime([engine.url], custom_rm_path=write_plugin(SLOW.format(slow="no")))
    journal = journal_at(tmp_path)
    journal.recover(0)
    runtime.journal = journal
    [group] = prompts(["a"], n=2).get_samples(1)
    journal.hand_out([group], None)
    told: list[tuple[int | None, list[str]]] = []

    async def note(sample: Sample) -> None:
        told.append((sample.index, _statuses(journal)))

    runtime.when_recorded.append(note)
    runtime.state.aborted = given_up
    runtime.run(_dispatch_group(runtime, group), 120)
    assert {index for index, _ in told} == (set() if given_up else {sample.index for sample in group})
    assert all({"generated", "completed"} & set(statuses) for _, statuses in told)
    journal.close()


async def _dispatch_group(runtime: Any, group: Any) -> list[Any]:
    return await asyncio.gather(*runtime.state.submit_generate_tasks([group]))


def _statuses(journal: Journal) -> list[str]:
    with closing(sqlite3.connect(journal.path)) as connection:
        return [row[0] for row in connection.execute("SELECT status FROM samples ORDER BY id")]
