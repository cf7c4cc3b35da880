"""What training asks of a backend, whatever it spreads the model with.

Invariant: gradients of all micro-batches and all ranks are summed, not averaged, so the loss that a step adds up is the
loss that is minimised: every token comes with its final weight, and a backend that divides multiplies back. An
objective sees whole responses, however the sequences, the vocabulary or the layers are cut. All ranks of the world call
each method together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig

from slime.config import Config
from slime.config.initial_weights import Start
from slime.models.peft_adapter import AdapterFacts
from slime.train.backends.hf_buckets import Earlier, HfBucket, HfTensor
from slime.train.checkpoints.rank_files import Part
from slime.train.checkpoints.reader import SavedTensors
from slime.train.lr_schedule import Rates
from slime.train.samples.micro_batch import MicroBatch
from slime.train.timers import Progress
from slime.train.topology import Topology

NamedTensor = tuple[str, Tensor]
POLICY = "policy"
"""The name of the weights that are trained; every other name is one of a frozen set."""

Reads = Literal["log_probs", "logits"]
"""What an objective gets: numbers [R] for the response tokens (a critic's: values), or logits [1, T, V] of the row."""


@dataclass
class Outcome:
    """What one micro-batch contributes: its share of the loss, partial sums of metrics, and maxima (never negative)."""

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)


Objective = Callable[[MicroBatch, Tensor, Tensor], Outcome]
"""Of (micro-batch, what it reads, entropies [R]); called where the last stage is, once a micro-batch, in order."""


@dataclass
class Totals:
    """Sums and maxima of the outcomes of a step, on the device; empty where there is no last stage."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        for name, value in outcome.sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        for name, value in outcome.maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value


@dataclass(frozen=True)
class Scores:
    """Of one micro-batch, for each response token: log-probs (a critic's: values), and entropies if asked for.

    On the device or on the host, wherever the backend has them.
    """

    values: Tensor
    entropy: Tensor | None = None


@dataclass(frozen=True)
class TrainedAdapter:
    """What is trained where `--lora-rank` leaves the weights as they are."""

    facts: AdapterFacts
    targets: tuple[str, ...]
    """As the flags name them."""
    peft_targets: tuple[str, ...]
    """As PEFT is told."""
    base: Path
    """The folder of the weights that it is trained beside."""

    def to_meta(self) -> dict[str, Any]:
        """What a checkpoint says of it; `slime.config.initial_weights.adapter_of` reads it."""
        facts = self.facts.to_dict()
        own = {"rank": self.facts.rank, "alpha": self.facts.alpha, "targets": list(self.targets)}
        return {**own, "base": str(self.base), "base_dtype": facts["base_dtype"]}


OPTIMIZER_STATE = "optimizer"
"""The kind of what only an update reads and writes."""


@dataclass(frozen=True)
class Resident:
    """Tensors that stay on the device between two passes, of one kind."""

    kind: str
    tensors: Sequence[Tensor]
    version: int | None = None
    """Equal for as long as they are the same; None: every update changes them."""
    is_zero: bool = False
    """Nothing but zeros between two passes, such as gradients that are kept in one buffer."""


class TrainBackend(Protocol):
    """One model that is trained, with its optimizer, and the frozen sets of weights it is compared with."""

    topology: Topology
    progress: Progress
    model_config: PretrainedConfig
    adapter: TrainedAdapter | None
    """With LoRA; None where the weights themselves are trained."""

    # passes

    def begin_step(self, rollout_id: int, step_id: int, rates: Rates) -> None:
        """The passes of an optimizer step are about to begin; `step_id` counts those of the rollout."""

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        *,
        reads: Reads = "log_probs",
        entropy: bool = False,
    ) -> Totals:
        """Gradients of the objective's losses, added to those there are. Routers follow the batches' `routing`."""

    def forward(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        weights: str = POLICY,
        entropy: bool = False,
        own_routing: bool = False,
    ) -> list[Scores]:
        """The numbers of the response tokens under a named set of weights, on every rank that has the samples.

        Routers of experts repeat what the micro-batches' `routing` says, unless the set has its `own_routing`.
        """

    # updates

    def clip_gradients(self) -> Tensor:
        """The global gradient norm before clipping, as a scalar tensor on the device."""

    def update(self, rates: Rates) -> None:
        """Apply the optimizer and drop the gradients."""

    def drop_gradients(self) -> None:
        """Forget what was computed since the last update."""

    def forget_optimizer_state(self) -> None:
        """Adam starts anew."""

    # what is on the device

    def resident(self) -> Iterator[Resident]:
        """What stays there between two passes; weights that were gathered for a pass are let go of."""

    def before_update(self, call: Callable[[], None]) -> None:
        """Have `call` made each time before the optimizer's state is used."""

    # frozen sets

    def load_frozen(self, name: str, source: Start) -> None:
        """A set of its own from a folder, in the compute dtype; it may be of another shape than the policy."""

    def snapshot(self, name: str, *, decay: float = 0.0, on_host: bool = False) -> None:
        """Make or overwrite a set: `decay` times what it was plus the rest of the policy's present weights."""

    def forget(self, name: str) -> None:
        """Drop a set."""

    def has(self, name: str) -> bool:
        """Whether there is a set of this name."""

    def using(self, name: str) -> AbstractContextManager[None]:
        """Passes inside run with this set; gradients are only ever those of the policy."""

    # what a checkpoint holds: all weights, or what is trained beside them

    def full_parameters(self, weights: str = POLICY) -> Iterator[NamedTensor]:
        """Under the names of the module, whole, each tied weight once; all ranks iterate together."""

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes of what `full_parameters` yields."""

    def state_parts(self, kinds: Sequence[str]) -> Iterator[Part]:
        """What this rank writes of the model, the optimizer and frozen sets, one kind after another.

        They are what training goes on to change; the parts that all ranks give cover everything once.
        """

    def load_parts(self, kind: str, saved: SavedTensors) -> None:
        """Overwrite what this rank has of one kind, in whatever layout it was saved; it reads no more than that."""

    # what leaves: the weights as in a Hugging Face folder, floating ones in `dtype`, with the adapter added where there
    # is one; and the adapter alone

    def hf_plan(
        self, dtype: torch.dtype, max_bytes: int, *, owners: Sequence[int] | None = None
    ) -> list[tuple[HfTensor, ...]]:
        """What `hf_buckets` is going to yield; equal on all ranks, and nothing is gathered for it."""

    def hf_buckets(
        self,
        dtype: torch.dtype,
        max_bytes: int,
        *,
        owners: Sequence[int] | None = None,
        earlier: Earlier | None = None,
    ) -> Iterator[HfBucket]:
        """Every tensor once, whole on its owner alone: one of the ranks `owners` of the world (by default any of it),
        the same each time. A tensor that is larger than `max_bytes` has a bucket of its own. All ranks iterate
        together, to the end.

        With `earlier` a backend may have its ranks compare their parts and send what changed; the buckets are the same.
        """

    def full_adapter(self) -> Iterator[NamedTensor]:
        """The matrices of the adapter under PEFT's names, whole, none without one; all ranks iterate together."""


class Builder(Protocol):
    """Makes the models of a run on the ranks there are."""

    topology: Topology
    progress: Progress

    def policy(self, config: Config, start: Start) -> TrainBackend:
        """The model that is trained, with the weights it starts from; what a checkpoint continues is put in later."""

    def critic(self, config: Config, start: Start) -> TrainBackend:
        """A value model that is trained: a policy's body with a head of one number."""
