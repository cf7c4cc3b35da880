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
# Migration from upstream slime

Scripts, YAML files and plugins written for slime 0.3.1 run here unchanged, except where this page says `absent`. Start
with the plan of your script's flags: replace `python3 train.py` with `slime plan` (Ray is only needed for several machines).

```bash
slime plan --hf-checkpoint outputs/quickstart/model --prompt-data outputs/quickstart/data/train.jsonl --device cpu \\
    --input-key prompt --label-key label --rm-type deepscaler --rollout-batch-size 8 --n-samples-per-prompt 4 \\
    --num-rollout 2 --rollout-max-response-len 8 --save outputs/mine --colocate --tensor-model-parallel-size 2 \\
    --attention-softmax-in-fp32 --sglang-mem-fraction-static 0.7 | sed -n '/^Notes/,$p'
```

```text
Notes
-----
  * Megatron flags without effect on the FSDP trainer: --tensor-model-parallel-size, --attention-softmax-in-fp32 (--train-backend megatron uses them; fsdp is the default here)
  * SGLang flags without effect on the embedded engine: --sglang-mem-fraction-static
```

The plan checks all flags and names those without effect. Then run `train.py` or `train_async.py` with the same flags.

- Model and run scripts are [here too](scripts.md). Nothing has to be converted: runs start from the Hugging Face folder,
  and `--load` or `--ref-load` read the weights of a torch_dist checkpoint.
- Plugins keep their imports and signatures ([plugins](plugins.md)).
- Tested with files written after upstream's documents and signatures (`tests/migration/plugins`), not with upstream's own
  files. A script or plugin of yours that does not run is a bug: please report it.

The tables are generated from `tests/migration/` (`python -m tests.migration.page > docs/migration.md`); tests check each row.

| verdict | means |
|---|---|
| same | as upstream |
| better | as upstream documents it, or more; see the note |
| other | different; see the note |
| absent | missing; the note names the reason or a replacement |
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
    yield "Defaults are upstream's; a different default here follows the arrow."
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
    yield "Arguments of each function; [plugins](plugins.md) has the return values. In brackets: passed by name if the"
    yield "function has that parameter."
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
