"""Version and command-line options of an installed SGLang or sglang-router.

The package may be installed in another interpreter, which is therefore queried in a subprocess. The version is queried
every time, which is fast; reading the options imports the package, so they are cached per version in the user's cache
folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slime.errors import UserError

_VERSION_TIMEOUT_S = 60.0
_OPTIONS_TIMEOUT_S = 300.0
_VERSION = """
import importlib.metadata
try:
    print(importlib.metadata.version({package!r}))
except importlib.metadata.PackageNotFoundError:
    print()
"""
_OPTIONS = """
import argparse, json
from {module} import {name}
parser = argparse.ArgumentParser()
{name}.add_cli_args(parser)
texts = lambda choices: None if choices is None else [str(choice) for choice in choices]
print()
print(json.dumps({{
    option.removeprefix("--"): {{"is_switch": action.nargs == 0, "choices": texts(action.choices)}}
    for action in parser._actions for option in action.option_strings if option.startswith("--")
}}))
"""


@dataclass(frozen=True)
class CommandLinePackage:
    """A package with a command line, and the module and class that declare its options."""

    name: str
    module: str
    arguments: str


SGLANG = CommandLinePackage("sglang", "sglang.srt.server_args", "ServerArgs")
ROUTER = CommandLinePackage("sglang-router", "sglang_router.router_args", "RouterArgs")


@dataclass(frozen=True)
class Option:
    """One option of a command line: a switch takes no value."""

    is_switch: bool = False
    choices: tuple[str, ...] | None = None


@dataclass(frozen=True)
class InstalledPackage:
    """An installed package, its interpreter, version and options."""

    package: CommandLinePackage
    python: str
    version: str
    options: Mapping[str, Option] = field(repr=False)
    """Options by name, without leading dashes."""

    def __str__(self) -> str:
        return f"{self.package.name} {self.version}"


def installed_version(package: CommandLinePackage, python: str | None = None) -> str | None:
    """Version of the package in `python` (None: this interpreter); None if it is not installed."""
    if python is not None and not os.access(python, os.X_OK):
        raise UserError(
            f"{python} is not a Python interpreter that can be run: give the path of one that has {package.name}"
        )
    text = _run_script(python, _VERSION.format(package=package.name), _VERSION_TIMEOUT_S)
    return text.strip() or None


def find_installed(package: CommandLinePackage, python: str | None = None) -> InstalledPackage | None:
    """The package in `python` with all its options; None if it is not installed."""
    version = installed_version(package, python)
    if version is None:
        return None
    cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slime"
    cache_file = cache_folder / f"{package.name}-{version}-options.json"
    try:
        cached = json.loads(cache_file.read_text())
    except (OSError, ValueError):
        cached = None
    if not isinstance(cached, dict):
        script = _OPTIONS.format(module=package.module, name=package.arguments)
        cached = json.loads(_run_script(python, script, _OPTIONS_TIMEOUT_S).strip().splitlines()[-1])
        unfinished = cache_file.with_suffix(f".{os.getpid()}")
        try:
            cache_file.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps(cached))
            unfinished.replace(cache_file)
        except OSError:  # the next run queries the options again
            unfinished.unlink(missing_ok=True)
    options = {
        name: Option(entry["is_switch"], None if entry["choices"] is None else tuple(entry["choices"]))
        for name, entry in cached.items()
    }
    return InstalledPackage(package, python or sys.executable, version, options)


def _run_script(python: str | None, script: str, timeout_s: float) -> str:
    interpreter = python or sys.executable
    try:
        completed = subprocess.run(
            [interpreter, "-c", script], capture_output=True, text=True, timeout=timeout_s, check=True
        )
    except subprocess.CalledProcessError as failed:
        last = (failed.stderr.strip().splitlines() or ["nothing"])[-1]
        raise UserError(f"{interpreter} could not be queried about its packages; its last output: {last}") from failed
    except (OSError, subprocess.TimeoutExpired) as failed:
        raise UserError(f"{interpreter} could not be queried about its packages ({failed})") from failed
    return completed.stdout
