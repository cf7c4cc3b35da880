"""Holds the state of a running rollout under the names that slime plugins use: `GenerateState(args)`."""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from slime.config import Config
from slime.config.flags.rollout import compares_with_label
from slime.config.plugins.view import plugin_args
from slime.data.sample import Sample
from slime.engine.http.protocol import rollout_sampling_params
from slime.rollout.gate import Gate, Ticket, current_ticket, evaluating
from slime.rollout.outcomes import Group, Produced
from slime.rollout.rewards.hub import RewardHub
from slime.rollout.rewards.remote import Teacher
from slime.storage.json_types import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Dispatch = Callable[[Group, JsonObject, dict[int, Produced] | None], Coroutine[object, object, Group]]
"""Function `(group, sampling_params, generated)` that generates and scores a dispatched group, and stores the results
of its samples in `generated` as they end (`InflightGroup.generated`)."""


@dataclass(eq=False)
class InflightGroup:
    """A dispatched group: its task, its samples, copies from before the dispatch, and its ticket for the gate.

    When the task has ended, `group` is its result.
    """

    task: asyncio.Task[Group]
    group: Group
    prompts: Group
    ticket: Ticket | None
    generated: dict[int, Produced]
    """Results by the `id` of the sample, stored when its generation ends; reward functions cannot change them."""
    version: int
    """The oldest weight version that sampled or will sample the group."""
    sampled_version: int | None = None
    """The oldest weight version that its tokens name; set when the group has finished."""
    was_held: bool = False
    order: int = 0
    """Position in the order of dispatch."""
    arrived_at: float = 0.0
    """When it was ready for a batch (time.monotonic)."""


class GenerateState:
    """State of the rollout of one runtime; `reset` starts a rollout.

    With `aborted`, samples that have not started return as ABORTED. `gate` holds requests of `held` groups until the
    next rollout takes these groups over. `teacher` scores finished samples for distillation. With `rewardless`,
    distillation may be the only training signal: samples without a verifier, or without the label it needs, get the
    reward 0. `dispatch` generates and scores the groups.
    """

    processor = None  # text only

    def __init__(
        self,
        args: Config,
        *,
        dispatch: Dispatch,
        semaphore: asyncio.Semaphore,
        tokenizer: Callable[[], PreTrainedTokenizerBase],
        engine_urls: Callable[[], Sequence[str]],
    ) -> None:
        self._config = args
        self.args = plugin_args(args)
        self.semaphore = semaphore
        self.dispatch = dispatch
        self._tokenizer = tokenizer
        self._engine_urls = engine_urls
        self.sampling_params: JsonObject = copy.deepcopy(rollout_sampling_params(args))
        self.group_sampling_seeds = [args.rollout_seed + i for i in range(args.n_samples_per_prompt)]
        self.rollout_id: int | None = None
        self.aborts_asked = 0
        """How often a plugin made the engines abort all requests; the aborted requests are not resumed."""
        self.evaluation_id: int | None = None
        self.weight_version: str | None = None
        """The version that all engines have, if known; it changes when an update is complete."""
        self.when_updated: list[Callable[[str], None]] = []
        """Callbacks run with each version that all engines have, in the thread that publishes it."""
        self._dp_users: Counter[int] = Counter()
        self.teacher: Teacher | None = None
        self.rewardless = args.use_opd and args.custom_rm_path is None
        self.gate = Gate(semaphore)
        self.held: list[InflightGroup] = []
        self.continuous: Any = None
        """The `Dispatcher` that keeps generating between two calls of a user's rollout function."""
        self.reset()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer()

    @property
    def aborted(self) -> bool:
        """True if the rollout was aborted; always False in groups with a ticket and in an evaluation."""
        return self._aborted and current_ticket() is None and not evaluating.get()

    @aborted.setter
    def aborted(self, value: bool) -> None:
        self._aborted = value

    def weights_arrived(self, version: str) -> None:
        """Record the version that all engines have now, and run the callbacks."""
        self.weight_version = version
        for callback in list(self.when_updated):
            callback(version)

    @cached_property
    def typed_hub(self) -> RewardHub:
        """Reward hub that uses ``rm_type`` alone, for evaluation datasets that set it; created on first use."""
        return RewardHub(self._config.replace(custom_rm_path=None), args=self.args)

    def needs_no_reward(self, sample: Sample) -> bool:
        """Return whether distillation is the only signal: there is no verifier, or the label it needs is missing."""
        if not self.rewardless or sample.custom_rm_path is not None:
            return False
        rm_type = sample.metadata.get("rm_type") or self.args.rm_type
        unlabelled = sample.label is None and self.args.label_key is None
        return not rm_type or (unlabelled and compares_with_label(rm_type, sample.metadata))

    def reset(self, rollout_id: int | None = None) -> None:
        """Start a rollout, and keep only the held groups of the previous one; None keeps the rollout id."""
        self.rollout_id = self.rollout_id if rollout_id is None else rollout_id
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task[Group]] = {one.task for one in self.held}
        self._aborted = False

    def submit_generate_tasks(self, samples: Sequence[Group]) -> list[asyncio.Task[Group]]:
        """Start one task per group on the running loop, and add the tasks to `pendings`."""
        tasks = [
            asyncio.create_task(self.dispatch(group, copy.deepcopy(self.sampling_params), None)) for group in samples
        ]
        self.pendings.update(tasks)
        self.remaining_batch_size += len(tasks)
        return tasks

    def serves(self, url: str) -> bool:
        """Return whether this URL belongs to an engine of this run, or to the router of these engines."""
        address, urls = urlsplit(url), self._engine_urls()
        here = (address.hostname, address.port)
        if urls and here == (self._config.carried["sglang_router_ip"], self._config.carried["sglang_router_port"]):
            return True
        return any(here == (one.hostname, one.port) for one in map(urlsplit, urls))

    async def cancel_held(self) -> None:
        """Cancel the groups that wait for the next rollout; used when the run ends."""
        held, self.held = self.held, []
        for one in held:
            one.task.cancel()
        await asyncio.gather(*(one.task for one in held), return_exceptions=True)
        self.pendings -= {one.task for one in held}

    @contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """Yield the least used data-parallel rank of an engine (``--sglang-dp-size``, default 1)."""
        ranks = range(int(self._config.carried.get("sglang_dp_size", 1)))
        rank = min(ranks, key=lambda r: self._dp_users[r])
        self._dp_users[rank] += 1
        try:
            yield rank
        finally:
            self._dp_users[rank] -= 1
