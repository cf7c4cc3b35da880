"""`slime samples RUN`: lists, filters, shows and exports the samples of a run, also during the run.

Invariants: no line of the table is wider than the terminal. If space is short, headings are abbreviated, then the
columns group and state are dropped; prompt and response share the remaining width. An export has every field of every
chosen sample, extra attributes included, and its place: state, rollout and step of training, or step and dataset of an
evaluation. The export file appears complete or not at all and never replaces an existing file. JSON lines can be read
back with `slime.data.json_samples`; in Parquet, numbers per token are lists, and fields without a fixed type are JSON
text.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import chain, islice
from pathlib import Path
from typing import NoReturn

from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table

from slime.data.buffer.database import STATES
from slime.data.buffer.reader import (
    SORTS,
    Choice,
    JournaledSample,
    TokenDecoder,
    journal_path,
    load_decoder,
    model_of_run,
    reading,
)
from slime.data.buffer.rows import GENERATED
from slime.data.buffer.show_sample import print_sample
from slime.data.json_samples import format_prompt, format_value, to_json, visible
from slime.data.sample import Sample
from slime.errors import RunFailed, UserError
from slime.storage.json_types import JsonObject

_ROOMY = 60
"""Width of prompt and response together below which the narrow layout is used."""
_MOST_LABEL, _MOST_LABEL_NARROW = 16, 8
_LEAST_TEXT = 8


@dataclass(frozen=True)
class TableColumn:
    """A column of the table: its heading in the wide and the narrow layout, and its cells."""

    name: str
    short: str
    cell: Callable[[JournaledSample], str]
    right: bool = False
    needs_room: bool = False
    is_cut: bool = False
    """Long cells are cut to `_MOST_LABEL` or `_MOST_LABEL_NARROW` characters."""


def samples_table(shown: Sequence[JournaledSample], prompts: Sequence[str], width: int, *, evaluations: bool) -> Table:
    """Build a table of samples of at most `width` characters; text that `prompts` share is cut from prompts."""
    columns = _columns(shown, evaluations)
    before, after = shared_ends(prompts)
    texts = []
    for record in shown:
        prompt = record.sample.prompt
        messages = prompt if isinstance(prompt, list) else []
        asked = [message for message in messages if isinstance(message, dict) and message.get("role") == "user"]
        text = format_value(asked[-1].get("content")) if asked else format_prompt(prompt)
        if len(text) > len(before) + len(after) and text.startswith(before) and text.endswith(after):
            text = text[len(before) : len(text) - len(after)]
        texts.append((_line(text), _line(record.sample.response)))
    for_prompt, for_response = (max(_LEAST_TEXT, *map(cell_len, side)) for side in zip(*texts, strict=True))
    for gap, is_wide in ((2, True), (1, False)):
        if not is_wide:
            columns = [column for column in columns if not column.needs_room]
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, gap, 0, 0))
        rest = width - gap
        for column in columns:
            heading = column.name if is_wide else column.short
            most = None if not column.is_cut else _MOST_LABEL if is_wide else _MOST_LABEL_NARROW
            side: JustifyMethod = "right" if column.right else "left"
            table.add_column(heading, justify=side, no_wrap=True, overflow="ellipsis", max_width=most)
            cells = max((cell_len(column.cell(record)) for record in shown), default=0)
            rest -= max(cells if most is None else min(cells, most), len(heading)) + gap
        if rest >= min(_ROOMY, for_prompt + for_response):
            break
    if for_prompt + for_response > rest:  # two fifths and three fifths of the width, if both texts are long
        for_prompt = min(for_prompt, max(rest * 2 // 5, rest - for_response))
        for_response = min(for_response, rest - for_prompt)
    for heading, room in (("prompt", for_prompt), ("response", for_response)):
        table.add_column(heading, no_wrap=True, overflow="ellipsis", width=max(room, _LEAST_TEXT))
    for record, sides in zip(shown, texts, strict=True):
        table.add_row(*(escape(column.cell(record)) for column in columns), *map(escape, sides))
    return table


def shared_ends(prompts: Sequence[str]) -> tuple[str, str]:
    """Return the common start and end of prompts, in whole lines or tags, as chat templates write them."""
    distinct = list(dict.fromkeys(prompts))
    if len(distinct) < 2:
        return "", ""
    before = _common_start(distinct)
    before = before[: max(before.rfind("\n"), before.rfind(">")) + 1]
    after = _common_start([prompt[len(before) :][::-1] for prompt in distinct])[::-1]
    starts = [place for mark in "\n<" if (place := after.find(mark)) >= 0]
    return before, after[min(starts) :] if starts else ""


def _versions(found: Sequence[str]) -> str:
    """Format weight versions as the first and the last one."""
    distinct = list(dict.fromkeys(found))
    return "..".join(distinct[:1] + distinct[1:][-1:])


def _common_start(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)  # a common start of the first and the last in order is common to all
    unlike = (place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)
    return first[: next(unlike, min(len(first), len(last)))]


def _columns(shown: Sequence[JournaledSample], evaluations: bool) -> list[TableColumn]:
    if evaluations:
        place = [TableColumn("step", "step", lambda r: _number(r.step), right=True)]
        place.append(TableColumn("dataset", "dataset", lambda r: _line(r.dataset or ""), is_cut=True))
    else:
        place = [
            TableColumn("group", "group", lambda r: _number(r.sample.group_index), right=True, needs_room=True),
            TableColumn("state", "state", lambda r: r.state or "", needs_room=True),
            TableColumn("rollout", "roll", lambda r: _number(r.rollout_id), right=True),
        ]
        if any(record.sample.task for record in shown):
            place.append(TableColumn("task", "task", lambda r: _line(str(r.sample.task or "")), is_cut=True))
    columns = [
        TableColumn("index", "#", lambda r: _number(r.sample.index), right=True),
        *place,
        TableColumn("status", "status", lambda r: r.sample.status.value),
        TableColumn("reward", "reward", lambda r: "" if r.reward is None else f"{r.reward:.4g}", right=True),
        TableColumn("tokens", "tok", lambda r: _number(r.sample.response_length), right=True),
        TableColumn("weights", "ver", lambda r: _line(_versions(r.sample.weight_versions))),
    ]
    if any(record.sample.label is not None for record in shown):
        columns.append(TableColumn("label", "label", lambda r: _line(format_value(r.sample.label)), is_cut=True))
    return columns


def _line(text: str) -> str:
    return visible(" ".join(text.split()))


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


_ROWS_PER_GROUP = 512
_INTS = ("group_index", "index", "rollout_id", "response_length", "journal_id", "batch", "consumed_by", "step")
_INT_LISTS = ("tokens", "loss_mask", "rollout_top_p_token_ids", "rollout_top_p_token_offsets")
_FLOAT_LISTS = ("rollout_log_probs", "teacher_log_probs")
_TEXTS = ("response", "status", "failure", "session_id", "state", "dataset")
_FLOATS = ("non_generation_time",)


def export(path: Path, found: Iterable[JournaledSample]) -> int:
    """Write samples to a new .jsonl or .parquet file; returns their number."""
    writers: dict[str, Callable[[Path, Iterable[JournaledSample]], int]] = {".jsonl": _jsonl, ".parquet": _parquet}
    if path.suffix not in writers:
        raise UserError(f"--export {path}: name a file that ends in .jsonl or .parquet")
    if path.exists():
        raise UserError(f"--export {path}: exists already; choose another name")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        count = writers[path.suffix](temporary, found)
        temporary.replace(path)
    except OSError as error:
        raise RunFailed(f"--export {path}: cannot be written ({error.strerror or error})") from error
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _jsonl(path: Path, found: Iterable[JournaledSample]) -> int:
    count = 0
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for record in found:
            file.write(json.dumps(_fields(record), ensure_ascii=True) + "\n")
            count += 1
    return count


def _parquet(path: Path, found: Iterable[JournaledSample]) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {
        **dict.fromkeys(_INTS, pa.int64()),
        **dict.fromkeys(_INT_LISTS, pa.list_(pa.int64())),
        **dict.fromkeys(_FLOAT_LISTS, pa.list_(pa.float64())),
        **dict.fromkeys(_FLOATS, pa.float64()),
    }
    records = iter(found)
    chunks = iter(lambda: list(islice(records, _ROWS_PER_GROUP)), [])
    first = next(chunks, [])
    names = [*(_place(first[0]) if first else ()), *Sample.__dataclass_fields__, "more"]
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in names])
    count = 0
    with pq.ParquetWriter(path, schema) as writer:
        for chunk in chain([first] if first else [], chunks):
            rows = []
            for record in chunk:
                fields = _fields(record)
                more = {name: value for name, value in fields.items() if name not in names}
                row = {name: fields.get(name) for name in names} | {"more": more or None}
                for name, value in row.items():
                    if name not in kinds and value is not None and not (name in _TEXTS and isinstance(value, str)):
                        row[name] = json.dumps(value)
                    elif isinstance(value, str):
                        row[name] = value.encode("utf-8", "replace").decode("utf-8")
                rows.append(row)
            try:
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
            except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
                raise UserError(
                    f"--export: samples {rows[0]['index']} to {rows[-1]['index']} do not fit into Parquet ({error}); "
                    "export to .jsonl"
                ) from error
            count += len(rows)
    return count


def _fields(record: JournaledSample) -> JsonObject:
    """Return the place and all fields of a sample as JSON values."""
    sample = {
        key: to_json(value, f"sample {record.sample.index}, {key}", lossy=True)
        for key, value in record.sample.to_dict().items()
    }
    return {**_place(record), **sample}


def _place(record: JournaledSample) -> JsonObject:
    """Return the place of a sample; `batch` is the rollout it is assigned to, `rollout_id` a field of the sample."""
    if record.dataset is not None:
        return {"step": record.step, "dataset": record.dataset}
    return {"state": record.state, "batch": record.rollout_id, "consumed_by": record.consumed_by}


_STATUSES = (*(status.value for status in Sample.Status), GENERATED)
_WIDTH_OF_A_FILE = 160
"""Width of the table if the output is not a terminal."""


def samples_command(words: Sequence[str], console: Console | None = None) -> int:
    """Run the command; invalid arguments raise a `UserError`."""
    options = _parser().parse_args(list(words))
    choice = _choice(options)
    if not console:
        is_wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
        console = Console(width=_WIDTH_OF_A_FILE) if is_wide else Console()
    with reading(options.run) as reader:
        if options.export is not None:
            count = export(Path(options.export), reader.samples(choice, options.limit))
            console.print(f"{count} samples written to {options.export}", markup=False, highlight=False, soft_wrap=True)
            return 0
        shown = list(reader.samples(choice, options.limit or 20))
        if options.full or options.sample_whole is not None:
            decoder = _decoder(console, options.run, options.tokenizer) if shown else None
            for record in shown:
                print_sample(console, record, decoder)
        elif shown:
            prompts = reader.some_prompts(evaluations=choice.evaluations)
            console.print(samples_table(shown, prompts, console.width, evaluations=choice.evaluations))
        if choice.evaluations:
            found = []
            for name, steps in reader.evaluations():
                several = len(steps) > 1
                at = f"{len(steps)} steps from {steps[0]} to {steps[-1]}" if several else f"step {steps[0]}"
                found.append(f"{name} at {at}")
            totals = f"evaluations in the journal: {', '.join(found) or 'none'}"
        else:
            states = ", ".join(f"{count} {state}" for state, count in reader.totals().items()) or "none"
            totals = f"samples in the journal: {states}"
        line = f"{len(shown)} of {reader.count(choice)} shown; {totals}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"slime samples: {message}; see slime samples --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="slime samples",
        description="List, filter, show and export the samples in the journal of a run, also during the run: samples "
        "in progress, samples of the last rollouts, and with --eval those of the last evaluations.",
    )
    parser.add_argument("run", metavar="RUN", help="a run folder (its --output-dir), or a journal file")
    parser.add_argument(
        "sample_whole", metavar="INDEX", type=int, nargs="?", help="show the whole sample with this number (index)"
    )
    parser.add_argument("--state", choices=STATES, help="only samples whose group has this state")
    parser.add_argument("--rollout", type=int, metavar="N", help="only the batch of this rollout")
    parser.add_argument("--group", type=int, metavar="N", help="only the group with this number (group_index)")
    parser.add_argument("--sample", type=int, metavar="N", help="only the sample with this number (index)")
    parser.add_argument("--min-reward", type=float, metavar="X", help="only rewards of at least X")
    parser.add_argument("--max-reward", type=float, metavar="X", help="only rewards of at most X")
    parser.add_argument("--status", choices=_STATUSES, help="how the response ended")
    parser.add_argument("--eval", action="store_true", help="show the completions of evaluations instead")
    parser.add_argument("--step", type=int, metavar="N", help="only the evaluation after N rollouts")
    parser.add_argument("--dataset", metavar="NAME", help="only the evaluations on this dataset")
    parser.add_argument("--sort", choices=SORTS, help="sort by this, smallest first (default: in recorded order)")
    parser.add_argument("--descending", action="store_true", help="with --sort: largest first")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N samples (default: 20; with --export: all)")
    parser.add_argument("--export", metavar="FILE", help="write all fields to FILE.jsonl or FILE.parquet")
    parser.add_argument("--full", action="store_true", help="print whole samples, and mark what is not trained on")
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="model folder to decode tokens with (default: that of the run, if it exists)",
    )
    return parser


def _choice(options: argparse.Namespace) -> Choice:
    if options.limit is not None and options.limit < 1:
        raise UserError(f"--limit {options.limit}: must be at least 1")
    if options.sample is not None and options.sample_whole is not None:
        raise UserError(f"--sample {options.sample}: sample {options.sample_whole} is named already, drop one of them")
    if options.descending and options.sort is None:
        raise UserError("--descending: has no effect without --sort")
    evaluations = options.eval or options.step is not None or options.dataset is not None
    for name in ("state", "rollout", "group") if evaluations else ():
        if getattr(options, name) is not None:
            raise UserError(f"--{name}: applies only to training samples; with --eval give --step or --dataset")
    given = {**vars(options), "evaluations": evaluations}
    if options.sample_whole is not None:
        given["sample"] = options.sample_whole
    return Choice(**{field.name: given[field.name] for field in fields(Choice)})


def _decoder(console: Console, run: str, tokenizer: str | None) -> TokenDecoder | None:
    """Load the given decoder, or that of the run; prints a note and returns None if the latter is missing."""
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
