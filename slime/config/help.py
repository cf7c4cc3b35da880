"""Help texts: one screen, topics and all flags; flag tables in Markdown; the search for flags by words.

Invariant: every word of a search is in the name, the help or the group of each flag that is shown. slime's own flags
come first, and among them the flags with the words in their names. Flags that this version does not support are shown
with their error message.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from slime.config.config import FLAG_SPECS
from slime.config.fields import FlagSpec, nearest_name
from slime.config.flag_aliases import FOREIGN_FLAGS, REFUSED, foreign_hint, refusal
from slime.config.megatron_flags import (
    FIELD_FLAGS,
    FLOAT,
    INT,
    MEGATRON_FLAGS,
    NUMBER,
    REFUSED_FIELDS,
    SWITCH,
    TEXT,
    TEXTS,
)
from slime.errors import UserError

_USAGE = """\
usage: slime train [--config FILE] --FLAG VALUE ...

Trains a language model by reinforcement learning. Switches take no value; --no-<switch> turns one off.
--sglang-*, --router-* and Megatron-LM flags are passed through to the programs that read them.
"""

FILE_FLAGS: tuple[tuple[str, str, str], ...] = (
    ("--config", "FILE", "TOML or YAML file with the same names; the command line has precedence; may be repeated"),
    (
        "--custom-config-path",
        "FILE",
        "YAML file that sets flags, with precedence over the command line, and values that plugins read as args.<name>",
    ),
    ("--help", "", "show the flags that most runs need"),
    ("--help-all", "", "show all flags"),
)
ESSENTIAL_FLAGS: tuple[tuple[str, str], ...] = (
    ("hf_checkpoint", "Hugging Face model folder to start from"),
    ("prompt_data", "prompts, .jsonl or .parquet"),
    ("input_key", "column of the prompt"),
    ("label_key", "column of the reference answer"),
    ("rm_type", "built-in reward: math, dapo, deepscaler, f1, gpqa, ifbench, ..."),
    ("custom_rm_path", "your reward instead: FILE.py:function or module.function"),
    ("rollout_batch_size", "prompts per step"),
    ("n_samples_per_prompt", "responses per prompt"),
    ("rollout_max_response_len", "new tokens per response, at most"),
    ("num_rollout", "steps of the run"),
    ("advantage_estimator", "grpo, gspo, ppo, reinforce_plus_plus, ..."),
    ("lr", "learning rate"),
    ("use_kl_loss", "KL to the starting model; its weight: --kl-loss-coef"),
    ("max_tokens_per_gpu", "tokens per forward pass, with --use-dynamic-batch-size"),
    ("eval_prompt_data", "held-out data, with --eval-interval N"),
    ("save", "folder for checkpoints, with --save-interval N; --load DIR resumes"),
    ("output_dir", "metrics, logs, samples and plots of the run"),
    ("actor_num_gpus_per_node", "training processes"),
    ("rollout_num_gpus", "engine processes; not given: they share the GPUs of training"),
    ("device", "auto: CUDA if there is a GPU"),
)
"""The flags on the first screen, with the short texts that fit there."""


def format_essentials() -> str:
    """Return the flags that most runs need, one line each."""
    lines = []
    for name, text in ESSENTIAL_FLAGS:
        spec = FLAG_SPECS[name]
        values = spec.metavar.removesuffix(" [...]") if len(spec.metavar) < 20 else "NAME"
        lines.append(f"  {f'{spec.flag} {values}'.rstrip():<33} {text}\n")
    return "".join(lines)


def format_short_help() -> str:
    """Return the help of `slime train` on one screen."""
    return (
        f"{_USAGE}\nFlags that most runs need\n{format_essentials()}\n"
        f"  --help-all lists all {len(FLAG_SPECS)} flags; `slime flags WORD` searches them; `slime help` lists topics\n"
    )


def topics() -> dict[str, str]:
    """Return the groups of flags by topic: the first word of the group, or another name where that is not enough."""
    groups = {spec.group: None for spec in FLAG_SPECS.values()}
    names = {
        "On-policy distillation": "distillation",
        "Live service": "live-service",
        "Upstream's flags without effect here": "upstream",
    }
    return {names.get(group) or re.split(r"[: ]", group)[0].lower(): group for group in groups}


def format_topic(topic: str, width: int | None = None) -> str | None:
    """Return the flags of a topic, or the one flag of this name; None if there is neither."""
    group = topics().get(topic)
    specs = [spec for spec in FLAG_SPECS.values() if group == spec.group or _plain(topic) == _plain(spec.name)]
    if not specs:
        return None
    return f"{specs[0].group}\n" + "".join(
        _wrap(f"{spec.flag} {spec.metavar}", description(spec), width) for spec in specs
    )


def format_help(width: int | None = None) -> str:
    """Return the complete help text, wrapped to the terminal."""
    blocks = [_USAGE]
    for group, specs in groupby(FLAG_SPECS.values(), lambda spec: spec.group):
        blocks.append(f"\n{group}\n")
        blocks += [_wrap(f"{spec.flag} {spec.metavar}", description(spec), width) for spec in specs]
    blocks.append("\nFiles and help\n")
    blocks += [_wrap(f"{name} {metavar}", text, width) for name, metavar, text in FILE_FLAGS]
    return "".join(blocks)


def meaning(spec: FlagSpec) -> str:
    """Return the help of a flag, with the reason if it has no effect."""
    return spec.info.help if spec.info.no_effect is None else f"{spec.info.help}; without effect: {spec.info.no_effect}"


def default_text(spec: FlagSpec) -> str:
    """Return the default of a flag for its help text."""
    if spec.info.required:
        return "required"
    if spec.info.derived:
        return f"default: {spec.info.derived}"
    if spec.kind == "bool":
        return "default: on" if spec.default else ""
    return "" if spec.default in (None, [], {}) else f"default: {spec.default}"


def description(spec: FlagSpec) -> str:
    """Return meaning and default of a flag in one line."""
    return f"{meaning(spec)} ({default_text(spec)})" if default_text(spec) else meaning(spec)


def _wrap(head: str, text: str, width: int | None) -> str:
    """Format one flag: its name at the left, its text to the right or below."""
    width = width or min(shutil.get_terminal_size((100, 24)).columns, 120)
    indent, head = 34, f"  {head.rstrip()}"
    lines = textwrap.wrap(text, max(width - indent, 30))
    lines = [" " * indent + line for line in lines]
    if len(head) < indent - 1:
        lines[0] = head.ljust(indent) + lines[0][indent:]
    else:
        lines.insert(0, head)
    return "".join(f"{line}\n" for line in lines)


_INTRO = """\
# Flags

