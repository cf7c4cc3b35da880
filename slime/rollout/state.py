"""The state of a running rollout as slime plugins know it: `GenerateState(args)` and its attributes."""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from slime.config import Config
from slime.config.plugins.view import plugin_args
from slime.data.sample import Sample
from slime.engine.http.protocol import rollout_sampling_params
from slime.rollout.gate import Gate, Ticket, evaluating, ticket_here
from slime.rollout.outcomes import Group, Produced, sampled_tokens
from slime.rollout.rewards.hub import RewardHub
from slime.rollout.rewards.remote import Teacher

Dispatch = Callable[[Config, Group, dict[str, Any]], Coroutine[Any, Any, Group]]
"""What makes a finished group of a dispatched one: `(args, group, sampling_params)`."""

_generated: ContextVar[dict[int, Produced] | None] = ContextVar("generated", default=None)


@dataclass(eq=False)
class UnderWay:
    """One group: its task, the samples it works on, copies of them as they took off, and its ticket for the gate."""

    task: asyncio.Task[Group]
    group: Group
    prompts: Group
    ticket: Ticket | None
    generated: dict[int, Produced] = field(default_factory=dict)
    """What samples (by their `id`) became when their generation ended: out of reach of reward functions."""
    was_held: bool = False
    order: int = 0
    """Of taking off, among those of one flight."""

    def lost_tokens(self, group: Group) -> int:
        """What is thrown away when `group`, which came of this one, starts over from its prompts."""
        return max(0, sampled_tokens(group) - sampled_tokens(self.prompts))


class GenerateState:
    """One per runtime. `aborted` makes samples that have not started return as ABORTED; `reset` starts a rollout.

    `gate` keeps requests of held groups back between two rollouts; `held` are those groups, until the next rollout
    takes them over. `teacher` scores finished samples for distillation; `rewardless` says that distillation alone may
    teach, so that samples without a verifier, or without the label it needs, get the reward 0. `dispatch` makes the
    groups.
    """

    processor = None  # text only

    def __init__(
        self,
        args: Config,
        *,
        dispatch: Dispatch,
        semaphore: asyncio.Semaphore,
        tokenizer: Callable[[], Any],
        engine_urls: Callable[[], Sequence[str]],
    ) -> None:
        self._config = args
        self.args = plugin_args(args)
        self.semaphore = semaphore
        self._dispatch = dispatch
        self._tokenizer = tokenizer
        self._engine_urls = engine_urls
        self.sampling_params: dict[str, Any] = copy.deepcopy(rollout_sampling_params(args))
        self.group_sampling_seeds = [args.rollout_seed + i for i in range(args.n_samples_per_prompt)]
        self.rollout_id: int | None = None
        self.aborts_asked = 0
        """How often a plugin has had the engines abort all of their requests: what these cut off is given up."""
        self.evaluation_id: int | None = None
        self.weight_version: str | None = None
        """What all engines have, as far as is known: an update under way counts when it is over."""
        self.when_updated: list[Callable[[str], None]] = []
        """Told of each version that all engines have got, from whatever thread publishes it."""
        self._dp_users: Counter[int] = Counter()
        self.teacher: Teacher | None = None
        self.rewardless = args.use_opd and args.custom_rm_path is None
        self.gate = Gate(semaphore)
        self.held: list[UnderWay] = []
        self.continuous: Any = None
        """The generation that goes on between two calls of a user's rollout function (`slime.rollout.continuous`)."""
        self.reset()

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer()

    @property
    def aborted(self) -> bool:
        """Whether the rollout was given up; never so for groups that wait at the gate, nor for an evaluation."""
        return self._aborted and ticket_here() is None and not evaluating.get()

    @aborted.setter
    def aborted(self, value: bool) -> None:
        self._aborted = value

    def weights_arrived(self, version: str) -> None:
        """All engines have this version now."""
        self.weight_version = version
        for told in list(self.when_updated):
            told(version)

    @cached_property
    def typed_hub(self) -> RewardHub:
        """Rewards by ``rm_type`` alone, for evaluation datasets that name one; created on first use."""
        return RewardHub(self._config.replace(custom_rm_path=None), args=self.args)

    def reset(self, rollout_id: int | None = None) -> None:
        """Forget the previous rollout, but for the groups it held; without a number it is the same one still."""
        self.rollout_id = self.rollout_id if rollout_id is None else rollout_id
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task[Group]] = {one.task for one in self.held}
        self._aborted = False

    def submit_generate_tasks(
        self,
        samples: Sequence[Group],
        tickets: Sequence[Ticket | None] | None = None,
        generated: Sequence[dict[int, Produced]] | None = None,
    ) -> list[asyncio.Task[Group]]:
        """Start one task per group on the running loop; the tasks are also in `pendings`.

        Groups with a ticket wait at the gate instead of being aborted. `generated` are the places where each group
        puts what it has generated.
        """
        empty = [None] * len(samples)
        contexts = [copy_context() if ticket is None else ticket.context() for ticket in tickets or empty]
        for context, place in zip(contexts, generated or empty, strict=True):
            context.run(_generated.set, place)
        tasks = [
            asyncio.create_task(
                self._dispatch(self._config, group, copy.deepcopy(self.sampling_params)),
                context=context,
            )
            for group, context in zip(samples, contexts, strict=True)
        ]
        self.pendings.update(tasks)
        self.remaining_batch_size += len(tasks)
        return tasks

    def serves(self, url: str) -> bool:
        """Whether this URL is one of the engines of this run, or of the router before them."""
        address, urls = urlsplit(url), self._engine_urls()
        here = (address.hostname, address.port)
        if urls and here == (self._config.carried["sglang_router_ip"], self._config.carried["sglang_router_port"]):
            return True
        return any(here == (one.hostname, one.port) for one in map(urlsplit, urls))

    async def cancel_held(self) -> None:
        """End the groups that wait for the next rollout; for runs that end."""
        held, self.held = self.held, []
        for one in held:
            one.task.cancel()
        await asyncio.gather(*(one.task for one in held), return_exceptions=True)
        self.pendings -= {one.task for one in held}

    @contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """The least used data-parallel rank of an engine (``--sglang-dp-size``, default 1)."""
        ranks = range(int(self._config.carried.get("sglang_dp_size", 1)))
        rank = min(ranks, key=lambda r: self._dp_users[r])
        self._dp_users[rank] += 1
        try:
            yield rank
        finally:
            self._dp_users[rank] -= 1


def note_generated(dispatched: Sample, produced: Produced) -> None:
    """The generation of a sample of the group that the running code belongs to has ended."""
    place = _generated.get()
    if place is not None and not evaluating.get():
        place[id(dispatched)] = produced
