"""The table of `slime samples`.

Invariant: no line is wider than the terminal. What has no room gets shorter headings, then group and state are left
out; prompt and response share what the other columns leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.markup import escape
from rich.table import Table

from slime.data.journal.reader import Recorded
from slime.data.shown import prompt_text, value_text, visible

_ROOMY = 60
"""Characters of prompt and response together, below which the table is drawn narrow."""
_MOST_LABEL, _MOST_LABEL_NARROW = 16, 8
_LEAST_TEXT = 8


@dataclass(frozen=True)
class Column:
    """One column: its heading with and without much room, and its cells."""

    name: str
    short: str
    cell: Callable[[Recorded], str]
    right: bool = False
    needs_room: bool = False


def listing(shown: Sequence[Recorded], prompts: Sequence[str], width: int, *, evaluations: bool) -> Table:
    """Samples as a table of at most `width` columns; what `prompts` have in common is left out of long prompts."""
    columns = _columns(shown, evaluations)
    before, after = shared_ends(prompts)
    texts = [(_line(core(_prompt(record), before, after)), _line(record.sample.response)) for record in shown]
    wanted = [max(_LEAST_TEXT, *map(cell_len, side)) for side in zip(*texts, strict=True)]
    wide = width - _width(columns, shown, gap=2, short=False) - 2 >= min(_ROOMY, sum(wanted))
    if not wide:
        columns = [column for column in columns if not column.needs_room]
    gap = 2 if wide else 1
    rest = width - _width(columns, shown, gap=gap, short=not wide) - gap
    for_prompt, for_response = _shares(rest, *wanted)
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, gap, 0, 0))
    for column in columns:
        heading = column.name if wide else column.short
        most = _most(column, short=not wide)
        table.add_column(
            heading, justify="right" if column.right else "left", no_wrap=True, overflow="ellipsis", max_width=most
        )
    for heading, room in (("prompt", for_prompt), ("response", for_response)):
        table.add_column(heading, no_wrap=True, overflow="ellipsis", width=room)
    for record, sides in zip(shown, texts, strict=True):
        table.add_row(*(escape(column.cell(record)) for column in columns), *map(escape, sides))
    return table


def versions(found: Sequence[str]) -> str:
    """Weight versions from the first to the last."""
    distinct = list(dict.fromkeys(found))
    return "..".join(distinct[:1] + distinct[1:][-1:])


def shared_ends(prompts: Sequence[str]) -> tuple[str, str]:
    """What all prompts begin and end with, in whole lines or up to the end of a tag, as chat templates write them."""
    distinct = list(dict.fromkeys(prompts))
    if len(distinct) < 2:
        return "", ""
    before = _common_start(distinct)
    before = before[: max(before.rfind("\n"), before.rfind(">")) + 1]
    after = _common_start([prompt[len(before) :][::-1] for prompt in distinct])[::-1]
    starts = [place for mark in "\n<" if (place := after.find(mark)) >= 0]
    return before, after[min(starts) :] if starts else ""


def core(prompt: str, before: str, after: str) -> str:
    """A prompt without what others have too."""
    if len(prompt) <= len(before) + len(after) or not (prompt.startswith(before) and prompt.endswith(after)):
        return prompt
    return prompt[len(before) : len(prompt) - len(after)]


def _common_start(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)  # what the first and the last in order share, all others share
    unlike = (place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)
    return first[: next(unlike, min(len(first), len(last)))]


def _columns(shown: Sequence[Recorded], evaluations: bool) -> list[Column]:
    if evaluations:
        place = [Column("step", "step", lambda r: _number(r.step), right=True)]
        place.append(Column("dataset", "dataset", lambda r: _line(r.dataset or "")))
    else:
        place = [
            Column("group", "group", lambda r: _number(r.sample.group_index), right=True, needs_room=True),
            Column("state", "state", lambda r: r.state or "", needs_room=True),
            Column("rollout", "roll", lambda r: _number(r.rollout_id), right=True),
        ]
        if any(record.sample.task for record in shown):
            place.append(Column("task", "task", lambda r: _line(str(r.sample.task or ""))))
    columns = [
        Column("index", "#", lambda r: _number(r.sample.index), right=True),
        *place,
        Column("status", "status", lambda r: r.sample.status.value),
        Column("reward", "reward", lambda r: "" if r.reward is None else f"{r.reward:.4g}", right=True),
        Column("tokens", "tok", lambda r: _number(r.sample.response_length), right=True),
        Column("weights", "ver", lambda r: _line(versions(r.sample.weight_versions))),
    ]
    if any(record.sample.label is not None for record in shown):
        columns.append(Column("label", "label", lambda r: _line(value_text(r.sample.label))))
    return columns


def _width(columns: Sequence[Column], shown: Sequence[Recorded], *, gap: int, short: bool) -> int:
    """Of all columns but prompt and response, with the gaps after them."""
    total = 0
    for column in columns:
        cells = max((cell_len(column.cell(record)) for record in shown), default=0)
        most = _most(column, short=short)
        total += max(cells if most is None else min(cells, most), len(column.short if short else column.name)) + gap
    return total


def _most(column: Column, *, short: bool) -> int | None:
    """The widest that a column may be."""
    if column.name not in ("label", "dataset", "task"):
        return None
    return _MOST_LABEL_NARROW if short else _MOST_LABEL


def _shares(rest: int, prompt: int, response: int) -> tuple[int, int]:
    """The widths of prompt and response: as they want if there is room, else two fifths and three fifths of it."""
    if prompt + response > rest:
        prompt = min(prompt, max(rest * 2 // 5, rest - response))
        response = min(response, rest - prompt)
    return max(prompt, _LEAST_TEXT), max(response, _LEAST_TEXT)


def _prompt(record: Recorded) -> str:
    prompt = record.sample.prompt
    if not isinstance(prompt, list):
        return prompt_text(prompt)
    asked = [message for message in prompt if isinstance(message, dict) and message.get("role") == "user"]
    return value_text(asked[-1].get("content")) if asked else prompt_text(prompt)


def _line(text: str) -> str:
    return visible(" ".join(text.split()))


def _number(value: int | None) -> str:
    return "" if value is None else str(value)
