"""Recovery of a run: automatic restarts after a loss (`--max-restarts`), and saving the weights when a disk fails.

Invariant: every attempt of a run has the run folder to itself, and starts when no process of the previous attempt is
left. It resumes from the last checkpoint that the run has made, or as the flags say while there is none, and the
journal gives it the rollouts since then as they were. Only the loss of a process or node restarts a run: an error that
the user can fix, or that would repeat itself, ends it.

Invariant: when writing fails in the driver or in a trainer, and the trainers hold weights that are not saved yet, they
are saved where the flags say if that still works, else in the first other place that can be written: the run folder,
the temporary folder, shared memory. The run then ends with a `RunFailed` that names the place.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from slime.cluster.factory import RAY, cluster_kind
from slime.cluster.node import NodeLost
from slime.cluster.watchdog import waiting
from slime.config import Config
from slime.config.algorithm import has_critic
from slime.driver.inputs import TrainingResult
from slime.engine.fleet.processes import EngineDied, EngineStartTimeout
from slime.engine.fleet.supervisor import EnginesGivenUp
from slime.engine.http.errors import EngineFailed, EngineTimeout, EngineUnreachable
from slime.engine.sglang.router import RouterDied
from slime.errors import RunFailed
from slime.storage.json_types import JsonObject
from slime.storage.sqlite_store import JournalFailed
from slime.train.checkpoints.errors import NotWritten
from slime.train.processes import TrainerDied, TrainerTimeout
from slime.train.trainer_group import GradientsNotFinite, TrainerGroup
from slime.weights.publisher import WeightsNotWritten

RESTARTABLE_ERRORS = (
    TrainerDied, TrainerTimeout, NodeLost, EngineDied, EngineStartTimeout, EnginesGivenUp, EngineUnreachable,
    EngineTimeout, EngineFailed, RouterDied, GradientsNotFinite,
)  # fmt: skip
"""Errors after which a restart may succeed, with other processes or on other nodes."""
RAY_MAX_RESTARTS = 3
"""Default of --max-restarts on Ray."""
RESTART_DELAYS_S = (0.0, 5.0, 30.0)
"""Seconds before the first, second and each later restart in a row: a cluster may take that long to notice a loss."""
SHARED_MEMORY = Path("/dev/shm")
_NOT_DISK_ERRORS = (ConnectionError, TimeoutError, ChildProcessError, InterruptedError, BlockingIOError)

logger = logging.getLogger(__name__)


class RunAttempt(Protocol):
    """One attempt of a run, from its start to its end or loss."""

    config: Config
    trainers: TrainerGroup | None
    start: int
    trained: int | None
    """The last rollout that it trained on, whose weights the trainers hold."""
    saved: int | None
    """The last rollout whose weights are saved as the flags say."""

    @property
    def result(self) -> TrainingResult: ...

    @property
    def wandb_run_id(self) -> str | None: ...


class RestartPolicy:
    """Decides whether a run starts again after a loss, and joins the results of its attempts."""

    def __init__(self, config: Config) -> None:
        self.config = config
        """The config of the present attempt."""
        self.restarts = 0
        given = config.max_restarts
        self._limit = given if given is not None else RAY_MAX_RESTARTS if cluster_kind(config) == RAY else 0
        self._life: RunAttempt | None = None
        self._in_a_row = 0
        self._furthest = -1
        self._metrics: list[JsonObject] = []
        self._evaluations: list[tuple[int, JsonObject]] = []
        self._began = time.monotonic()
        self._first: int | None = None

    def began(self, life: RunAttempt) -> None:
        """Register an attempt whose processes are all up."""
        self._life = life
        if self._first is None:
            self._first = life.start

    def prepare_restart(self, error: BaseException) -> bool:
        """Wait before the next attempt and return True, with its flags in `config`; False if the run is to end.

        A run that never came up is not restarted: its inputs are probably wrong. Neither is a run whose last
        --max-restarts attempts trained on no further rollout.
        """
        life, self._life = self._life, None
        if self._first is None:
            return False
        if life is not None:
            if life.trained is not None and life.trained > self._furthest:
                self._furthest = life.trained
                self._in_a_row = 0
            self._keep(life)
            self.config = config_for_restart(self.config, checkpointed=life.saved is not None)
            if self.config.wandb_run_id is None:
                self.config = self.config.replace(wandb_run_id=life.wandb_run_id)
        if self._in_a_row >= self._limit:
            return False
        self.restarts += 1
        self._in_a_row += 1
        pause_s = RESTART_DELAYS_S[min(self._in_a_row, len(RESTART_DELAYS_S)) - 1]
        logger.warning(
            "restart %d of %d without progress%s, from %s: %s",
            self._in_a_row,
            self._limit,
            f" in {pause_s:g} s" if pause_s else "",
            self.config.load or "the start",
            str(error).partition("\n")[0],
        )
        with waiting("the cluster", "to notice the loss", timeout_s=pause_s):
            time.sleep(pause_s)
        return True

    def _keep(self, life: RunAttempt) -> None:
        """Append the results of an attempt to those of earlier ones, without the steps that it repeated."""
        assert self._first is not None
        self._metrics = self._metrics[: life.start - self._first] + life.result.metrics
        done_again = {step for step, _ in life.result.evaluations}
        before = [one for one in self._evaluations if one[0] <= life.start and one[0] not in done_again]
        self._evaluations = before + life.result.evaluations

    def complete(self, life: RunAttempt) -> None:
        """Replace the result of the last attempt by that of the whole run."""
        self._keep(life)
        life.result.metrics, life.result.evaluations = self._metrics, self._evaluations
        life.result.seconds = time.monotonic() - self._began


def config_for_restart(config: Config, *, checkpointed: bool) -> Config:
    """Return the config of the next attempt: it resumes the run's own checkpoint completely, if there is one."""
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


