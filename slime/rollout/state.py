"""The state of a running rollout as slime plugins know it: `GenerateState(args)` and its attributes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from slime.engine.protocol import rollout_sampling_params
from slime.rollout.base_types import Group
from slime.rollout.rewards.hub import RewardHub

if TYPE_CHECKING:
    from slime.config import Config
    from slime.rollout.runtime import RolloutRuntime
    from slime.rollout.teacher import Teacher


class GenerateState:
    """One per runtime. `aborted` makes samples that have not started return as ABORTED; `reset` starts a rollout.

    `teacher` scores finished samples for distillation; `rewardless` says that distillation is all there is, so that
    samples without a verifier of their own get the reward 0.
    """

    processor = None  # text only

    def __init__(self, args: Config, runtime: RolloutRuntime) -> None:
        self.args = args
        self._runtime = runtime
        self.sampling_params: dict[str, Any] = rollout_sampling_params(args)
        self.group_sampling_seeds = [args.rollout_seed + i for i in range(args.n_samples_per_prompt)]
        self.rollout_id: int | None = None
        self._dp_users: Counter[int] = Counter()
        self.teacher: Teacher | None = None
        self.rewardless = args.use_opd and args.rm_type is None and args.custom_rm_path is None
        self.reset()

    @property
    def tokenizer(self) -> Any:
        return self._runtime.tokenizer

    @property
    def semaphore(self) -> asyncio.Semaphore:
        return self._runtime.semaphore

    @cached_property
    def typed_hub(self) -> RewardHub:
        """Rewards by ``rm_type`` alone, for evaluation datasets that name one; created on first use."""
        return RewardHub(self.args.replace(custom_rm_path=None))

    def reset(self, rollout_id: int | None = None) -> None:
        """Forget the previous rollout."""
        self.rollout_id = rollout_id
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task[Group]] = set()
        self.aborted = False

    def submit_generate_tasks(self, samples: Sequence[Group]) -> list[asyncio.Task[Group]]:
        """Start one task per group on the running loop; the tasks are also in `pendings`."""
        from slime.rollout.group import generate_and_rm_group

        tasks = [
            asyncio.create_task(generate_and_rm_group(self.args, group, self.sampling_params.copy()))
            for group in samples
        ]
        self.pendings.update(tasks)
        self.remaining_batch_size += len(tasks)
        return tasks

    @contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """The least used data-parallel rank of an engine (``--sglang-dp-size``, default 1)."""
        ranks = range(int(self.args.carried.get("sglang_dp_size", 1)))
        rank = min(ranks, key=lambda r: self._dp_users[r])
        self._dp_users[rank] += 1
        try:
            yield rank
        finally:
            self._dp_users[rank] -= 1
