"""Paths of a run's files on the trainers' nodes, which may be other machines than the driver's.

Invariant: on the driver's machine every file has the path that the flags give it. On another node a path never depends
on a working folder, and files that were copied there have the paths of their copies; what trainers record of a model
folder is its path on the driver's machine.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from slime.cluster.node import Node
from slime.config import Config
from slime.config.plugins import CONTRACTS
from slime.storage.json_types import JsonObject

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
    """List the existing files and folders that trainers read and do not write: every node needs them."""
    written = {os.path.abspath(value) for value in _values(config, _WRITTEN)}
    found = dict.fromkeys(os.path.abspath(value) for value in _values(config, _READ))
    return [path for path in found if path not in written and Path(path).exists()]


def folders_written(config: Config) -> dict[str, str]:
    """Return the folders that every trainer writes to, by flag; a template's folder ends before its first variable."""
    given = {"--save": config.save, "--critic-save": config.critic_save, "--save-hf": config.save_hf}
    return {
        flag: value if "{" not in value else os.path.dirname(value.partition("{")[0]) or "."
        for flag, value in given.items()
        if value is not None
    }


def code_folders(config: Config) -> list[str]:
    """List the folders with the user's functions and the modules next to them: of all files and modules in flags.

    Installed packages and slime itself are left out.
    """
    found: dict[str, None] = {}
    values = [getattr(config, contract.field_name) for contract in CONTRACTS]
    named = [one for value in values if value is not None for one in (value if isinstance(value, list) else [value])]
    for path in named:
        file = _file_of(path)
        if file is not None:
            found[str(file.parent)] = None
            continue
        spec = importlib.util.find_spec(path.partition(":")[0].partition(".")[0])
        if spec is None or spec.origin is None or not os.path.exists(spec.origin):  # built-in or without __init__.py
            continue
        place = Path(spec.origin).resolve().parent
        folder = place.parent if spec.submodule_search_locations is not None else place
        if folder != _OWN_PARENT and not any(folder.is_relative_to(installed) for installed in _INSTALLED):
            found[str(folder)] = None
    return list(found)


def config_for_node(node: Node, config: Config) -> Config:
    """Return the config with the path of every file on the node."""
    if node.is_here:
        return config
    given = {name: getattr(config, name) for name in (*_READ, *_WRITTEN)}
    there: JsonObject = {name: node.path(os.path.abspath(value)) for name, value in given.items() if value is not None}
    functions = {contract.field_name: getattr(config, contract.field_name) for contract in CONTRACTS}
    for name, value in functions.items():
        if isinstance(value, list):
            there[name] = [_function_path(node, one) for one in value]
        elif value is not None:
            there[name] = _function_path(node, value)
    return config.replace(**there)


def _file_of(path: str) -> Path | None:
    """Return the file of `file.py` or `file.py:name`; None for a module."""
    file = path if path.endswith(".py") else path.rpartition(":")[0]
    return Path(file).expanduser().resolve() if file.endswith(".py") else None


def _function_path(node: Node, path: str) -> str:
    """Return the path of a function on the node."""
    file = _file_of(path)
    if file is None:
        return path
    name = "" if path.endswith(".py") else f":{path.rpartition(':')[2]}"
    return f"{node.path(str(file))}{name}"


def driver_paths(node: Node, config: Config) -> dict[str, str]:
    """Map paths on the node to those on the driver's machine."""
    if node.is_here:
        return {}
    return {node.path(os.path.abspath(value)): value for value in _values(config, _READ)}


def _values(config: Config, names: Iterable[str]) -> list[str]:
    """Return the values of these fields that are set."""
    return [value for name in names if (value := getattr(config, name)) is not None]
