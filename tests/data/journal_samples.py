"""Helpers that create samples, groups and a journal for the journal tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime.data.buffer import Journal
from slime.data.sample import Sample

IDENTITY = {"model": "tiny", "prompt data": "sums.jsonl, 10 bytes"}


def open_journal(folder: Path, *, keep: bool = False, keep_bytes: int = 0, **changes: str) -> Journal:
    return Journal(folder / "journal.sqlite", {**IDENTITY, **changes}, keep=keep, keep_bytes=keep_bytes)


def prompts(group_index: int, count: int = 2) -> list[Any]:
    """Create a group as a data source hands it out."""
    return [
        Sample(group_index=group_index, index=group_index * count + place, prompt=f"question {group_index}")
        for place in range(count)
    ]


def finish(sample: Sample, reward: float | None = 1.0, *, tokens: int = 3, version: str = "0") -> Sample:
    """Append a response to a sample, in place."""
    status = Sample.Status.COMPLETED if reward is not None else Sample.Status.ABORTED
    sample.tokens = sample.tokens or [9]
    sample.append_response_tokens(
        tokens=range(100, 100 + tokens),
        log_probs=[-0.5] * tokens,
        text="abc",
        meta_info={"finish_reason": {"type": "stop" if reward is not None else "abort"}, "weight_version": version},
    )
    sample.reward = reward
    assert sample.status is status
    return sample


def finished(journal: Journal, group_index: int, count: int = 2) -> list[Any]:
    """Create a group that was handed out and finished."""
    group = prompts(group_index, count)
    journal.hand_out([group], {"offset": group_index + 1})
    for sample in group:
        journal.produced(sample, finish(sample))
    return group


@contextmanager
def statements(journal: Journal) -> Iterator[list[str]]:
    """Collect the verbs of the statements that change rows of `samples`, in order."""
    seen: list[str] = []

    def note(statement: str) -> None:
        words = " ".join(statement.split()[:5])
        if words.startswith(("INSERT OR REPLACE INTO samples", "UPDATE samples SET", "DELETE FROM samples")):
            seen.append(words.split()[0])

    with journal._database.reading() as connection:
        connection.set_trace_callback(note)
        try:
            yield seen
        finally:
            connection.set_trace_callback(None)