@contextmanager
def rescue_weights(run: RunAttempt) -> Iterator[None]:
    """On a write failure save the weights elsewhere, and raise a `RunFailed` that says where they are."""
    try:
        yield
    except (OSError, JournalFailed, NotWritten, WeightsNotWritten) as error:
        if isinstance(error, _NOT_DISK_ERRORS):
            raise
        sentence = f"cannot write to disk: {error}" if isinstance(error, OSError) else str(error)
        raise RunFailed(f"{sentence}; {_save_elsewhere(run, sentence)}") from error


def _save_elsewhere(run: RunAttempt, failure: str) -> str:
    """Save the weights in another place than the one that failed; return the sentence that names it."""
    trainers, rollout_id = run.trainers, run.trained
    if rollout_id is None or trainers is None:
        return "nothing was trained yet"
    if run.config.save is None and run.config.save_hf is None:
        return "the weights are not saved, as neither --save nor --save-hf is set"
    refused: list[str] = []
    saved = run.saved
    if saved != rollout_id and trainers.is_usable:
        try:
            saved = trainers.finish_save()  # of a checkpoint that is being written in the background
        except NotWritten as error:
            logger.warning("%s", error)
            refused.append(str(error))
    if saved == rollout_id:
        return f"the weights after rollout {rollout_id} were saved before"
    if not trainers.is_usable:
        return f"the trainers failed too, so the weights after rollout {rollout_id} are lost"
    # the folder of --save-hf, then unused folders in the run folder, the temporary folder, shared memory
    candidates = [] if run.config.save_hf is None else [run.config.save_hf.format(rollout_id=rollout_id)]
    name = f"rescued-{time.strftime('%Y%m%d-%H%M%S')}-rollout-{rollout_id}"
    candidates.append(str(Path(run.config.output_dir).absolute() / name))
    roots = (Path(tempfile.gettempdir()), SHARED_MEMORY)
    candidates += [str(root / f"slime-{name}") for root in roots if root.is_dir()]
    places = [place for place in candidates if f"folder {place}:" not in failure]
    folder = _first(places, trainers.save_hf, refused)
    if folder is None:
        return f"could not save the weights after rollout {rollout_id} anywhere ({'; '.join(refused)})"
    sentence = f"the weights after rollout {rollout_id} are saved in {folder}, a Hugging Face folder"
    if run.config.save is None:
        return sentence
    neighbour = f"{folder}-checkpoint"
    places = [neighbour] if "the checkpoint of" in failure else [run.config.save, neighbour]
    checkpoint = _first(places, lambda place: trainers.save(rollout_id, folder=place).parent, refused)
    return sentence if checkpoint is None else f"{sentence}, and a checkpoint to resume from with --load {checkpoint}"


def _first(places: Iterable[str], save: Callable[[str], Path], refused: list[str]) -> Path | None:
    """Save in the first place where it succeeds and return the folder; None if all fail."""
    for place in places:
        logger.warning("saving the weights in %s", place)
        try:
            return save(place)
        except NotWritten as error:
            logger.warning("%s", error)
            refused.append(str(error))
    return None
