"""`slime samples RUN`: lists, filters and exports what a run has sampled, also while it is going."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slime.data.journal.export import export
from slime.data.journal.reader import Choice, Reader, Recorded, reading
from slime.data.journal.schema import STATES
from slime.data.sample import Sample
from slime.errors import UserError

_WORDS = 60
_STATUSES = tuple(status.value for status in Sample.Status)


def samples_command(words: Sequence[str], console: Console | None = None) -> int:
    """Run the command; what is wrong with its words is a `UserError`."""
    options = _parser().parse_args(list(words))
    if options.limit is not None and options.limit < 1:
        raise UserError(f"--limit {options.limit}: must be at least 1")
    names = ("state", "rollout", "group", "sample", "min_reward", "max_reward", "status")
    choice = Choice(**{name: getattr(options, name) for name in names})
    console = console or Console()
    with reading(options.run) as reader:
        if options.export is not None:
            count = export(Path(options.export), reader.samples(choice, options.limit))
            console.print(f"{count} samples written to {options.export}", markup=False, highlight=False, soft_wrap=True)
            return 0
        shown = list(reader.samples(choice, options.limit or 20))
        rewards = reader.rewards([record.sample.journal_id for record in shown if record.sample.journal_id])
        if options.full:
            for record in shown:
                _print_whole(console, record)
        elif shown:
            console.print(_table(shown, rewards))
        _print_totals(console, reader, choice, len(shown))
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"slime samples: {message}; slime samples --help says what it takes")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="slime samples",
        description="List, filter and export the samples in the journal of a run, also while it is going.",
    )
    parser.add_argument("run", metavar="RUN", help="a run folder (its --output-dir), or a journal file")
    parser.add_argument("--state", choices=STATES, help="where the sample's group is in its life")
    parser.add_argument("--rollout", type=int, metavar="N", help="only the batch of this rollout")
    parser.add_argument("--group", type=int, metavar="N", help="only the group with this number (group_index)")
    parser.add_argument("--sample", type=int, metavar="N", help="only the sample with this number (index)")
    parser.add_argument("--min-reward", type=float, metavar="X", help="only rewards of at least X")
    parser.add_argument("--max-reward", type=float, metavar="X", help="only rewards of at most X")
    parser.add_argument("--status", choices=_STATUSES, help="how the response ended")
    parser.add_argument("--limit", type=int, metavar="N", help="at most so many (20; with --export: all)")
    parser.add_argument("--export", metavar="FILE", help="write all fields to FILE.jsonl or FILE.parquet")
    parser.add_argument("--full", action="store_true", help="print whole prompts and responses")
    return parser


def _table(shown: list[Recorded], rewards: dict[int, float | None]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("index", "group", "state", "rollout", "status", "reward", "tokens", "versions"):
        table.add_column(name, justify="left" if name in ("state", "status", "versions") else "right", no_wrap=True)
    table.add_column("response", no_wrap=True, overflow="ellipsis")
    for record in shown:
        sample = record.sample
        reward = rewards.get(sample.journal_id) if sample.journal_id is not None else None
        cells = (
            sample.index,
            sample.group_index,
            record.state,
            record.rollout_id,
            sample.status.value,
            None if reward is None else f"{reward:.4g}",
            sample.response_length,
            _span(sample.weight_versions),
            _first_words(sample.response),
        )
        table.add_row(*(escape("" if cell is None else str(cell)) for cell in cells))
    return table


def _span(versions: list[str]) -> str:
    distinct = list(dict.fromkeys(versions))
    return distinct[0] if len(distinct) == 1 else "..".join([distinct[0], distinct[-1]]) if distinct else ""


def _first_words(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _WORDS else line[: _WORDS - 1] + "…"


def _print_whole(console: Console, record: Recorded) -> None:
    sample = record.sample
    where = "" if record.rollout_id is None else f" rollout {record.rollout_id}"
    console.rule(f"sample {sample.index} of group {sample.group_index}: {record.state}{where}, {sample.status.value}")
    facts: dict[str, Any] = {
        "reward": sample.reward,
        "label": sample.label,
        "tokens": sample.response_length,
        "versions": _span(sample.weight_versions),
        "failure": sample.failure,
        "prompt": sample.prompt if isinstance(sample.prompt, str) else json.dumps(sample.prompt, default=str),
        "response": sample.response,
    }
    for name, value in facts.items():
        if value is not None and not (isinstance(value, str) and not value):
            console.print(f"{name}: {value}", markup=False, highlight=False, soft_wrap=True)


def _print_totals(console: Console, reader: Reader, choice: Choice, shown: int) -> None:
    totals = reader.totals()
    states = ", ".join(f"{count} {state}" for state, count in totals.items()) or "none"
    chosen = reader.count(choice)
    console.print(f"{shown} of {chosen} shown; samples in the journal: {states}", highlight=False, soft_wrap=True)
