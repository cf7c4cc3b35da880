"""`slime samples RUN`: lists, filters, shows and exports what a run has sampled, also while it is going."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from slime.data.journal.conversation import print_conversation
from slime.data.journal.decoder import Decoder, load_decoder, model_of_run
from slime.data.journal.export import export
from slime.data.journal.listing import listing
from slime.data.journal.reader import SORTS, Choice, Reader, journal_path, reading
from slime.data.journal.rows import GENERATED
from slime.data.journal.schema import STATES
from slime.data.sample import Sample
from slime.errors import UserError

_STATUSES = (*(status.value for status in Sample.Status), GENERATED)
_WIDTH_OF_A_FILE = 160
"""Of the table, when it is not written to a terminal."""


def samples_command(words: Sequence[str], console: Console | None = None) -> int:
    """Run the command; what is wrong with its words is a `UserError`."""
    options = _parser().parse_args(list(words))
    choice = _choice(options)
    console = console or _console()
    with reading(options.run) as reader:
        if options.export is not None:
            count = export(Path(options.export), reader.samples(choice, options.limit))
            console.print(f"{count} samples written to {options.export}", markup=False, highlight=False, soft_wrap=True)
            return 0
        shown = list(reader.samples(choice, options.limit or 20))
        if options.full or options.sample_whole is not None:
            decoder = _decoder(console, options.run, options.tokenizer) if shown else None
            for record in shown:
                print_conversation(console, record, decoder)
        elif shown:
            prompts = reader.some_prompts(evaluations=choice.evaluations)
            console.print(listing(shown, prompts, console.width, evaluations=choice.evaluations))
        _print_totals(console, reader, choice, len(shown))
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"slime samples: {message}; slime samples --help says what it takes")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="slime samples",
        description="List, filter, show and export the samples in the journal of a run, also while it is going: those "
        "on their way, those of the last rollouts, and with --eval those of the last evaluations.",
    )
    parser.add_argument("run", metavar="RUN", help="a run folder (its --output-dir), or a journal file")
    parser.add_argument(
        "sample_whole", metavar="INDEX", type=int, nargs="?", help="show the sample with this number (index) whole"
    )
    parser.add_argument("--state", choices=STATES, help="where the sample's group is in its life")
    parser.add_argument("--rollout", type=int, metavar="N", help="only the batch of this rollout")
    parser.add_argument("--group", type=int, metavar="N", help="only the group with this number (group_index)")
    parser.add_argument("--sample", type=int, metavar="N", help="only the sample with this number (index)")
    parser.add_argument("--min-reward", type=float, metavar="X", help="only rewards of at least X")
    parser.add_argument("--max-reward", type=float, metavar="X", help="only rewards of at most X")
    parser.add_argument("--status", choices=_STATUSES, help="how the response ended")
    parser.add_argument("--eval", action="store_true", help="the completions of evaluations instead")
    parser.add_argument("--step", type=int, metavar="N", help="only the evaluation after so many rollouts")
    parser.add_argument("--dataset", metavar="NAME", help="only the evaluations on this dataset")
    parser.add_argument("--sort", choices=SORTS, help="smallest first, instead of in the order they came")
    parser.add_argument("--descending", action="store_true", help="with --sort: largest first")
    parser.add_argument("--limit", type=int, metavar="N", help="at most so many (20; with --export: all)")
    parser.add_argument("--export", metavar="FILE", help="write all fields to FILE.jsonl or FILE.parquet")
    parser.add_argument("--full", action="store_true", help="print samples whole, with what is not trained on marked")
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="model folder to decode tokens with (default: that of the run, if it is there)",
    )
    return parser


def _choice(options: argparse.Namespace) -> Choice:
    if options.limit is not None and options.limit < 1:
        raise UserError(f"--limit {options.limit}: must be at least 1")
    if options.sample is not None and options.sample_whole is not None:
        raise UserError(f"--sample {options.sample}: sample {options.sample_whole} is named already, drop one of them")
    if options.descending and options.sort is None:
        raise UserError("--descending: says nothing without --sort")
    evaluations = options.eval or options.step is not None or options.dataset is not None
    for name in ("state", "rollout", "group") if evaluations else ():
        if getattr(options, name) is not None:
            raise UserError(f"--{name}: is of samples that are trained on; with --eval give --step or --dataset")
    return Choice(
        state=options.state,
        rollout=options.rollout,
        group=options.group,
        sample=options.sample if options.sample_whole is None else options.sample_whole,
        min_reward=options.min_reward,
        max_reward=options.max_reward,
        status=options.status,
        evaluations=evaluations,
        step=options.step,
        dataset=options.dataset,
        sort=options.sort,
        descending=options.descending,
    )


def _console() -> Console:
    is_wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=_WIDTH_OF_A_FILE) if is_wide else Console()


def _decoder(console: Console, run: str, tokenizer: str | None) -> Decoder | None:
    """The decoder that is asked for, or that of the run; without the latter a sentence says what is not shown."""
    if tokenizer is not None:
        return load_decoder(tokenizer)
    try:
        folder = model_of_run(journal_path(run).parent)
        if folder is not None:
            return load_decoder(folder)
        reason = "the model of the run is not found"
    except UserError as error:
        reason = str(error)
    note = f"special tokens and spans are not marked: {reason}; name its folder with --tokenizer"
    console.print(note, markup=False, highlight=False, soft_wrap=True)
    return None


def _print_totals(console: Console, reader: Reader, choice: Choice, shown: int) -> None:
    if choice.evaluations:
        found = [f"{name} at {_steps(steps)}" for name, steps in reader.evaluations()]
        there = f"evaluations in the journal: {', '.join(found) or 'none'}"
    else:
        states = ", ".join(f"{count} {state}" for state, count in reader.totals().items()) or "none"
        there = f"samples in the journal: {states}"
    line = f"{shown} of {reader.count(choice)} shown; {there}"
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _steps(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
