"""The help text: all flags by group, with type, default and meaning."""

from __future__ import annotations

import shutil
import textwrap

from slime.config.config import FLAG_SPECS
from slime.config.spec import FlagSpec

_USAGE = """\
usage: slime train [--config FILE] --FLAG VALUE ...

Trains a language model by reinforcement learning. Switches take no value; --no-<switch> turns one off.
--sglang-*, --router-* and Megatron-LM flags are carried through to whoever reads them.
"""

FILE_FLAGS: tuple[tuple[str, str, str], ...] = (
    ("--config", "FILE", "TOML or YAML file with the same names; the command line wins; may be repeated"),
    (
        "--custom-config-path",
        "FILE",
        "YAML file that sets flags, over the command line, and your own values, which plugins read as args.<name>",
    ),
    ("--help", "", "show this text"),
)


def format_help(width: int | None = None) -> str:
    """The whole help text, wrapped to the terminal."""
    width = width or min(shutil.get_terminal_size((100, 24)).columns, 120)
    blocks = [_USAGE]
    group = None
    for spec in FLAG_SPECS.values():
        if spec.group != group:
            group = spec.group
            blocks.append(f"\n{group}\n")
        blocks.append(entry(f"{spec.flag} {spec.metavar}".rstrip(), description(spec), width))
    blocks.append("\nFiles and help\n")
    blocks += [entry(f"{name} {metavar}".rstrip(), text, width) for name, metavar, text in FILE_FLAGS]
    return "".join(blocks)


def description(spec: FlagSpec) -> str:
    """Meaning and default in one line."""
    return f"{meaning(spec)} ({default_text(spec)})" if default_text(spec) else meaning(spec)


def meaning(spec: FlagSpec) -> str:
    """What the flag is for, and why it has no effect if it has none."""
    return spec.info.help if spec.info.no_effect is None else f"{spec.info.help}; without effect: {spec.info.no_effect}"


def default_text(spec: FlagSpec) -> str:
    """What the value is when the flag is not given."""
    if spec.info.required:
        return "required"
    if spec.info.derived:
        return f"default: {spec.info.derived}"
    if spec.kind == "bool":
        return "default: on" if spec.default else ""
    if spec.default in (None, [], {}):
        return ""
    return f"default: {spec.default}"


def entry(head: str, text: str, width: int) -> str:
    """One flag: its name at the left, its text at the right of it or below."""
    indent = 34
    lines = textwrap.wrap(text, max(width - indent, 30))
    head = f"  {head}"
    if len(head) < indent - 1:
        first = head.ljust(indent) + lines[0] + "\n"
        lines = lines[1:]
    else:
        first = head + "\n"
    return first + "".join(" " * indent + line + "\n" for line in lines)
