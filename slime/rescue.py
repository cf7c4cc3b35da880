"""A disk that is full or gone costs a run its end, not its weights.

Invariant: when writing fails in the driver or in a trainer, and the trainers hold weights that are saved nowhere, they
are saved where the flags say if that still works, else in the first other place that takes them: the run folder, the
temporary folder, shared memory. The run then ends with a `RunFailed` that names the place.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from slime.config import Config
from slime.data.journal.database import JournalFailed
from slime.errors import RunFailed
from slime.train.checkpoints.not_written import NotWritten
from slime.train.group import TrainerGroup
from slime.weights.publisher import WeightsNotWritten

SHARED_MEMORY = Path("/dev/shm")
_NOT_OF_A_DISK = (ConnectionError, TimeoutError, ChildProcessError, InterruptedError, BlockingIOError)

logger = logging.getLogger(__name__)


class Saved(Protocol):
    """What is known of a run when a disk fails."""

    config: Config
    trainers: TrainerGroup | None
    trained: int | None
    """The rollout whose weights the trainers hold; None before the first one."""
    saved: int | None
    """The rollout whose weights are saved as the flags ask."""


@contextmanager
def weights_rescued(run: Saved) -> Iterator[None]:
    """Turn a failure of a disk into a `RunFailed` that says where the weights are."""
    try:
        yield
    except (OSError, JournalFailed, NotWritten, WeightsNotWritten) as error:
        if isinstance(error, _NOT_OF_A_DISK):
            raise
        sentence = f"the run can write no more: {error}" if isinstance(error, OSError) else str(error)
        raise RunFailed(f"{sentence}; {_rescued(run, sentence)}") from error


def _rescued(run: Saved, failure: str) -> str:
    """Save the weights somewhere else than where it just failed; a sentence about where."""
    trainers, rollout_id = run.trainers, run.trained
    if rollout_id is None or trainers is None:
        return "nothing was trained yet"
    if run.config.save is None and run.config.save_hf is None:
        return "neither --save nor --save-hf asked for the weights to be kept"
    refused: list[str] = []
    if run.saved == rollout_id or _saved_meanwhile(trainers, refused) == rollout_id:
        return f"the weights after rollout {rollout_id} were saved before"
    if not trainers.is_usable:
        return f"the trainers have failed too, and with them the weights after rollout {rollout_id}"
    places = [place for place in _places(run.config, rollout_id) if f"folder {place}:" not in failure]
    folder = _first(places, trainers.save_hf, refused)
    if folder is None:
        return f"no place takes the weights after rollout {rollout_id} ({'; '.join(refused)})"
    sentence = f"the weights after rollout {rollout_id} are saved in {folder}, a Hugging Face folder"
    if run.config.save is None:
        return sentence
    beside = f"{folder}-checkpoint"
    places = [beside] if "the checkpoint of" in failure else [run.config.save, beside]
    checkpoint = _first(places, lambda place: trainers.save(rollout_id, folder=place).parent, refused)
    return sentence if checkpoint is None else f"{sentence}, and a checkpoint to go on from with --load {checkpoint}"


def _saved_meanwhile(trainers: TrainerGroup, refused: list[str]) -> int | None:
    """The rollout of a checkpoint that was under way and is whole now."""
    if not trainers.is_usable:
        return None
    try:
        return trainers.finish_save()
    except NotWritten as error:
        logger.warning("%s", error)
        refused.append(str(error))
        return None


def _first(places: Iterable[str], save: Callable[[str], Path], refused: list[str]) -> Path | None:
    """What is saved in the first place that takes it."""
    for place in places:
        logger.warning("saving the weights in %s", place)
        try:
            return save(place)
        except NotWritten as error:
            logger.warning("%s", error)
            refused.append(str(error))
    return None


def _places(config: Config, rollout_id: int) -> Iterator[str]:
    """Where the user wants them, then anywhere that is left, under a name that is nobody's."""
    if config.save_hf is not None:
        yield config.save_hf.format(rollout_id=rollout_id)
    name = f"rescued-{time.strftime('%Y%m%d-%H%M%S')}-rollout-{rollout_id}"
    yield str(Path(config.output_dir).absolute() / name)
    for root in (Path(tempfile.gettempdir()), SHARED_MEMORY):
        if root.is_dir():
            yield str(root / f"slime-{name}")
