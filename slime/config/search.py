"""Finding flags by words: ours, those carried through to others, those that are refused, and other libraries' names.

Invariant: every word that is asked for is in the name, the help or the group of all that is shown. Ours come first, and
of them those that have the words in their names. What this version does not take is shown with the sentence that it
would be refused with.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from slime.config.config import FLAG_SPECS
from slime.config.foreign_flags import FOREIGN_FLAGS, foreign_hint
from slime.config.help import FILE_FLAGS, description, entry
from slime.config.megatron_fields import FIELD_FLAGS, REFUSED_FIELDS
from slime.config.megatron_flags import FLOAT, INT, MEGATRON_FLAGS, NUMBER, SWITCH, TEXT, TEXTS
from slime.config.not_yet import REFUSED, refusal
from slime.config.suggest import nearest
from slime.errors import UserError

_CARRIED = "Megatron-LM's, carried through under their names"
_REFUSED = "slime's elsewhere, refused in this version"
_FOREIGN = "Of TRL, verl and OpenRLHF, with their names here"
_SGLANG = "SGLang's, carried through to the installed version, which they are checked against"
_OTHERS = (_SGLANG, _CARRIED, _REFUSED, _FOREIGN)
_PREFIXES = (
    ("sglang-*", "any option of SGLang's server: --sglang-mem-fraction-static 0.8 is its --mem-fraction-static"),
    ("router-*", "any option of sglang-router"),
)
_VALUES = {SWITCH: "", INT: "N", FLOAT: "X", NUMBER: "X", TEXT: "VALUE", TEXTS: "VALUE [...]"}


@dataclass(frozen=True)
class Found:
    """One flag as it is shown, and the text it is found by."""

    section: str
    name: str
    """Without the dashes in front."""
    head: str
    text: str
    known_as: str

    def has(self, words: Iterable[str]) -> bool:
        """Whether all words are in its text."""
        return all(word in self.known_as for word in words)


def search_flags(words: Sequence[str], decided: Mapping[str, str] | None = None, width: int | None = None) -> str:
    """The flags that have all `words`, as help; `decided` are SGLang's options that a flag of ours decides.

    A `UserError` when there is none, with the nearest word that there is.
    """
    asked = [_plain(word) for word in words]
    known = list(_all(decided or {}))
    found = [flag for flag in known if flag.has(asked)]
    if not found:
        raise UserError(_nothing(asked, known))
    found.sort(key=lambda flag: (flag.section in _OTHERS, not all(word in flag.name for word in asked)))
    sections: dict[str, list[Found]] = {}
    for flag in found:
        sections.setdefault(flag.section, []).append(flag)
    width = width or min(shutil.get_terminal_size((100, 24)).columns, 120)
    blocks = [
        f"{section}\n" + "".join(entry(flag.head, flag.text, width) for flag in flags)
        for section, flags in sections.items()
    ]
    return "\n".join(blocks)


def _all(decided: Mapping[str, str]) -> Iterator[Found]:
    for spec in FLAG_SPECS.values():
        names = " ".join(_plain(name) for name in (spec.name, *spec.info.aliases))
        yield _found(spec.group, names, f"{spec.flag} {spec.metavar}".rstrip(), description(spec))
    for name, metavar, text in FILE_FLAGS:
        yield _found("Files and help", name[2:], f"{name} {metavar}".rstrip(), text)
    for name, text in _PREFIXES:
        yield _found(_SGLANG, name, f"--{name}", text)
    for name, ours in decided.items():
        yield _found(_SGLANG, name, f"--{name}", f"refused: it is decided by {ours}")
    for name, kind in MEGATRON_FLAGS.items():
        yield _found(_CARRIED, name, f"--{name} {_VALUES[kind]}".rstrip(), "Megatron-LM's flag of this name")
    for name, kind in FIELD_FLAGS.items():
        yield _found(_CARRIED, name, f"--{name} {_VALUES[kind]}".rstrip(), "the field of Megatron-Core's settings")
    for name in sorted(REFUSED | REFUSED_FIELDS):
        yield _found(_REFUSED, name, f"--{name}", refusal(name) or "")
    for name, (whose, _) in FOREIGN_FLAGS.items():
        shown = name.replace("-", "_") if "." in name else f"--{name}"
        hint = (foreign_hint(name, shown) or "").removeprefix(f"{shown} is ").removeprefix(f"{shown}: ")
        yield Found(_FOREIGN, name, shown, hint, f"{name} {whose}".lower())


def _found(section: str, names: str, head: str, text: str) -> Found:
    return Found(section, names, head, text, f"{names} {head} {text} {section}".lower())


def _plain(word: str) -> str:
    """As it is searched for: `--Rollout_Batch_Size` is `rollout-batch-size`."""
    return word.lower().removeprefix("--").replace("_", "-")


def _nothing(asked: Sequence[str], known: Sequence[Found]) -> str:
    vocabulary = {word for flag in known for word in re.findall(r"[a-z0-9][a-z0-9.-]+", flag.known_as)}
    for word in asked:
        if not any(flag.has([word]) for flag in known):
            match = nearest(word, sorted(vocabulary))
            hint = f": did you mean {match}?" if match else " (slime flags lists all)"
            return f"no flag has {word!r} in its name, help or group{hint}"
    return f"no flag has all of {', '.join(map(repr, asked))}: search with fewer words"
