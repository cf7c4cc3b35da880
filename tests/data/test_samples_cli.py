from __future__ import annotations

import io
import json
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from tokenizers import Tokenizer

from slime.data.buffer import Journal
from slime.data.buffer.samples_cli import samples_command, shared_ends
from slime.data.buffer.show_sample import MASKED, OBSERVED, TRAINED, TokenSpan, response_spans
from slime.data.json_samples import sample_from_json
from slime.data.sample import Sample
from slime.errors import UserError
from tests.data.journal_samples import finish, finished, open_journal, prompts


def run(*words: str | os.PathLike[str], width: int = 160, terminal: bool = False) -> str:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=terminal, color_system="truecolor" if terminal else None
    )
    assert samples_command([str(word) for word in words], console) == 0
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def shown(output: str) -> list[str]:
    """Return the first cell of each line of the table."""
    return [line.split()[0] for line in output.splitlines()[1:-1]]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Open journal: groups 0 and 1 consumed, 2 assigned, 3 finished, 4 partial, 5 dropped, 6 pending."""
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


def test_lists_samples_and_totals_during_a_run(journal: Journal) -> None:
    before = {file.name: file.read_bytes() for file in journal.path.parent.iterdir() if "-shm" not in file.name}
    output = run(journal.path.parent)
    assert shown(output) == [str(number) for number in range(14)]
    assert output.splitlines()[-1] == f"14 of 14 shown; {TOTALS}"
    header, first = output.splitlines()[:2]
    assert header.split() == [
        *("index", "group", "state", "rollout", "status", "reward", "tokens", "weights", "prompt", "response"),
    ]
    assert first.split() == [*("0", "0", "consumed", "0", "completed", "1", "3", "0", "question", "0", "abc")]
    truncated = output.splitlines()[5]
    assert truncated.split()[:7] == ["4", "2", "assigned", "1", "truncated", "3", "3..5"]
    assert "[bold]several words[/bold] xxx" in truncated
    assert run(journal.path) == output
    journal.consumed(1)  # the run continues
    assert "6 consumed" in run(journal.path)
    assert before.keys() == {file.name for file in journal.path.parent.iterdir() if "-shm" not in file.name}


def test_task_column_is_shown_for_samples_with_a_task(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    group = prompts(0)
    for sample in group:
        sample.task = "sums"
    journal.hand_out([group], {})
    header, first = run(journal.path).splitlines()[:2]
    assert header.split()[:5] == ["index", "group", "state", "rollout", "task"]
    assert first.split()[:4] == ["0", "0", "pending", "sums"]
    assert "sums" in run(journal.path, "--sample", "0", "--full")
    journal.close()


def test_reading_a_finished_run_leaves_its_files_unchanged(journal: Journal) -> None:
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
def test_filters_select_samples(journal: Journal, words: list[str], indices: list[int]) -> None:
    output = run(journal.path, *words)
    assert shown(output) == [str(index) for index in indices]
    assert TOTALS in output


def test_no_match_prints_only_the_totals(journal: Journal) -> None:
    assert run(journal.path, "--sample", "99") == f"0 of 0 shown; {TOTALS}\n"


def test_full_prints_whole_texts(journal: Journal) -> None:
    output = run(journal.path, "--sample", "4", "--full")
    assert "sample 4 of group 2: assigned rollout 1, truncated" in output
    assert "reward: {'score': 0.5}\n" in output
    assert "prompt: question 2\n" in output
    assert "special tokens and spans are not marked: the model of the run is not found" in output
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
        [9, 100, 101, 102],
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


def test_usage_errors_are_reported(journal: Journal, tmp_path: Path) -> None:
    def told(*words: str | os.PathLike[str]) -> str:
        with pytest.raises(UserError) as error:
            run(*words)
        return str(error.value)

    empty = tmp_path / "empty"
    empty.mkdir()
    assert told(empty) == f"{empty}: has no journal.sqlite; give the folder of a run (its --output-dir)"
    assert "no such run folder" in told(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("hello, this is not a database")
    assert "notes.txt: not a readable journal" in told(tmp_path / "notes.txt")
    assert "invalid choice: 'done'" in told(journal.path, "--state", "done")
    assert "invalid int value" in told(journal.path, "--rollout", "x")
    assert "required: RUN" in told()
    assert told(journal.path, "--limit", "0") == "--limit 0: must be at least 1"
    assert told(journal.path, "1", "--sample", "2") == "--sample 2: sample 1 is named already, drop one of them"
    assert told(journal.path, "--descending") == "--descending: has no effect without --sort"
    assert "with --eval give --step or --dataset" in told(journal.path, "--eval", "--rollout", "2")
    assert "ends in .jsonl or .parquet" in told(journal.path, "--export", tmp_path / "a.csv")
    (tmp_path / "there.jsonl").write_text("mine")
    assert "there.jsonl: exists already" in told(journal.path, "--export", tmp_path / "there.jsonl")
    assert (tmp_path / "there.jsonl").read_text() == "mine"


# order


@pytest.mark.parametrize(
    ("words", "indices"),
    [
        (["--sort", "reward"], [5, 0, 1, 2, 3, 6, 7, 10, 11, 4, 8, 9, 12, 13]),
        (["--sort", "reward", "--descending", "--limit", "9"], [0, 1, 2, 3, 6, 7, 10, 11, 5]),
        (["--sort", "length", "--limit", "4"], [9, 12, 13, 0]),
        (["--sort", "index", "--descending", "--limit", "2"], [13, 12]),
        (["--sort", "rollout", "--descending", "--limit", "3"], [4, 5, 0]),
        (["--sort", "status", "--descending", "--limit", "1"], [4]),
        (["--sort", "version", "--descending", "--limit", "2"], [4, 0]),
    ],
)
def test_sorts_samples_and_puts_missing_values_last(journal: Journal, words: list[str], indices: list[int]) -> None:
    assert shown(run(journal.path, *words)) == [str(index) for index in indices]


# width


def chat(question: str) -> str:
    return f"<|system|>\nYou are a calculator with a long introduction.\n<|user|>\n{question}<|end|>\n<|assistant|>\n"


def answer(number: int, question: str, response: str, label: str | None = None) -> Sample:
    sample = finish(Sample(index=number, group_index=number, prompt=question, label=label))
    sample.response = response
    return sample


@pytest.mark.parametrize("width", [80, 100, 200])
def test_no_line_is_wider_than_the_terminal(tmp_path: Path, width: int) -> None:
    journal = open_journal(tmp_path)
    samples = [
        answer(9990 + n, chat(f"what is {n} + {n}? " + "数" * 30), f"{'x' * 300} \x1b[31m", "label " * 20)
        for n in (1, 2)
    ]
    samples[0].weight_versions = ["100", "120"]
    journal.assign(1200, [[sample] for sample in samples], {})
    output = run(journal.path, width=width, terminal=True)
    lines = output.splitlines()[:-1]
    assert all(cell_len(Text.from_ansi(line).plain.rstrip()) <= width for line in lines)
    header, first, second = (Text.from_ansi(line).plain for line in lines)
    narrow = "# roll status reward tok ver label prompt response"
    wide = "index group state rollout status reward tokens weights label prompt response"
    assert " ".join(header.split()) == (wide if width == 200 else narrow)
    assert "100..120" in first
    assert "what is 1" in first  # without the system prompt
    assert "what is 2" in second
    assert "xxx" in first
    assert "calculator" not in output
    assert "\x1b[31m" not in output


def test_texts_that_fit_the_width_are_not_truncated(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    journal.assign(0, [[answer(0, "ping", "y" * 40)], [answer(1, "pong", "short")]], {})
    lines = run(journal.path, width=100).splitlines()
    assert lines[1].split()[-2:] == ["ping", "y" * 40]
    assert lines[2].split()[-2:] == ["pong", "short"]
    assert lines[0].split()[0] == "#"
    assert run(journal.path, width=125).split()[0] == "index"  # long headings fit next to the whole texts


@pytest.mark.parametrize(
    ("prompts", "ends"),
    [
        ([chat("3+4?"), chat("3+5?")], (chat("").split("<|end|>")[0], "<|end|>\n<|assistant|>\n")),
        (["what is 1?", "what is 2?"], ("", "")),
        (["same\nthing"], ("", "")),
        (["<a>", "<a>x<a>"], ("<a>", "")),
        ([], ("", "")),
    ],
)
def test_shared_ends_of_prompts_are_found(prompts: list[str], ends: tuple[str, str]) -> None:
    assert shared_ends(prompts) == ends


def test_message_prompt_shows_the_last_user_message(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]
    journal.assign(0, [[finish(Sample(index=0, prompt=messages))]], {})
    assert run(journal.path).splitlines()[1].split()[-2:] == ["why?", "abc"]


def test_output_without_a_terminal_is_160_columns_wide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    journal = open_journal(tmp_path)
    journal.assign(0, [[answer(0, "q", "z" * 500)]], {})
    samples_command([str(journal.path)])
    assert len(capsys.readouterr().out.splitlines()[1].rstrip()) == 160
    monkeypatch.setenv("COLUMNS", "80")
    samples_command([str(journal.path)])
    assert len(capsys.readouterr().out.splitlines()[1].rstrip()) == 80


# evaluations


@pytest.fixture
def evaluated(tmp_path: Path) -> Journal:
    journal = open_journal(tmp_path, keep_bytes=10**9)
    for step in (0, 5):
        sums = [answer(number, f"{number}+1?", f"it is {number + step}", "7") for number in range(3)]
        sums[1].reward = 0.0
        journal.keep_evaluation(step, {"sums": sums, "words": [answer(0, "a word", "tree")]})
    return journal


@pytest.mark.parametrize(
    ("words", "cells"),
    [
        (
            ["--eval"],
            ["0 0 sums", "1 0 sums", "2 0 sums", "0 0 words", "0 5 sums", "1 5 sums", "2 5 sums", "0 5 words"],
        ),
        (["--step", "5", "--sort", "reward", "--limit", "2"], ["1 5 sums", "0 5 sums"]),
        (["--eval", "--dataset", "words", "--sort", "rollout", "--descending"], ["0 5 words", "0 0 words"]),
        (["--eval", "--max-reward", "0.5", "--status", "completed"], ["1 0 sums", "1 5 sums"]),
        (["--eval", "--sample", "2", "--step", "0"], ["2 0 sums"]),
    ],
)
def test_evaluation_samples_are_listed_and_filtered(evaluated: Journal, words: list[str], cells: list[str]) -> None:
    output = run(evaluated.path, *words)
    header, *lines, last = output.splitlines()
    assert header.split()[:4] == ["index", "step", "dataset", "status"]
    assert [" ".join(line.split()[:3]) for line in lines] == cells
    assert last.endswith("evaluations in the journal: sums at 2 steps from 0 to 5, words at 2 steps from 0 to 5")
    assert all(len(line) <= 80 for line in run(evaluated.path, *words, width=80).splitlines()[:-1])


def test_evaluation_samples_are_shown_in_full_and_exported(evaluated: Journal, tmp_path: Path) -> None:
    output = run(evaluated.path, "2", "--step", "5")
    assert "sample 2 of sums: evaluation at step 5, completed" in output
    assert "prompt: 2+1?\nresponse: it is 7\n" in output
    run(evaluated.path, "--eval", "--export", tmp_path / "e.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "e.jsonl").read_text().splitlines()]
    assert [(row["step"], row["dataset"], row["index"]) for row in rows[3:5]] == [(0, "words", 0), (5, "sums", 0)]
    assert "state" not in rows[0]
    run(evaluated.path, "--eval", "--export", tmp_path / "e.parquet")
    table = pq.read_table(tmp_path / "e.parquet").to_pylist()
    assert [(row["step"], row["dataset"], row["tokens"]) for row in table[:1]] == [(0, "sums", [9, 100, 101, 102])]
    run(evaluated.path, "--eval", "--step", "9", "--export", tmp_path / "none.parquet")
    assert pq.read_table(tmp_path / "none.parquet").num_rows == 0


def test_journal_without_evaluations_reports_none(journal: Journal) -> None:
    with journal._database.reading() as connection:
        connection.executescript("DROP VIEW evaluated; DROP TABLE evaluated_samples; DROP TABLE evaluations;")
    assert run(journal.path, "--eval") == "0 of 0 shown; evaluations in the journal: none\n"
    assert run(journal.path, "0", "--eval") == "0 of 0 shown; evaluations in the journal: none\n"


# one sample in full


@pytest.fixture
def conversation(tmp_path: Path, model_folder: Path) -> Path:
    """A run folder with one sample: two turns with a tool result in between, a masked start and a special token."""
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(model_folder / "tokenizer.json"))
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(f"hf_checkpoint: {model_folder}\n")

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    sample = Sample(index=3, group_index=1, prompt="ask [b]", tokens=ids("ask [b]<|end|>"), label="7", reward=1.0)
    sample.metadata = {"turns": 2}

    def sampled(text: str, version: str, masked: int = 0) -> None:
        tokens = ids(text)
        meta = {"weight_version": version, "finish_reason": {"type": "stop"}, "masked_until": masked}
        sample.append_response_tokens(tokens=tokens, log_probs=[-0.5] * len(tokens), text=text, meta_info=meta)

    sampled("old call<|end|>", "3", masked=3)
    sample.append_response_tokens(tokens=ids("tool \x1b 42"), trainable=False, text="tool \x1b 42")
    sampled("é 7<|end|>", "4")
    journal = open_journal(run_dir)
    journal.assign(2, [[sample]], {})
    journal.close()
    return run_dir


def test_sample_is_shown_with_span_marks(conversation: Path) -> None:
    output = run(conversation, "3")
    assert "sample 3 of group 1: assigned rollout 2, completed" in output
    assert "label: 7\n" in output
    assert "tokens: 8 of the prompt, 23 of the response\n" in output
    assert "spans: 3 masked, 6 trained on, 9 observation, 5 trained on\n" in output
    assert "weights: version 3 (9 tokens), version 4 (5 tokens)\n" in output
    assert 'metadata: {"turns": 2}\n' in output
    assert "prompt: ask [b]<|end|>\n" in output
    assert "response: ⟦masked: old⟧ call<|end|>⟦observation: tool \\x1b 42⟧é 7<|end|>\n" in output
    assert "⟦observation: …⟧ (not sampled by the model" in output
    assert run(conversation, "--sample", "3", "--full") == output


def test_span_marks_are_colours_on_a_terminal(conversation: Path) -> None:
    output = run(conversation, "3", terminal=True)
    assert "⟦" not in output
    (line,) = [line for line in output.splitlines() if "response: " in line]
    text = Text.from_ansi(line)
    colours = [(text.plain[span.start : span.end], str(span.style)) for span in text.spans]
    assert text.plain == "response: old call<|end|>tool \\x1b 42é 7<|end|>"
    styled = {part: style for part, style in colours if part.strip()}
    assert "yellow" in styled["old"] or "color(3)" in styled["old"]
    assert "cyan" in styled["tool \\x1b 42"] or "color(6)" in styled["tool \\x1b 42"]
    assert "magenta" in styled["<|end|>"] or "color(5)" in styled["<|end|>"]
    assert " call" not in styled


def test_spans_are_counted_but_not_marked_without_the_model(conversation: Path, model_folder: Path) -> None:
    moved = model_folder.rename(model_folder.with_name("moved"))
    output = run(conversation, "3")
    assert "not marked: the model of the run is not found; name its folder with --tokenizer" in output
    assert "3 masked, 6 trained on" in output
    assert "response: old call<|end|>tool \\x1b 42é 7<|end|>\n" in output
    assert "⟦masked: old⟧ call<|end|>" in run(conversation, "3", "--tokenizer", moved)
    with pytest.raises(UserError, match="has no tokenizer"):
        run(conversation, "3", "--tokenizer", conversation)
    (moved / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer.json: does not load"):
        run(conversation, "3", "--tokenizer", moved)


def test_response_spans_follow_mask_and_versions() -> None:
    sample = Sample(
        tokens=[1, 2, 3, 4, 5, 6], response_length=4, loss_mask=[0, 0, 1, 1], version_spans=[[None, 1], ["7", 3]]
    )
    assert response_spans(sample) == [TokenSpan(OBSERVED, 2, 3), TokenSpan(MASKED, 3, 4), TokenSpan(TRAINED, 4, 6)]
    sample.loss_mask = None
    assert response_spans(sample) == [TokenSpan(TRAINED, 2, 6)]
    sample.loss_mask, sample.version_spans = [1, 0, 0, 1], []
    assert [(span.kind, len(span)) for span in response_spans(sample)] == [(TRAINED, 1), (OBSERVED, 2), (TRAINED, 1)]
    sample.loss_mask = [1]
    assert response_spans(sample) == []
