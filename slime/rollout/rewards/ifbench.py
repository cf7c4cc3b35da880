"""`--rm-type ifbench`: 1.0 for a response that follows all instructions of its prompt.

The prompt's metadata has `instruction_id_list` and, aligned with it, `kwargs`: the arguments of each. Instructions of
IFEval are checked here; those of IFBench by its own checker, which is no package: its folder must be on the path.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

from slime.errors import UserError
from slime.rollout.rewards.errors import RewardError
from slime.rollout.rewards.instructions import CHECKS

_REGISTRY = "instructions_registry"


def ifbench_reward(response: str | None, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """1.0 when every instruction is followed, else 0.0; a `RewardError` where the metadata says none."""
    instructions = _instructions(metadata or {})
    text = response or ""
    return float(bool(text.strip()) and all(_follows(text, name, arguments) for name, arguments in instructions))


def _instructions(metadata: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    names = _read(metadata.get("instruction_id_list"))
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        raise RewardError(f"ifbench: the metadata has no instruction_id_list, but {names!r:.80}")
    given = _read(metadata.get("kwargs"))
    given = [given] * len(names) if given is None or isinstance(given, Mapping) else given
    if not isinstance(given, list | tuple) or len(given) != len(names):
        raise RewardError(f"ifbench: kwargs must be a list of {len(names)} objects, one for each instruction")
    return [(name.strip(), _arguments(one, name)) for name, one in zip(names, given, strict=True)]


def _arguments(given: Any, name: str) -> dict[str, Any]:
    """Those that are set: Parquet gives every instruction the arguments of all."""
    given = _read(given)
    if not isinstance(given, Mapping | None):
        raise RewardError(f"ifbench: the kwargs of {name} must be an object, not {given!r:.80}")
    return {key: value for key, value in (given or {}).items() if value is not None}


def _read(value: Any) -> Any:
    """Lists and objects may come as JSON text."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError as error:
            raise RewardError(f"ifbench: {value!r:.80} is not JSON ({error})") from error
    return value


def _follows(response: str, name: str, arguments: dict[str, Any]) -> bool:
    check = CHECKS.get(name)
    try:
        if check is not None:
            return check(response, arguments)
        instruction = _of_ifbench(name)(name)
        instruction.build_description(**arguments)
        return bool(instruction.check_following(response))
    except (TypeError, ValueError, KeyError) as error:
        raise RewardError(f"ifbench: the instruction {name} cannot be checked: {error}") from error


def _of_ifbench(name: str) -> Any:
    try:
        registry = importlib.import_module(_REGISTRY).INSTRUCTION_DICT
    except ImportError as error:
        raise UserError(
            f"--rm-type ifbench: the instruction {name} is one of IFBench, whose checker is not installed: git clone "
            "https://github.com/allenai/IFBench, pip install -r IFBench/requirements.txt, add its folder to PYTHONPATH"
        ) from error
    if name not in registry:
        raise RewardError(f"ifbench: there is no instruction {name}")
    return registry[name]