Generated by `slime flags --markdown`. Each flag is one field of `slime.config.Config`: `--rollout-batch-size` is
`config.rollout_batch_size`, and plugins read `args.rollout_batch_size`. Switches take no value; `--no-<switch>` turns
one off. `--sglang-*`, `--router-*` and Megatron-LM flags are carried through under their name. Precedence, lowest
first: defaults, `--config` files, the command line, `--custom-config-path` files.
"""


def format_markdown() -> str:
    """Return all flags as Markdown tables, one per group."""
    lines = [_INTRO]
    for group, specs in groupby(FLAG_SPECS.values(), lambda spec: spec.group):
        lines.append(f"## {group}\n\n| flag | value | default | meaning |\n|---|---|---|---|")
        for spec in specs:
            default = default_text(spec).removeprefix("default: ")
            cells = (f"`{spec.flag}`", _cell(spec.metavar) or "switch", _cell(default), _cell(meaning(spec)))
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    lines.append("## Files and help\n\n| flag | value | meaning |\n|---|---|---|")
    lines += [f"| `{name}` | {metavar} | {text} |" for name, metavar, text in FILE_FLAGS]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


_CARRIED = "Megatron-LM's, carried through under their names"
_REFUSED = "Upstream slime's, not supported in this version"
_FOREIGN = "Flags of TRL, verl and OpenRLHF, with their names here"
_SGLANG = "SGLang's, carried through and checked against the installed version"
_OTHERS = (_SGLANG, _CARRIED, _REFUSED, _FOREIGN)
_PREFIXES = (
    ("sglang-*", "any option of SGLang's server: --sglang-mem-fraction-static 0.8 is its --mem-fraction-static"),
    ("router-*", "any option of sglang-router"),
)
_VALUES = {SWITCH: "", INT: "N", FLOAT: "X", NUMBER: "X", TEXT: "VALUE", TEXTS: "VALUE [...]"}


class FlagSearchEntry(NamedTuple):
    """One flag of a search result, and the text that is searched."""

    section: str
    names: str
    """Without leading dashes."""
    head: str
    text: str
    known_as: str

    def has(self, words: Iterable[str]) -> bool:
        """Return whether all words are in the searched text."""
        return all(word in self.known_as for word in words)


def search_flags(words: Sequence[str], decided: Mapping[str, str] | None = None, width: int | None = None) -> str:
    """Return the help of all flags that match all `words`; `decided` maps SGLang's options to the flags that set them.

    Raises a `UserError` with the nearest known word if no flag matches.
    """
    query = [_plain(word) for word in words]
    known = list(_iterate_search_entries(decided or {}))
    found = [flag for flag in known if flag.has(query)]
    if not found:
        unknown = next((word for word in query if not any(flag.has([word]) for flag in known)), None)
        if unknown is None:
            raise UserError(f"no flag has all of {', '.join(map(repr, query))}: search with fewer words")
        vocabulary = {word for flag in known for word in re.findall(r"[a-z0-9][a-z0-9.-]+", flag.known_as)}
        match = nearest_name(unknown, sorted(vocabulary))
        hint = f": did you mean {match}?" if match else " (slime flags lists all)"
        raise UserError(f"no flag has {unknown!r} in its name, help or group{hint}")
    found.sort(key=lambda flag: (flag.section in _OTHERS, not all(word in flag.names for word in query)))
    sections: dict[str, list[str]] = {}
    for flag in found:
        sections.setdefault(flag.section, [f"{flag.section}\n"]).append(_wrap(flag.head, flag.text, width))
    return "\n".join("".join(blocks) for blocks in sections.values())


def _iterate_search_entries(decided: Mapping[str, str]) -> Iterator[FlagSearchEntry]:
    rows = [
        (spec.group, " ".join(map(_plain, (spec.name, *spec.info.aliases))), spec.flag, spec.metavar, description(spec))
        for spec in FLAG_SPECS.values()
    ]
    rows += [("Files and help", name[2:], name, metavar, text) for name, metavar, text in FILE_FLAGS]
    rows += [(_SGLANG, name, f"--{name}", "", text) for name, text in _PREFIXES]
    rows += [(_SGLANG, name, f"--{name}", "", f"refused: it is decided by {ours}") for name, ours in decided.items()]
    for flags, text in (
        (MEGATRON_FLAGS, "Megatron-LM's flag of this name"),
        (FIELD_FLAGS, "the field of Megatron-Core's settings"),
    ):
        rows += [(_CARRIED, name, f"--{name}", _VALUES[kind], text) for name, kind in flags.items()]
    rows += [(_REFUSED, name, f"--{name}", "", refusal(name) or "") for name in sorted(REFUSED | REFUSED_FIELDS)]
    for section, names, flag, metavar, text in rows:
        head = f"{flag} {metavar}".rstrip()
        yield FlagSearchEntry(section, names, head, text, f"{names} {head} {text} {section}".lower())
    for name, (whose, _) in FOREIGN_FLAGS.items():
        shown = name.replace("-", "_") if "." in name else f"--{name}"
        hint = (foreign_hint(name, shown) or "").removeprefix(f"{shown} is ").removeprefix(f"{shown}: ")
        yield FlagSearchEntry(_FOREIGN, name, shown, hint, f"{name} {whose}".lower())


def _plain(word: str) -> str:
    """Normalise a word for the search: `--Rollout_Batch_Size` becomes `rollout-batch-size`."""
    return word.lower().removeprefix("--").replace("_", "-")
