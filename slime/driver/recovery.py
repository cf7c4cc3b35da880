"""A run that loses trainers, engines or nodes starts again by itself (`--max-restarts`).

Invariant: every life of a run has the run folder to itself, and begins when nothing of the one before it is left. It
goes on from the last checkpoint that the run has made, or as the flags say while there is none, and the journal gives
it the rollouts since then as they were. Only losses count: what a user can fix, or would repeat itself, ends the run.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from slime.cluster.factory import RAY, cluster_kind
from slime.cluster.node import NodeLost
from slime.cluster.watchdog import waiting
from slime.config import Config
from slime.config.algorithm import has_critic
from slime.engine.fleet.processes import EngineDied, EngineStartTimeout
from slime.engine.fleet.supervisor import EnginesGivenUp
from slime.engine.http.errors import EngineFailed, EngineTimeout, EngineUnreachable
from slime.engine.sglang.router import RouterDied
from slime.errors import RunFailed
from slime.storage.group_commit import JournalFailed
from slime.train.checkpoints.errors import NotWritten
from slime.train.processes import TrainerDied, TrainerTimeout
from slime.train.trainer_group import GradientsNotFinite, TrainerGroup
from slime.weights.publisher import WeightsNotWritten

LOST = (
    TrainerDied, TrainerTimeout, NodeLost, EngineDied, EngineStartTimeout, EnginesGivenUp, EngineUnreachable,
    EngineTimeout, EngineFailed, RouterDied, GradientsNotFinite,
)  # fmt: skip
"""What may go well the next time, with other processes or on other nodes."""
ON_RAY = 3
PAUSES_S = (0.0, 5.0, 30.0)
"""Before the first, second and each later restart in a row: a cluster may take that long to notice who is gone."""

logger = logging.getLogger(__name__)


class Result(Protocol):
    """What one life has to show."""

    metrics: list[dict[str, Any]]
    evaluations: list[tuple[int, dict[str, Any]]]
    seconds: float


class Life(Protocol):
    """A run from its start to its end or loss."""

    start: int
    trained: int | None
    """The last rollout it trained on."""
    saved: int | None
    """The last rollout it made a checkpoint of."""

    @property
    def result(self) -> Result: ...

    @property
    def wandb_run_id(self) -> str | None: ...


class Lives:
    """The lives of one run, in one process: how the next one starts, and whether there is one."""

    def __init__(self, config: Config) -> None:
        self.config = config
        """What the present life starts with."""
        self.restarts = 0
        given = config.max_restarts
        self._limit = given if given is not None else ON_RAY if cluster_kind(config) == RAY else 0
        self._life: Life | None = None
        self._in_a_row = 0
        self._furthest = -1
        self._metrics: list[dict[str, Any]] = []
        self._evaluations: list[tuple[int, dict[str, Any]]] = []
        self._began = time.monotonic()
        self._first: int | None = None

    def began(self, life: Life) -> None:
        """All its processes are up."""
        self._life = life
        if self._first is None:
            self._first = life.start

    def go_on_after(self, error: BaseException) -> bool:
        """Whether the run starts again after this loss; with `config` then.

        Not if it never came up: what it starts with is more likely wrong than unlucky. Nor when it has not come further
        than before in so many lives in a row.
        """
        life, self._life = self._life, None
        if self._first is None:
            return False
        if life is not None:
            self._end(life)
        if self._in_a_row >= self._limit:
            return False
        self.restarts += 1
        self._in_a_row += 1
        pause_s = PAUSES_S[min(self._in_a_row, len(PAUSES_S)) - 1]
        logger.warning(
            "restart %d of %d without progress%s, from %s: %s",
            self._in_a_row,
            self._limit,
            f" in {pause_s:g} s" if pause_s else "",
            self.config.load or "the start",
            str(error).partition("\n")[0],
        )
        with waiting("the cluster", "to notice what is lost", timeout_s=pause_s):
            time.sleep(pause_s)
        return True

    def _end(self, life: Life) -> None:
        if life.trained is not None and life.trained > self._furthest:
            self._furthest = life.trained
            self._in_a_row = 0
        self._keep(life)
        self.config = going_on(self.config, checkpointed=life.saved is not None)
        if self.config.wandb_run_id is None:
            self.config = self.config.replace(wandb_run_id=life.wandb_run_id)

    def _keep(self, life: Life) -> None:
        """What earlier lives did before this one began counts; the rest was done again."""
        assert self._first is not None
        self._metrics = self._metrics[: life.start - self._first] + life.result.metrics
        done_again = {step for step, _ in life.result.evaluations}
        before = [one for one in self._evaluations if one[0] <= life.start and one[0] not in done_again]
        self._evaluations = before + life.result.evaluations

    def complete(self, life: Life) -> None:
        """Make the result of the last life that of the whole run."""
        self._keep(life)
        life.result.metrics, life.result.evaluations = self._metrics, self._evaluations
        life.result.seconds = time.monotonic() - self._began


def going_on(config: Config, *, checkpointed: bool) -> Config:
    """The config of the next life: whole, from the run's own checkpoints, if it has made one."""
    if config.save is None or not checkpointed:
        return config
    critic = {"critic_load": config.critic_save} if has_critic(config) else {}
    return config.replace(
        load=config.save,
        ckpt_step=None,
        start_rollout_id=None,
        no_load_optim=False,
        no_load_rng=False,
        **critic,
    )


# A disk that is full or gone costs a run its end, not its weights.
#
# Invariant: when writing fails in the driver or in a trainer, and the trainers hold weights that are saved nowhere,
# they are saved where the flags say if that still works, else in the first other place that takes them: the run
# folder, the temporary folder, shared memory. The run then ends with a `RunFailed` that names the place.

SHARED_MEMORY = Path("/dev/shm")
_NOT_OF_A_DISK = (ConnectionError, TimeoutError, ChildProcessError, InterruptedError, BlockingIOError)


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
