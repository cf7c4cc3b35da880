"""Parses command lines and environment variables of launch scripts, without a shell.

Invariant: a text is split into words and never executed. Quotes, backslashes and `$NAME` mean the same as in a shell;
no other syntax is interpreted. The value of a variable stays one word.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime.errors import UserError

_QUOTED = re.compile(r'"[^"]*"|\'[^\']*\'')
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_KEPT = "\0"
_SECRETS = ("--wandb-key",)


def words_of(text: str, env: Mapping[str, str]) -> list[str]:
    """Split a command line into words; `$NAME` and `${NAME}` come from `env` unless they are in single quotes."""
    joined = text.replace("\\\n", " ")
    kept = _QUOTED.sub(lambda quoted: quoted[0].replace("$", _KEPT) if quoted[0][0] == "'" else quoted[0], joined)
    try:
        words = shlex.split(kept, comments=True)
    except ValueError as error:
        raise UserError(f"the command line {text.strip()[:80]!r} cannot be read ({error}): close its quotes") from error
    expanded = [_VARIABLE.sub(lambda found: env.get(found[1] or found[2], ""), word) for word in words]
    return [word.replace(_KEPT, "$") for word in expanded]


def shown(words: Sequence[str]) -> str:
    """Format a command for printing, with secrets hidden."""
    hidden = ["..." if before in _SECRETS else word for before, word in zip(["", *words], words, strict=False)]
    return shlex.join(hidden)


def model_args(script: Path, env: Mapping[str, str]) -> list[str]:
    """Run a model script (`scripts/models/*.sh`) and return the array MODEL_ARGS that it sets."""
    if not script.is_file():
        others = sorted(path.stem for path in script.parent.glob("*.sh") if path.stem != "lib")
        known = f": choose one of {', '.join(others)}" if others else ": it belongs to a checkout of slime"
        raise UserError(f"there is no model script {script}{known}")
    command = 'source "$1" && printf "%s\\0" "${MODEL_ARGS[@]}"'
    done = subprocess.run(["bash", "-c", command, "bash", str(script)], env=dict(env), capture_output=True)
    if done.returncode != 0:
        raise UserError(f"{script} failed: {os.fsdecode(done.stderr).strip()}")
    return os.fsdecode(done.stdout).split("\0")[:-1]


def parsed_env(text: str) -> dict[str, str]:
    """Parse variables written as JSON, or as `A=1 B=2`."""
    text = text.strip()
    if text.startswith("{"):
        try:
            found = json.loads(text)
        except ValueError as error:
            raise UserError(f"the variables {text[:80]!r} are not valid JSON ({error})") from error
        return {str(name): str(value) for name, value in found.items()}
    pairs = [word.partition("=") for word in shlex.split(text)]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise UserError(f"the variables {text[:80]!r}: {wrong[0]} has no value: write NAME=value")
    return {name: value for name, _, value in pairs}
