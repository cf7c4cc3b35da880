"""Training in stages: several runs in one config file, each of which goes on from the last one's checkpoint.

    hf_checkpoint: model            # flags of all stages
    output_dir: outputs/run
    stages:
      - name: short
        num_rollout: 100            # of this stage
        rollout_max_response_len: 4096
      - name: long
        num_rollout: 50
        rollout_max_response_len: 16384

Invariant: a stage is an ordinary run in a folder of its own (`<output_dir>/1-short`), with its own journal and
checkpoints; weights, optimizer, data position and the count of rollouts come from the stage before it. Where a stage
stands is asked of its checkpoints when its turn comes, so that the same command goes on in the stage that was killed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config import Config, resolve
from slime.config.config import FLAG_SPECS, read_config_file
from slime.config.model_folder import read_latest
from slime.config.parser import config_of_settings
from slime.errors import UserError

if TYPE_CHECKING:
    from slime.driver.inputs import TrainingResult

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_DECIDED = ("save", "load")
"""Flags that follow from a stage's place."""


@dataclass(frozen=True)
class Stage:
    """One of the runs, as it is written."""

    name: str
    number: int
    count: int
    written: Config
    before: str | None
    """The folder of the stage before it."""

    @property
    def folder(self) -> str:
        """Run folder and checkpoints."""
        assert self.written.output_dir is not None
        return str(Path(self.written.output_dir) / f"{self.number}-{self.name}")

    @property
    def heading(self) -> str:
        """What the terminal says when it begins."""
        return f"stage {self.number} of {self.count}: {self.name}"

    def config(self) -> Config:
        """The config of the run as things stand: from its own last checkpoint, else from the stage before it."""
        has_own = self.before is None or read_latest(Path(self.folder)) is not None
        load = self.folder if has_own else self.before
        return resolve(self.written.replace(output_dir=self.folder, save=self.folder, load=load))


def run_stages(path: str | Path, flags: Sequence[str] = ()) -> list[TrainingResult]:
    """Run all stages of a file, or go on with them; `flags` as on the command line, for every stage."""
    from slime.driver.loop import train

    results = []
    for stage in read_stages(path, flags):
        print(stage.heading, flush=True)
        results.append(train(stage.config()))
    return results


def read_stages(path: str | Path, flags: Sequence[str] = ()) -> list[Stage]:
    """The stages of a file, all of them checked as far as that can be done before the first one has run."""
    file = str(path)
    common = read_config_file(file, what="slime stages")
    written = common.pop("stages", None)
    if not isinstance(written, list) or not written or not all(isinstance(one, dict) for one in written):
        raise UserError(f"{file} must have a list `stages`, each a mapping with a name and flags")
    shared_custom = _custom(common, file)
    stages: list[Stage] = []
    rollouts = 0
    for number, settings in enumerate(map(dict, written), start=1):
        where = f"stage {number} of {file}"
        name = settings.pop("name", None)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UserError(f"{where} needs a name of letters, digits, - and _")
        custom = {**shared_custom, **_custom(settings, where), "stage": name}
        config = config_of_settings({**common, **settings, "carried": custom}, file, flags)
        _check(config, where)
        assert config.num_rollout is not None
        rollouts += config.num_rollout
        before = stages[-1].folder if stages else config.load
        stages.append(Stage(name, number, len(written), config.replace(num_rollout=rollouts), before))
    return stages


def _custom(settings: dict[str, Any], where: str) -> dict[str, Any]:
    """Entries for plugins, which read them as `args.<name>`; taken out of the settings."""
    custom = settings.pop("custom", None) or {}
    if not isinstance(custom, Mapping) or not all(isinstance(name, str) for name in custom):
        raise UserError(f"{where}: custom must be a mapping of names to values, which plugins read as args.<name>")
    for name in custom:
        if name in FLAG_SPECS or hasattr(Config, name) or name == "stage":
            raise UserError(f"{where}: custom.{name} has a meaning already: rename it, or write a flag beside custom")
    return dict(custom)


def _check(config: Config, where: str) -> None:
    if config.num_rollout is None or config.num_rollout < 1:
        raise UserError(f"{where} needs num_rollout, the rollouts of this stage, at least 1")
    if config.output_dir is None:
        raise UserError(f"{where} needs output_dir, in which every stage has a folder")
    for name in _DECIDED:
        if getattr(config, name) is not None and not (name == "load" and where.startswith("stage 1 ")):
            raise UserError(f"{where}: {name} follows from the stages; drop it (load may stand in the first one)")
