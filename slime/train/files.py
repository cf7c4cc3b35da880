"""The files of a run as its trainers call them, who may be on other machines than the driver.

Invariant: on the driver's machine every file has the name that the flags give it. On another node a name never depends
on a working folder, and what was brought there has its name of that node; what trainers write down of a model folder is
its name on the driver's machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from slime.cluster.node import Node
from slime.config import Config

_READ = (
    "hf_checkpoint", "ref_load", "load", "lora_load", "opd_teacher_load", "critic_hf_checkpoint", "critic_load",
    "critic_config", "megatron_config_path",
)  # fmt: skip
_WRITTEN = (
    "save", "critic_save", "save_hf", "output_dir", "update_weight_disk_dir", "update_weight_local_checkpoint_dir",
)  # fmt: skip


def files_to_provide(config: Config) -> list[str]:
    """What trainers read and do not write themselves, as far as it is there: every node needs it."""
    written = {os.path.abspath(value) for value in _values(config, _WRITTEN)}
    found = dict.fromkeys(os.path.abspath(value) for value in _values(config, _READ))
    return [path for path in found if path not in written and Path(path).exists()]


def config_on(node: Node, config: Config) -> Config:
    """The config with every file under the name it has on the node."""
    if node.is_here:
        return config
    given = {name: getattr(config, name) for name in (*_READ, *_WRITTEN)}
    there = {name: node.path(os.path.abspath(value)) for name, value in given.items() if value is not None}
    return config.replace(**there)


def names_here(node: Node, config: Config) -> dict[str, str]:
    """The driver's names of what is called otherwise on the node, by the names there."""
    if node.is_here:
        return {}
    return {node.path(os.path.abspath(value)): value for value in _values(config, _READ)}


def _values(config: Config, names: Iterable[str]) -> list[str]:
    return [value for name in names if (value := getattr(config, name)) is not None]
