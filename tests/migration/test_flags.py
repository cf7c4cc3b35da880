"""The real parser sets every flag of slime 0.3.1 under its name, or rejects it with the reason in the table."""

from __future__ import annotations

import json
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config, parse_flags
from slime.config.checks import check_megatron_flags
from slime.config.config import FLAG_SPECS
from slime.config.flag_aliases import REFUSED
from slime.config.megatron_flags import MEGATRON_FLAGS, NEUTRAL
from slime.errors import UserError

FLAGS: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("flags.toml").read_text())["flag"]
VERDICTS = ("same", "better", "other", "absent")
KEYS = {"name", "kind", "default", "example", "verdict", "note", "default_here"}
ACCEPTED = [row for row in FLAGS if row["verdict"] != "absent"]
ABSENT = [row for row in FLAGS if row["verdict"] == "absent"]
NONE = "none"
"""Table value for a default of None here; an upstream default of None is left out of the table."""

by_name = pytest.mark.parametrize


def words(row: dict[str, Any], tmp_path: Path) -> list[str]:
    """Command-line words of a flag. Creates the file that --custom-config-path reads during parsing."""
    example = row.get("example", "")
    if row["name"] == "custom-config-path":
        example = str(tmp_path / "own.yaml")
        Path(example).write_text("own: 1\n")
    values = [example] if row["kind"] in ("str", "json") else shlex.split(example)
    return [f"--{row['name']}", *(values if row["kind"] != "flag" else ())]


def expected(row: dict[str, Any]) -> Any:
    """Example value of the row, converted to its kind."""
    example = row.get("example", "")
    pieces = shlex.split(example) if row["kind"] not in ("str", "json") else []
    return {
        "flag": lambda: not row["name"].startswith("no-") or attribute(row["name"]) == row["name"].replace("-", "_"),
        "int": lambda: int(example),
        "float": lambda: float(example),
        "number": lambda: float(example),
        "str": lambda: example,
        "json": lambda: json.loads(example),
        "strs": lambda: pieces,
        "append": lambda: pieces,
        "ints": lambda: [int(piece) for piece in pieces],
        "pairs": lambda: list(zip(pieces[::2], pieces[1::2], strict=True)),
    }[row["kind"]]()


def attribute(name: str) -> str:
    """Attribute that a flag sets: --no-<switch> clears <switch>, unless a flag of that full name exists."""
    own = name.replace("-", "_")
    positive = own.removeprefix("no_")
    return positive if own not in FLAG_SPECS and name not in MEGATRON_FLAGS and positive in FLAG_SPECS else own


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [row["name"] for row in rows]


@by_name("row", ACCEPTED, ids=names(ACCEPTED))
def test_accepted_flag_sets_the_attribute_of_its_name(row: dict[str, Any], tmp_path: Path) -> None:
    given = parse_flags(words(row, tmp_path))
    check_megatron_flags(given)
    if row["name"] == "custom-config-path":
        assert given.own == 1  # type: ignore[attr-defined]
        return
    assert getattr(given, attribute(row["name"])) == expected(row)


@by_name("row", ACCEPTED, ids=names(ACCEPTED))
def test_default_is_upstreams_or_the_table_explains_it(row: dict[str, Any]) -> None:
    name = attribute(row["name"])
    if name not in FLAG_SPECS:  # carried flag: an attribute only if given
        assert "default_here" not in row
        return
    ours = getattr(Config(), name)
    if "default_here" in row:
        assert ours == (None if row["default_here"] == NONE else row["default_here"])
        assert ours != row.get("default"), "the default is upstream's: drop default_here"
        assert row["note"]
    else:
        assert ours == row.get("default")


@by_name("row", ABSENT, ids=names(ABSENT))
def test_absent_flag_is_rejected_with_the_reason_of_the_table(row: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        check_megatron_flags(parse_flags(words(row, tmp_path)))
    sentence = str(caught.value)
    assert sentence.startswith(f"--{row['name']} ")
    assert row["note"] in sentence
    assert "unknown" not in sentence
    assert "yet" not in sentence


def test_flag_table_is_complete_and_consistent() -> None:
    rows = names(FLAGS)
    assert len(rows) == len(set(rows))
    for row in FLAGS:
        assert row.keys() <= KEYS, row
        assert row["verdict"] in VERDICTS, row
        assert row.get("note") or row["verdict"] == "same", row
    never = {name for name, (neutral, _) in NEUTRAL.items() if not neutral} - {"finetune"}
    assert set(names(ABSENT)) == REFUSED.keys() | never
    assert not MEGATRON_FLAGS.keys() - set(rows)
