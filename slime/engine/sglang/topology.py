"""Models and groups of SGLang servers of a run, from `--sglang-config`, `--prefill-num-servers` or the defaults.

Invariants: every GPU of `--rollout-num-gpus` belongs to exactly one group, in the order of the file; exactly one model
is updated in training, the first one with `update_weights`; prefill and decode servers are used only together.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import yaml

from slime.config import Config
from slime.config.fields import did_you_mean
from slime.errors import UserError
from slime.storage.json_types import JsonMapping, JsonObject

DEFAULT_MODEL = "default"
WORKER_TYPES = ("regular", "prefill", "decode", "placeholder")
_NAME = re.compile(r"[\w.-]+")
_RESERVED_NAMES = ("driver", "engine", "router", "teacher", "trainer")
_MODEL_KEYS = ("name", "model_path", "update_weights", "num_gpus_per_engine", "server_groups", "engine_groups")
_GROUP_KEYS = ("worker_type", "num_gpus", "num_gpus_per_engine", "overrides")


@dataclass(frozen=True)
class ServerGroup:
    """Identical servers on `num_gpus` of the rollout's GPUs from `first_gpu` on, with `num_gpus_per_engine` each."""

    worker_type: str
    num_gpus: int
    num_gpus_per_engine: int
    first_gpu: int
    overrides: JsonMapping = field(default_factory=dict)
    """SGLang options, by their name with dashes, that override all other sources."""

    @property
    def num_engines(self) -> int:
        """Number of engines; 0 for a placeholder, which only reserves GPUs."""
        return 0 if self.worker_type == "placeholder" else self.num_gpus // self.num_gpus_per_engine


@dataclass(frozen=True)
class ServedModel:
    """One model and its servers."""

    name: str
    model_path: str
    update_weights: bool
    groups: tuple[ServerGroup, ...]

    @property
    def num_engines(self) -> int:
        return sum(group.num_engines for group in self.groups)

    @property
    def is_disaggregated(self) -> bool:
        """Return true if some servers only prefill and the others only decode."""
        return any(group.worker_type == "prefill" for group in self.groups)


def read_topology(config: Config) -> tuple[ServedModel, ...]:
    """The models of a run and their groups; the one that is trained comes first."""
    if config.sglang_config is None:
        return (simple_model(config, config.hf_checkpoint),)
    for flag, value in (
        ("--prefill-num-servers", config.prefill_num_servers),
        ("--rollout-external-engine-addrs", config.rollout_external_engine_addrs),
    ):
        if value is not None:
            raise UserError(f"--sglang-config and {flag} both define servers: keep one of them")
    return _TopologyReader(config, config.sglang_config).models()


def simple_model(config: Config, model_path: str, name: str = DEFAULT_MODEL) -> ServedModel:
    """One model on all GPUs of the rollout, of whose engines `--prefill-num-servers` only prefill."""
    gpus, each = config.rollout_num_gpus, config.rollout_num_gpus_per_engine
    prefill = (config.prefill_num_servers or 0) * each
    if not prefill:
        return ServedModel(name, model_path, True, (ServerGroup("regular", gpus, each, 0),))
    if prefill >= gpus:
        raise UserError(
            f"--prefill-num-servers {config.prefill_num_servers} leaves no engine to decode: there are {gpus // each} "
            "engines"
        )
    groups = (ServerGroup("prefill", prefill, each, 0), ServerGroup("decode", gpus - prefill, each, prefill))
    return ServedModel(name, model_path, True, groups)


