"""Writes metrics to TensorBoard and Weights & Biases.

Invariant of TensorBoard: its event files hold exactly the records of metrics.jsonl and completions.jsonl. When a run is
resumed they are rewritten from the kept records, so that no point of a repeated rollout is shown twice. Event files of
other programs in the folder stay.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from slime.config import Config
from slime.errors import UserError
from slime.storage.json_types import JsonMapping

COLUMNS = ("prompt", "response", "label", "reward")
"""Columns of a table of completions."""

_OWN_EVENTS = ".slime"
"""Suffix of slime's event files."""
_WANDB_KEY = "WANDB_API_KEY"
_NOT_A_METRIC = {"kind", "step", "rollout_id", "time"}
_MARKDOWN = r"\`*_{}[]()#+-.!|<>&~$:"


def numeric_metrics(record: JsonMapping) -> dict[str, float]:
    """Return the numeric metrics of a record, without nulls and texts."""
    return {
        name: value for name, value in record.items() if name not in _NOT_A_METRIC and isinstance(value, int | float)
    }


class TensorBoardTracker:
    """Writes event files in `folder`, beginning with the kept records."""

    def __init__(self, folder: Path, kept: Sequence[JsonMapping], completions: Sequence[JsonMapping] = ()) -> None:
        from torch.utils.tensorboard import SummaryWriter

        for path in folder.glob(f"events.out.tfevents.*{_OWN_EVENTS}"):
            path.unlink()
        self._writer = SummaryWriter(str(folder), filename_suffix=_OWN_EVENTS)
        for record in kept:
            self.write(record)
        for record in completions:
            self.write_completions(record)

    def write(self, record: JsonMapping) -> None:
        for name, value in numeric_metrics(record).items():
            self._writer.add_scalar(name, value, global_step=record["step"], walltime=record["time"])

    def write_completions(self, record: JsonMapping) -> None:
        text = markdown_table(record["rows"])
        name = f"{record['name']}/completions"
        self._writer.add_text(name, text, global_step=record["step"], walltime=record["time"])

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Writes a W&B run. The axis of a metric is the step of its prefix (`perf/step` for `perf/*`); a metric without a
    prefix has the step of its record's kind."""

    def __init__(self, config: Config, folder: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "--use-wandb needs the package wandb, which is not installed: pip install 'slime[wandb]' or drop it"
            ) from error
        place = Path(config.wandb_dir or os.environ.get("WANDB_DIR") or folder)
        place.mkdir(parents=True, exist_ok=True)  # W&B writes to a temporary folder if it does not exist
        self._table = wandb.Table
        with _api_key(config.wandb_key):
            if config.wandb_host:
                wandb.login(host=config.wandb_host)
            self._run = wandb.init(
                project=config.wandb_project or "slime",
                entity=config.wandb_team,
                group=config.wandb_group,
                name=config.run_name,
                dir=str(place),
                mode=config.wandb_mode,
                id=config.wandb_run_id,
                resume="allow",
                config=config.to_dict(),
            )
        self.run_id: str = self._run.id
        self._declared: set[str] = set()
        self._samples, self._per_update = 1, 1
        if config.wandb_always_use_train_step:
            self._samples = config.rollout_batch_size * config.n_samples_per_prompt
            self._per_update = config.global_batch_size

    def write(self, record: JsonMapping) -> None:
        self._log(numeric_metrics(record), record)

    def write_completions(self, record: JsonMapping) -> None:
        rows = [[row[column] for column in COLUMNS] for row in record["rows"]]
        table = self._table(columns=list(COLUMNS), data=rows, allow_mixed_types=True)  # rewards may be numbers or texts
        self._log({f"{record['name']}/completions": table}, record)

    def close(self) -> None:
        self._run.finish()

    def _log(self, values: Mapping[str, object], record: JsonMapping) -> None:
        """Log values with the steps of all their axes; an axis is declared when it first appears."""
        bare = {name for name in values if "/" not in name}
        axes = {name.partition("/")[0] for name in values.keys() - bare} | ({record["kind"]} if bare else set())
        for axis in sorted(axes - self._declared):
            self._run.define_metric(f"{axis}/step")
            self._run.define_metric(f"{axis}/*", step_metric=f"{axis}/step")
        for name in sorted(bare - self._declared):
            self._run.define_metric(name, step_metric=f"{record['kind']}/step")
        self._declared |= axes | bare
        step = (
            record["step"]
            if record["kind"] in ("train", "plugin")
            else record["step"] * self._samples // self._per_update
        )
        self._run.log({**values, **{f"{axis}/step": step for axis in axes}})


@contextmanager
def _api_key(key: str | None) -> Iterator[None]:
    """Set the variable from which W&B reads its key while it starts; `wandb.login(key=)` would write it to a file."""
    before = os.environ.get(_WANDB_KEY)
    if key is not None:
        os.environ[_WANDB_KEY] = key
    try:
        yield
    finally:
        if key is not None:
            os.environ.pop(_WANDB_KEY)
            if before is not None:
                os.environ[_WANDB_KEY] = before


def markdown_table(rows: Sequence[JsonMapping]) -> str:
    """Format completions as a Markdown table, with all special characters escaped."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in rows:
        cells = []
        for value in (row[column] for column in COLUMNS):
            text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
            escaped = "".join(f"&#{ord(character)};" if character in _MARKDOWN else character for character in text)
            cells.append("<br>".join(escaped.splitlines()))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
