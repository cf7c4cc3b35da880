"""Inputs, result and shutdown of a run.

The data source, the evaluation prompts and the number of rollouts are read before anything is started. A run that the
same command has finished already is recognised here. Signals and failures end a run in order, and the traceback of a
failure goes to the driver's log.
"""

from __future__ import annotations

import logging
import os
import signal
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from slime.cluster.watchdog import ending_signals
from slime.config import Config
from slime.config.datasets import evaluates
from slime.config.flags.rollout import DEFAULT_ROLLOUT_FUNCTION
from slime.config.initial_weights import find_initial_weights, first_rollout_id, resumes_own_checkpoints
from slime.config.plugins.view import plugin_args
from slime.data.chat_template import load_tokenizer
from slime.data.custom_source import make_data_source
from slime.driver.plan.plan import needs_engines
from slime.errors import RunFailed, UserError
from slime.observability.metrics import read_metrics
from slime.observability.progress import Progress
from slime.observability.summary import merge_records
from slime.rollout.debug_data import DumpedRollouts
from slime.rollout.evaluate import EvalPrompts, read_eval_datasets
from slime.storage.json_types import JsonObject

logger = logging.getLogger(__name__)


def count_rollouts(config: Config, data_source: Any) -> int:
    """Return the number of rollouts: --num-rollout, the number of dumps, or the epochs of the data source."""
    if config.num_rollout is not None:
        return config.num_rollout
    if isinstance(data_source, DumpedRollouts):
        return data_source.count(config.start_rollout_id or 0)
    return (config.num_epoch or 1) * int(data_source.num_rollout_per_epoch)


def open_data_source(config: Config) -> Any:
    """Open the dumped rollouts of --load-debug-rollout-data, or the data source of the flags."""
    if config.load_debug_rollout_data is not None:
        return DumpedRollouts(config)
    return make_data_source(config, plugin_args(config))


def read_eval_prompts(config: Config) -> dict[str, EvalPrompts]:
    """Read the datasets of the default evaluation now: a broken file must not end a run at its first evaluation."""
    default = config.eval_function_path == DEFAULT_ROLLOUT_FUNCTION
    if not evaluates(config) or not needs_engines(config) or not default:
        return {}
    return read_eval_datasets(config, load_tokenizer(config.hf_checkpoint, trust_remote_code=config.trust_remote_code))


@dataclass
class TrainingResult:
    """Result of a finished run: its folder, one merged metrics dict per rollout, and the evaluations."""

    run_dir: Path
    metrics: list[JsonObject] = field(default_factory=list)
    evaluations: list[tuple[int, JsonObject]] = field(default_factory=list)
    seconds: float = 0.0
    peak_memory_gib: float = 0.0


def find_finished_result(config: Config, total: int) -> TrainingResult | None:
    """Return the result of a run that the same command has finished already, and print that it is; else None."""
    if (
        not total
        or not resumes_own_checkpoints(config)
        or config.start_rollout_id is not None
        or config.debug_rollout_only
    ):
        return None
    start = first_rollout_id(config)
    if start < total or (config.save_hf and not Path(config.save_hf.format(rollout_id=total - 1)).is_dir()):
        return None
    folder = Path(config.output_dir)
    records = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").is_file() else []
    result = TrainingResult(folder, *merge_records(records))
    logs_itself = config.custom_eval_rollout_log_function_path is not None
    if evaluates(config) and needs_engines(config) and not logs_itself and start not in dict(result.evaluations):
        return None
    print(
        f"this run is finished: {config.save} has a checkpoint after step {start}, and --num-rollout is {total}; raise "
        f"it to continue, or choose another --save to start over (metrics and curves are in {folder})"
    )
    return result


@contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the run as Ctrl-C does: components are stopped in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            redirect_closed_terminal((1, 2))
            logger.warning(
                "SIGHUP (the terminal was closed): the run ends as on Ctrl-C; start it under nohup or tmux to keep it "
                "running"
            )
        raise KeyboardInterrupt

    numbers = set(ending_signals()) - {signal.SIGINT}
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def redirect_closed_terminal(descriptors: Iterable[int]) -> None:
    """Redirect descriptors of a closed terminal to /dev/null, so that printing during shutdown does not raise."""
    for descriptor in descriptors:
        if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


@contextmanager
def log_run_failures(config: Config, progress: Progress) -> Iterator[None]:
    """Write the traceback of a failure to the driver's log; the terminal shows only the message."""
    try:
        yield
    except UserError:
        raise
    except RunFailed:
        logger.info("the run failed", exc_info=True)
        raise
    except KeyboardInterrupt:
        if resumes_own_checkpoints(config):
            progress.message(
                "interrupted: run the same command to resume from the last checkpoint"
                if find_initial_weights(config).resumes
                else "interrupted before the first checkpoint: the same command trains from the start, on the samples "
                "that the journal has"
            )
        raise