class _TopologyReader:
    """Reads a `--sglang-config` file and assigns GPU slots in its order."""

    def __init__(self, config: Config, path: str) -> None:
        self._config = config
        self._path = path
        self._next_gpu = 0

    def models(self) -> tuple[ServedModel, ...]:
        try:
            content = yaml.safe_load(Path(self._path).read_text())
        except OSError as error:
            raise UserError(f"--sglang-config {self._path} cannot be read ({error.strerror})") from error
        except yaml.YAMLError as error:
            raise UserError(f"--sglang-config {self._path} is not YAML: {error}") from error
        if not isinstance(content, dict) or not isinstance(content.get("sglang"), list) or not content["sglang"]:
            self._refuse("the file needs the key sglang with a list of models")
        self._check_keys(content, ("sglang",), "the file")
        models = [self._model(entry, number) for number, entry in enumerate(content["sglang"], 1)]
        names = [model.name for model in models]
        for name in names:
            if names.count(name) > 1:
                self._refuse(f"there are two models of the name {name!r}")
        used, available = self._next_gpu, self._config.rollout_num_gpus
        if used != available:
            self._refuse(
                f"the groups use {used} GPUs in all, but --rollout-num-gpus is {available}: "
                "make them equal (a group of worker_type placeholder can reserve unused GPUs)"
            )
        updated = next((model for model in models if model.update_weights), None)
        if updated is None:
            self._refuse(
                "there is no model with update_weights: true, so nothing would sample from the trained weights"
            )
        return (updated, *(replace(model, update_weights=False) for model in models if model is not updated))

    def _model(self, value: object, number: int) -> ServedModel:
        where = f"model {number}"
        entry = self._check_keys(value, _MODEL_KEYS, where)
        name = entry.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _RESERVED_NAMES:
            self._refuse(f"{where} needs a name of letters, digits, dots and dashes for its logs, not {name!r}")
        where = f"model {name}"
        if "server_groups" in entry and "engine_groups" in entry:
            self._refuse(f"{where} has server_groups and engine_groups, which mean the same: keep one")
        groups = entry.get("server_groups", entry.get("engine_groups"))
        if not isinstance(groups, list) or not groups:
            self._refuse(f"{where} needs server_groups, a list")
        hf_checkpoint = self._config.hf_checkpoint
        path = entry.get("model_path") or hf_checkpoint
        update = entry.get("update_weights", os.path.abspath(path) == os.path.abspath(hf_checkpoint))
        if not isinstance(update, bool):
            self._refuse(f"{where}: update_weights must be true or false, not {update!r}")
        each = entry.get("num_gpus_per_engine", self._config.rollout_num_gpus_per_engine)
        read = tuple(self._group(group, f"{where}, group {index}", each) for index, group in enumerate(groups, 1))
        kinds = {group.worker_type for group in read} - {"placeholder"}
        if not kinds:
            self._refuse(f"{where} has placeholders only: give it a group that serves it")
        if kinds & {"prefill", "decode"} and kinds != {"prefill", "decode"}:
            self._refuse(
                f"{where} has {' and '.join(sorted(kinds))} servers: use regular alone, or prefill with decode"
            )
        return ServedModel(name, path, update, read)

    def _group(self, value: object, where: str, gpus_per_engine: object) -> ServerGroup:
        entry = self._check_keys(value, _GROUP_KEYS, where)
        kind = entry.get("worker_type", "regular")
        if kind == "encoder":
            self._refuse(f"{where}: encoder servers are for images, and this version trains on text")
        if kind not in WORKER_TYPES:
            self._refuse(f"{where}: worker_type must be one of {', '.join(WORKER_TYPES)}, not {kind!r}")
        gpus = self._count(entry.get("num_gpus"), f"{where}: num_gpus")
        each = self._count(entry.get("num_gpus_per_engine", gpus_per_engine), f"{where}: num_gpus_per_engine")
        if gpus % each and kind != "placeholder":
            self._refuse(f"{where}: num_gpus {gpus} is not a multiple of num_gpus_per_engine {each}")
        overrides = entry.get("overrides") or {}
        if not isinstance(overrides, dict):
            self._refuse(f"{where}: overrides must map options to values, not be {overrides!r}")
        first, self._next_gpu = self._next_gpu, self._next_gpu + gpus
        return ServerGroup(kind, gpus, each, first, {str(k).replace("_", "-"): v for k, v in overrides.items()})

    def _count(self, value: object, what: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self._refuse(f"{what} must be a whole number of at least 1, not {value!r}")
        return int(value)

    def _check_keys(self, entry: object, known: tuple[str, ...], where: str) -> JsonObject:
        """Return an entry of the file after checking that it is a mapping with known keys."""
        if not isinstance(entry, dict):
            self._refuse(f"{where} must be a mapping, not {entry!r}")
        for key in entry:
            if key not in known:
                hint = did_you_mean(str(key), known) or f": known are {', '.join(known)}"
                self._refuse(f"{where} has the unknown key {key}{hint}")
        return entry

    def _refuse(self, what: str) -> NoReturn:
        raise UserError(f"--sglang-config {self._path}: {what}")
