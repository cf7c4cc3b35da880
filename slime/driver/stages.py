"""Training in stages: several runs in one config file, each of which starts from the checkpoint of the stage before it.

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
checkpoints; weights, optimizer, data position and the count of rollouts come from the stage before it. The progress of
a stage is read from its checkpoints when the stage begins, so the same command resumes the stage that was killed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config import Config, resolve
from slime.config.config import FLAG_SPECS, read_config_file
from slime.config.model_folder import read_latest
from slime.config.parser import parse_flags
from slime.errors import UserError
from slime.storage.json_types import JsonObject

if TYPE_CHECKING:
    from slime.driver.inputs import TrainingResult

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_DERIVED_FLAGS = ("save", "load")
"""Flags whose values follow from the position of a stage."""


@dataclass(frozen=True)
class Stage:
    """One run of the config file, with its flags as they are written there."""

    name: str
    number: int
    count: int
    written: Config
    before: str | None
    """The folder of the previous stage; of the first stage its `load`, if it has one."""

    @property
    def folder(self) -> str:
        """The folder of the run and of its checkpoints."""
        assert self.written.output_dir is not None
        return str(Path(self.written.output_dir) / f"{self.number}-{self.name}")

    @property
    def heading(self) -> str:
        """The line that the terminal shows when the stage begins."""
        return f"stage {self.number} of {self.count}: {self.name}"

    def config(self) -> Config:
        """Return the config of the run: it loads its own last checkpoint, else that of the previous stage."""
        has_own = self.before is None or read_latest(Path(self.folder)) is not None
        load = self.folder if has_own else self.before
        return resolve(self.written.replace(output_dir=self.folder, save=self.folder, load=load))


def run_stages(path: str | Path, flags: Sequence[str] = ()) -> list[TrainingResult]:
    """Run or resume all stages of a file; `flags` are those of the command line and apply to every stage."""
    from slime.driver.loop import train

    results = []
    for stage in read_stages(path, flags):
        print(stage.heading, flush=True)
        results.append(train(stage.config()))
    return results


def read_stages(path: str | Path, flags: Sequence[str] = ()) -> list[Stage]:
    """Read the stages of a file; all checks that need no result of an earlier stage are done here."""
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
        config = parse_flags(flags, given_file=({**common, **settings, "carried": custom}, file))
        if config.num_rollout is None or config.num_rollout < 1:
            raise UserError(f"{where} needs num_rollout, the rollouts of this stage, at least 1")
        if config.output_dir is None:
            raise UserError(f"{where} needs output_dir, in which every stage has a folder")
        for flag in _DERIVED_FLAGS:
            if getattr(config, flag) is not None and not (flag == "load" and where.startswith("stage 1 ")):
                raise UserError(
                    f"{where}: {flag} follows from the stages; remove it (only the first stage may set load)"
                )
        rollouts += config.num_rollout
        before = stages[-1].folder if stages else config.load
        stages.append(Stage(name, number, len(written), config.replace(num_rollout=rollouts), before))
    return stages


def _custom(settings: JsonObject, where: str) -> JsonObject:
    """Remove the entries for plugins from the settings and return them; plugins read them as `args.<name>`."""
    custom = settings.pop("custom", None) or {}
    if not isinstance(custom, Mapping) or not all(isinstance(name, str) for name in custom):
        raise UserError(f"{where}: custom must be a mapping of names to values, which plugins read as args.<name>")
    for name in custom:
        if name in FLAG_SPECS or hasattr(Config, name) or name == "stage":
            raise UserError(f"{where}: custom.{name} has a meaning already: rename it, or set the flag outside custom")
    return dict(custom)
