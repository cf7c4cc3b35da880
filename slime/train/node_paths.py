"""The files of a run as its trainers call them, who may be on other machines than the driver.

Invariant: on the driver's machine every file has the name that the flags give it. On another node a name never depends
on a working folder, and what was brought there has its name of that node; what trainers write down of a model folder is
its name on the driver's machine.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slime.cluster.node import Node
from slime.config import Config
from slime.config.plugins import CONTRACTS

_READ = (
    "hf_checkpoint", "ref_load", "load", "lora_load", "opd_teacher_load", "critic_hf_checkpoint", "critic_load",
    "critic_config", "megatron_config_path",
)  # fmt: skip
_WRITTEN = (
    "save", "critic_save", "save_hf", "output_dir", "update_weight_disk_dir", "update_weight_local_checkpoint_dir",
)  # fmt: skip

_OWN_PARENT = Path(__file__).resolve().parents[2]
_INSTALLED = tuple(Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib"))


def files_to_provide(config: Config) -> list[str]:
    """What trainers read and do not write themselves, as far as it is there: every node needs it."""
    written = {os.path.abspath(value) for value in _values(config, _WRITTEN)}
    found = dict.fromkeys(os.path.abspath(value) for value in _values(config, _READ))
    return [path for path in found if path not in written and Path(path).exists()]


def folders_written(config: Config) -> dict[str, str]:
    """The folders that every trainer writes to, by their flags; a template's up to its first variable part."""
    given = {"--save": config.save, "--critic-save": config.critic_save, "--save-hf": config.save_hf}
    return {
        flag: value if "{" not in value else os.path.dirname(value.partition("{")[0]) or "."
        for flag, value in given.items()
        if value is not None
    }


def code_folders(config: Config) -> list[str]:
    """The folders that have the user's functions and what those import from beside them: those of the files and modules
    that flags name, but for installed packages and our own."""
    found: dict[str, None] = {}
    for path in _functions(config):
        file = _file_of(path)
        if file is not None:
            found[str(file.parent)] = None
            continue
        spec = importlib.util.find_spec(path.partition(":")[0].partition(".")[0])
        if spec is None or spec.origin is None or not os.path.exists(spec.origin):  # built in, or without __init__.py
            continue
        place = Path(spec.origin).resolve().parent
        folder = place.parent if spec.submodule_search_locations is not None else place
        if folder != _OWN_PARENT and not any(folder.is_relative_to(installed) for installed in _INSTALLED):
            found[str(folder)] = None
    return list(found)


def config_on(node: Node, config: Config) -> Config:
    """The config with every file under the name it has on the node."""
    if node.is_here:
        return config
    given = {name: getattr(config, name) for name in (*_READ, *_WRITTEN)}
    there: dict[str, Any] = {
        name: node.path(os.path.abspath(value)) for name, value in given.items() if value is not None
    }
    functions = {contract.field_name: getattr(config, contract.field_name) for contract in CONTRACTS}
    for name, value in functions.items():
        if isinstance(value, list):
            there[name] = [_function_on(node, one) for one in value]
        elif value is not None:
            there[name] = _function_on(node, value)
    return config.replace(**there)


def _functions(config: Config) -> list[str]:
    values = [getattr(config, contract.field_name) for contract in CONTRACTS]
    return [one for value in values if value is not None for one in (value if isinstance(value, list) else [value])]


def _file_of(path: str) -> Path | None:
    """The file of `file.py` or `file.py:name`; None for a module."""
    file = path if path.endswith(".py") else path.rpartition(":")[0]
    return Path(file).expanduser().resolve() if file.endswith(".py") else None


def _function_on(node: Node, path: str) -> str:
    file = _file_of(path)
    if file is None:
        return path
    name = "" if path.endswith(".py") else f":{path.rpartition(':')[2]}"
    return f"{node.path(str(file))}{name}"


def names_here(node: Node, config: Config) -> dict[str, str]:
    """The driver's names of what is called otherwise on the node, by the names there."""
    if node.is_here:
        return {}
    return {node.path(os.path.abspath(value)): value for value in _values(config, _READ)}


def _values(config: Config, names: Iterable[str]) -> list[str]:
    return [value for name in names if (value := getattr(config, name)) is not None]
