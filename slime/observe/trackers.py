"""The views of the metrics record that other programs show: TensorBoard and Weights & Biases.

The invariant of the TensorBoard view: its event files hold exactly what metrics.jsonl holds. When a run is resumed they
are written anew from the kept records, so that no point of a rollout done again is shown twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.config import Config
from slime.errors import UserError

_NOT_A_METRIC = {"kind", "step", "rollout_id", "time"}


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The numeric metrics of a record; nulls and texts are left out."""
    return {
        name: value for name, value in record.items() if name not in _NOT_A_METRIC and isinstance(value, int | float)
    }


class TensorBoardTracker:
    """Event files under `folder`, starting with the records already kept."""

    def __init__(self, folder: Path, kept: Sequence[Mapping[str, Any]]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        for path in folder.glob("events.out.tfevents.*"):
            path.unlink()
        self._writer = SummaryWriter(str(folder))
        for record in kept:
            self.write(record)

    def write(self, record: Mapping[str, Any]) -> None:
        for name, value in numbers_of(record).items():
            self._writer.add_scalar(name, value, global_step=record["step"], walltime=record["time"])

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A W&B run; each kind of record has its own step axis (`train/step`, `rollout/step`, ...)."""

    def __init__(self, config: Config) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "--use-wandb needs the package wandb, which is not installed: pip install 'slime[wandb]' or drop it"
            ) from error
        if config.wandb_host:
            wandb.login(host=config.wandb_host)
        self._run = wandb.init(
            project=config.wandb_project or "slime",
            entity=config.wandb_team,
            group=config.wandb_group,
            name=config.run_name,
            dir=config.wandb_dir,
            mode=config.wandb_mode,
            id=config.wandb_run_id,
            resume="allow",
            config=config.to_dict(),
        )
        for kind in ("train", "rollout", "eval", "perf"):
            self._run.define_metric(f"{kind}/step")
            self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log({**numbers_of(record), f"{record['kind']}/step": record["step"]})

    def close(self) -> None:
        self._run.finish()
