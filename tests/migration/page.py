"""Generates docs/migration.md from the tables: `python -m tests.migration.page > docs/migration.md`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from slime.config.plugins import CONTRACTS
from slime.config.plugins.contracts import Contract
from tests.migration.tables import VERDICTS, Behaviour, Flag, Name, read_behaviours, read_flags, read_names

INTRODUCTION = """\
# Moving here from upstream slime

Scripts, YAML files and plugins that were written for slime 0.3.1 are meant to run here as they are, but for what is
marked absent below. Tried were files written after upstream's descriptions and signatures (`tests/migration/plugins`),
not upstream's own: where one of yours does not run, that is a defect to report. Start from the script you have: put
`slime plan` in the place of `python3 train.py` (Ray is for more than one machine), and it says, without loading
a model, which model it trains from which folder, what every part takes, and which of your flags have no effect here.
Then run `train.py` or `train_async.py` with the same flags. `source scripts/models/...` and the run scripts of those
models are here too ([scripts.md](scripts.md)), and nothing has to be converted: a run starts from the Hugging Face
folder, and `--ref-load` or `--load` at a torch_dist checkpoint of Megatron reads its weights. Plugins keep their imports and their signatures ([plugins.md](plugins.md)).

This page is made of the tables in `tests/migration/` (`python -m tests.migration.page > docs/migration.md`), which the
tests walk: a name is imported and its signature compared, a flag is parsed, a behaviour has a test of its own.

| verdict | means |
|---|---|
| same | does what it does upstream |
| better | does what upstream's documents say where its code does not, or more; the note says how |
| other | is there and differs; the note says in what and why |
| absent | is not there; the note says why, and what takes its place |
"""


def page() -> str:
    """Return the text of the page."""
    flags, names, behaviours = read_flags(), read_names(), read_behaviours()
    parts = [INTRODUCTION, *_counts(flags, names, behaviours), *_flags(flags), *_names(names), *_behaviours(behaviours)]
    parts.extend(_plugins(CONTRACTS))
    return "\n".join(parts) + "\n"


def _counts(flags: Sequence[Flag], names: Sequence[Name], behaviours: Sequence[Behaviour]) -> Iterator[str]:
    yield f"| | all | {' | '.join(VERDICTS)} |"
    yield "|---|---|---|---|---|---|"
    for what, rows in (
        ("[flags](#flags)", flags),
        ("[names](#names)", names),
        ("[behaviours](#behaviours)", behaviours),
    ):
        count = Counter(row.verdict for row in rows)
        yield f"| {what} | {len(rows)} | {' | '.join(str(count[verdict]) for verdict in VERDICTS)} |"


def _flags(flags: Sequence[Flag]) -> Iterator[str]:
    yield from ("", "## Flags", "")
    yield "A default is upstream's; where ours is another one, it stands behind the arrow."
    for group in dict.fromkeys(row.group for row in flags):
        yield from ("", f"### {group}", "", "| flag | default | verdict | note |", "|---|---|---|---|")
        for row in flags:
            if row.group == group:
                yield f"| `--{row.name.removeprefix('--')}` | {_default(row)} | {row.verdict} | {_cell(row.note)} |"


def _default(row: Flag) -> str:
    here = "" if row.default_here is None else f" → {_code(row.default_here)}"
    return f"{_code(row.default)}{here}"


def _names(names: Sequence[Name]) -> Iterator[str]:
    yield from ("", "## Names")
    for module in sorted({row.module for row in names}):
        yield from ("", f"### `{module}`", "", "| name | verdict | note |", "|---|---|---|")
        for row in (row for row in names if row.module == module):
            yield f"| {_shown(row)} | {row.verdict} | {_cell(row.note)} |"


def _shown(row: Name) -> str:
    if not row.name:
        return "the module"
    owner = row.name.rpartition(".")[0]
    text = row.name if not row.call else f"{owner}.{row.call}" if owner else row.call
    return _code(f"async {text}" if row.what == "async" else text)


def _behaviours(behaviours: Sequence[Behaviour]) -> Iterator[str]:
    yield from ("", "## Behaviours", "", "| upstream | verdict | note | test |", "|---|---|---|---|")
    for row in behaviours:
        test = _code(row.test) if row.test else ""
        yield f"| {_cell(row.what)} | {row.verdict} | {_cell(row.note)} | {test} |"


def _plugins(contracts: Iterable[Contract]) -> Iterator[str]:
    yield from ("", "## Plugin path flags", "")
    yield "How the function behind each flag is called; [plugins.md](plugins.md) says what it returns. In brackets: given"
    yield "by name to a function that has that parameter."
    yield from ("", "| flag | called as |", "|---|---|")
    for contract in contracts:
        yield f"| `{contract.flag}` | {_code(_call(contract))} |"


def _call(contract: Contract) -> str:
    offered = [f"[{name}=]" for name in contract.offered if name not in contract.params]
    arguments = [*contract.params, *(f"{name}=" for name in contract.keywords), *offered]
    name = "Class" if contract.is_class else "f"
    return f"{name}({', '.join(arguments)})"


def _code(value: Any) -> str:
    text = "none" if value is None else str(value)
    return f"`{_cell(text)}`" if text else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    sys.stdout.write(page())
