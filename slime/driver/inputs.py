"""What a run reads before anything is started: where its prompts come from, what it is evaluated on, how long it is."""

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
from slime.config.initial_weights import continues_itself, find_start, resumes_at
from slime.config.plugins.view import plugin_args
from slime.data.chat_template import load_tokenizer
from slime.data.custom_source import make_data_source
from slime.driver.plan.plan import needs_engines
from slime.errors import RunFailed, UserError
from slime.observability.metrics import read_metrics
from slime.observability.progress import Progress
from slime.observability.summary import earlier_metrics
from slime.rollout.debug_data import DumpedRollouts
from slime.rollout.evaluate import read_eval_datasets


def rollouts_of_run(config: Config, data_source: Any) -> int:
    if config.num_rollout is not None:
        return config.num_rollout
    if isinstance(data_source, DumpedRollouts):
        return data_source.count(config.start_rollout_id or 0)
    return (config.num_epoch or 1) * int(data_source.num_rollout_per_epoch)


def open_data_source(config: Config) -> Any:
    if config.load_debug_rollout_data is not None:
        return DumpedRollouts(config)
    return make_data_source(config, plugin_args(config))


def eval_prompts(config: Config) -> dict[str, Any]:
    """What the default evaluation will ask for, read now: a broken file must not end a run at its first evaluation."""
    default = config.eval_function_path == DEFAULT_ROLLOUT_FUNCTION
    if not evaluates(config) or not needs_engines(config) or not default:
        return {}
    return read_eval_datasets(config, load_tokenizer(config.hf_checkpoint, trust_remote_code=config.trust_remote_code))


# What a finished run leaves, and how the same command finds that there is nothing left to do.


@dataclass
class TrainingResult:
    """What a finished run leaves: its folder, one merged metrics dict per rollout, and the evaluations."""

    run_dir: Path
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    seconds: float = 0.0
    peak_memory_gib: float = 0.0


def finished_before(config: Config, total: int) -> TrainingResult | None:
    """The result of a run that the same command has finished already, said on the screen; None if anything is left."""
    if not total or not continues_itself(config) or config.start_rollout_id is not None or config.debug_rollout_only:
        return None
    start = resumes_at(config)
    if start < total or (config.save_hf and not Path(config.save_hf.format(rollout_id=total - 1)).is_dir()):
        return None
    folder = Path(config.output_dir)
    records = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").is_file() else []
    result = TrainingResult(folder, *earlier_metrics(records))
    logs_itself = config.custom_eval_rollout_log_function_path is not None
    if evaluates(config) and needs_engines(config) and not logs_itself and start not in dict(result.evaluations):
        return None
    print(
        f"this run is finished: {config.save} has a checkpoint after step {start}, and --num-rollout is {total}; raise "
        f"it to go on, or choose another --save to begin anew (metrics and curves are in {folder})"
    )
    return result


# How a run ends before its time: by a signal, or by a failure whose traceback belongs into the log.

logger = logging.getLogger(__name__)


@contextmanager
def terminated_like_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end the run the way Ctrl-C does: parts are stopped in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_closed_terminal((1, 2))
            logger.warning("SIGHUP (the terminal was closed): the run ends as on Ctrl-C; nohup or tmux keep it going")
        raise KeyboardInterrupt

    numbers = set(ending_signals()) - {signal.SIGINT}
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave_closed_terminal(descriptors: Iterable[int]) -> None:
    """Let descriptors of a terminal that is gone lead nowhere: whatever a run prints while it ends must not raise."""
    for descriptor in descriptors:
        if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


@contextmanager
def failures_with_context(config: Config, progress: Progress) -> Iterator[None]:
    """The traceback of what ends a run goes to the driver's log; the terminal gets the sentence."""
    try:
        yield
    except UserError:
        raise
    except RunFailed:
        logger.info("the run failed", exc_info=True)
        raise
    except KeyboardInterrupt:
        if continues_itself(config):
            progress.message(
                "interrupted: run the same command to resume from the last checkpoint"
                if find_start(config).resumes
                else "interrupted before the first checkpoint: the same command trains from the start, on the samples "
                "that the journal has"
            )
        raise
