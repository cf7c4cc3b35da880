"""A run that loses trainers, engines or nodes starts again by itself (`--max-restarts`).

Invariant: every life of a run has the run folder to itself, and begins when nothing of the one before it is left. It
goes on from the last checkpoint that the run has made, or as the flags say while there is none, and the journal gives
it the rollouts since then as they were. Only losses count: what a user can fix, or would repeat itself, ends the run.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol

from slime.cluster.choose import RAY, cluster_kind
from slime.cluster.node import NodeLost
from slime.config import Config
from slime.config.algorithm import has_critic
from slime.engine.fleet.processes import EngineDied, EngineStartTimeout
from slime.engine.fleet.supervisor import EnginesGivenUp
from slime.engine.http.errors import EngineFailed, EngineTimeout, EngineUnreachable
from slime.engine.sglang.router import RouterDied
from slime.train.group import GradientsNotFinite
from slime.train.processes import TrainerDied, TrainerTimeout
from slime.waits import waiting

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
