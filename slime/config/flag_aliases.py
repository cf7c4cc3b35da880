"""Flags of TRL, verl, prime-rl, OpenRLHF and other versions of slime, with their names here; and refused flags.

Invariant: every flag that a remedy in `foreign_flags.toml` names exists. A remedy that begins with a flag is the name
of the setting here; any other remedy is a complete sentence.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

from slime.config.megatron_flags import REFUSED_FIELDS
from slime.storage.json_types import JsonObject

_TABLES: JsonObject = tomllib.loads(Path(__file__).with_name("foreign_flags.toml").read_text(encoding="utf-8"))

FOREIGN_FLAGS: dict[str, tuple[str, str]] = {
    name: (library, remedy) for library, remedies in _TABLES["foreign"].items() for name, remedy in remedies.items()
}
"""Foreign name, with dashes -> its library and the remedy here."""
REFUSED: dict[str, str] = _TABLES["refused"]
"""Flag of upstream slime without leading dashes -> the reason why it is not supported, and what to do instead. Config
fields and Megatron flags have precedence over this table."""
UPSTREAM_DEFAULTS: JsonObject = {
    **dict.fromkeys(_TABLES["upstream_defaults"]["none"].split()),
    **_TABLES["upstream_defaults"]["values"],
}
"""Upstream's defaults of flags and attributes that are not config fields here."""

_SETTING = re.compile(r"\+{0,2}(?P<name>[a-z][\w.]*\.\w+)=")
_FLAG = re.compile(r"--([a-z][a-z0-9-]*)")


def foreign_hint(name: str, shown: str | None = None) -> str | None:
    """Return the sentence for another library's flag, given without its leading dashes, or None."""
    key, shown = name.replace("_", "-"), shown or f"--{name}"
    if key not in FOREIGN_FLAGS:
        return None
    whose, remedy = FOREIGN_FLAGS[key]
    return f"{shown} is a name of {whose}: {'here it is ' if remedy.startswith('--') else ''}{remedy}"


def foreign_setting(word: str) -> str | None:
    """Return the sentence for a setting in verl's form, such as `data.train_files=x`, or None."""
    match = _SETTING.match(word)
    return None if match is None else foreign_hint(match["name"], shown=match["name"])


def with_keyword_names(sentence: str) -> str:
    """Replace the flags in a sentence by the keywords of `slime.run`."""
    return _FLAG.sub(lambda match: match[1].replace("-", "_"), sentence)


def refusal(flag: str) -> str | None:
    """Return the sentence for a known slime flag that is not supported here, or None."""
    why = REFUSED.get(flag) or REFUSED_FIELDS.get(flag) or REFUSED_FIELDS.get(flag.removeprefix("no-"))
    return None if why is None else f"--{flag} is not supported: {why}"


def join_unknown_names(sentences: Sequence[str], what: str) -> str:
    """Join the sentences about unknown names into one message; `what` is their plural noun, such as "flags"."""
    distinct = list(dict.fromkeys(sentences))
    if len(distinct) == 1:
        return distinct[0]
    return "\n".join([f"{len(distinct)} {what} are not known here:", *(f"  {sentence}" for sentence in distinct)])
