from __future__ import annotations

import io
import json
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from slime.data.journal import Journal
from slime.data.journal.command import samples_command
from slime.data.jsonable import sample_from_json
from slime.data.sample import Sample
from slime.errors import UserError
from tests.data.journal_samples import finish, finished, open_journal, prompts


def run(*words: str | os.PathLike[str]) -> str:
    console = Console(file=io.StringIO(), width=160)
    assert samples_command([str(word) for word in words], console) == 0
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def shown(output: str) -> list[str]:
    """The first cell of each line of the table."""
    return [line.split()[0] for line in output.splitlines()[1:-1]]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Groups 0 and 1 trained on, 2 in a batch, 3 finished, 4 cut off, 5 dropped, 6 handed out; still open."""
    journal = open_journal(tmp_path, keep=True)
    groups = [finished(journal, number) for number in range(4)]
    journal.assign(0, groups[:2], {})
    journal.consumed(0)
    groups[2][0].reward = {"score": 0.5}
    groups[2][0].status = Sample.Status.TRUNCATED
    groups[2][0].response = "[bold]several\n words[/bold] " + "x" * 100
    groups[2][0].weight_versions = ["3", "4", "5"]
    groups[2][1].reward = -2.0
    journal.assign(1, [groups[2]], {})
    partial = prompts(4)
    journal.hand_out([partial], {})
    journal.produced(partial[0], finish(partial[0], None))
    journal.drop([finished(journal, 5)])
    journal.hand_out([prompts(6)], {})
    return journal


TOTALS = "samples in the journal: 2 pending, 2 partial, 2 finished, 2 assigned, 4 consumed, 2 dropped"


def test_the_list_and_its_totals_while_the_run_is_going(journal: Journal) -> None:
    before = {file.name: file.read_bytes() for file in journal.path.parent.iterdir() if "-shm" not in file.name}
    output = run(journal.path.parent)
    assert shown(output) == [str(number) for number in range(14)]
    assert output.splitlines()[-1] == f"14 of 14 shown; {TOTALS}"
    header, first = output.splitlines()[:2]
    assert header.split() == [
        "index",
        "group",
        "state",
        "rollout",
        "status",
        "reward",
        "tokens",
        "versions",
        "response",
    ]
    assert first.split() == ["0", "0", "consumed", "0", "completed", "1", "3", "0", "abc"]
    truncated = output.splitlines()[5]
    assert truncated.split()[:7] == ["4", "2", "assigned", "1", "truncated", "3", "3..5"]
    assert "[bold]several words[/bold] xxx" in truncated
    assert run(journal.path) == output
    journal.consumed(1)  # the run goes on
    assert "6 consumed" in run(journal.path)
    assert before.keys() == {file.name for file in journal.path.parent.iterdir() if "-shm" not in file.name}


def test_a_finished_run_is_read_without_leaving_anything_behind(journal: Journal) -> None:
    journal.close()
    before = journal.path.read_bytes()
    assert shown(run(journal.path.parent, "--state", "finished")) == ["6", "7"]
    assert [file.name for file in journal.path.parent.iterdir()] == ["journal.sqlite"]
    assert journal.path.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "indices"),
    [
        (["--state", "consumed"], [0, 1, 2, 3]),
        (["--state", "pending"], [12, 13]),
        (["--rollout", "1"], [4, 5]),
        (["--rollout", "0", "--limit", "3"], [0, 1, 2]),
        (["--group", "3"], [6, 7]),
        (["--sample", "8"], [8]),
        (["--status", "truncated"], [4]),
        (["--status", "aborted"], [8]),
        (["--max-reward", "0.9"], [5]),
        (["--min-reward", "0.9", "--state", "dropped"], [10, 11]),
        (["--min-reward", "-3", "--max-reward", "-1"], [5]),
    ],
)
def test_filters(journal: Journal, words: list[str], indices: list[int]) -> None:
    output = run(journal.path, *words)
    assert shown(output) == [str(index) for index in indices]
    assert TOTALS in output


def test_nothing_found(journal: Journal) -> None:
    assert run(journal.path, "--sample", "99") == f"0 of 0 shown; {TOTALS}\n"


def test_whole_texts(journal: Journal) -> None:
    output = run(journal.path, "--sample", "4", "--full")
    assert "sample 4 of group 2: assigned rollout 1, truncated" in output
    assert "reward: {'score': 0.5}\n" in output
    assert "prompt: question 2\n" in output
    assert "response: [bold]several\n words[/bold] " + "x" * 100 + "\n" in output


def special() -> Sample:
    sample = Sample(
        index=77,
        group_index=9,
        prompt=[{"role": "user", "content": "é\ud800"}],
        label=[1, "two"],
        metadata={"raw": b"\x00\xff", "pair": (1, 2.5), "number": np.float32(0.5), 3: None},
        rollout_routed_experts=np.arange(6, dtype=np.int32).reshape(3, 2),
        tokens=[5, 6],
    )
    sample.append_response_tokens(tokens=[7, 8], log_probs=[-0.125, -1 / 3])
    sample.own_attribute = {"kept": True}  # type: ignore[attr-defined]
    return sample


def test_export_to_json_lines(journal: Journal, tmp_path: Path) -> None:
    journal.assign(2, [[special()]], {})
    path = tmp_path / "out.jsonl"
    assert run(journal.path, "--export", path) == f"15 samples written to {path}\n"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    by_index = {line["index"]: line for line in lines}
    assert sorted(by_index) == [*range(14), 77]
    assert [by_index[0][name] for name in ("state", "batch", "consumed_by", "tokens", "rollout_log_probs")] == [
        "consumed",
        0,
        0,
        [100, 101, 102],
        [-0.5] * 3,
    ]
    assert by_index[4]["reward"] == {"score": 0.5}
    last = by_index[77]
    assert last["rollout_log_probs"] == [-0.125, -1 / 3]
    assert last["metadata"] == {"raw": "AP8=", "pair": [1, 2.5], "number": 0.5, "3": None}
    assert last["own_attribute"] == {"kept": True}
    back = sample_from_json(
        {name: value for name, value in last.items() if name not in ("state", "batch", "consumed_by")}
    )
    assert back.prompt == [{"role": "user", "content": "é\ud800"}]
    assert np.array_equal(back.rollout_routed_experts, np.arange(6).reshape(3, 2))  # type: ignore[arg-type]
    assert set(Sample.__dataclass_fields__) < set(last)


def test_export_to_parquet(journal: Journal, tmp_path: Path) -> None:
    journal.assign(2, [[special()]], {})
    path = tmp_path / "out.parquet"
    run(journal.path, "--export", path, "--state", "assigned")
    rows = {row["index"]: row for row in pq.read_table(path).to_pylist()}
    assert sorted(rows) == [4, 5, 77]
    assert rows[77]["tokens"] == [5, 6, 7, 8]
    assert rows[77]["rollout_log_probs"] == [-0.125, -1 / 3]
    assert rows[77]["loss_mask"] == [1, 1]
    assert json.loads(rows[77]["label"]) == [1, "two"]
    assert json.loads(rows[77]["more"]) == {"own_attribute": {"kept": True}}
    assert json.loads(rows[5]["reward"]) == -2.0
    assert json.loads(rows[4]["reward"]) == {"score": 0.5}
    assert (rows[4]["status"], rows[4]["state"], rows[4]["batch"]) == ("truncated", "assigned", 1)
    assert rows[4]["response"].startswith("[bold]several\n")
    assert json.loads(rows[4]["weight_versions"]) == ["3", "4", "5"]


def test_mistakes_are_sentences(journal: Journal, tmp_path: Path) -> None:
    def told(*words: str | os.PathLike[str]) -> str:
        with pytest.raises(UserError) as error:
            run(*words)
        return str(error.value)

    empty = tmp_path / "empty"
    empty.mkdir()
    assert told(empty) == f"{empty}: has no journal.sqlite; give the folder of a run (its --output-dir)"
    assert "no such run folder" in told(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("hello, this is not a database")
    assert "notes.txt: is no readable journal" in told(tmp_path / "notes.txt")
    assert "invalid choice: 'done'" in told(journal.path, "--state", "done")
    assert "invalid int value" in told(journal.path, "--rollout", "x")
    assert "required: RUN" in told()
    assert told(journal.path, "--limit", "0") == "--limit 0: must be at least 1"
    assert "ends in .jsonl or .parquet" in told(journal.path, "--export", tmp_path / "a.csv")
    (tmp_path / "there.jsonl").write_text("mine")
    assert "there.jsonl: exists already" in told(journal.path, "--export", tmp_path / "there.jsonl")
    assert (tmp_path / "there.jsonl").read_text() == "mine"
