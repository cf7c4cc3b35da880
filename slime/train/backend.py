"""Interface between training and its backends, with the types that both sides use.

Invariant: gradients of all micro-batches and all ranks are summed, not averaged, so the loss that a step adds up is the
loss that is minimised: every token comes with its final weight, and a backend that divides multiplies back. An
objective sees whole responses, however the sequences, the vocabulary or the layers are sharded. All ranks of the world
call each method together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig

from slime.config import Config
from slime.config.initial_weights import InitialWeights
from slime.models.peft_adapter import AdapterConfig
from slime.storage.json_types import JsonObject
from slime.train.backends.hf_buckets import HfBucket, HfTensor, PreviousExport
from slime.train.checkpoints.rank_files import SavedPart
from slime.train.checkpoints.reader import SavedTensors
from slime.train.lr_schedule import Rates
from slime.train.samples.micro_batch import MicroBatch
from slime.train.timers import RankProgress
from slime.train.topology import Topology

NamedTensor = tuple[str, Tensor]
POLICY = "policy"
"""Name of the weights that are trained; every other name is that of a frozen set."""

ObjectiveInput = Literal["log_probs", "logits"]
"""Input of an objective: values [R] of the response tokens (log-probs, or a critic's values), or logits [1, T, V]."""


@dataclass
class LossOutcome:
    """Result of an objective for one micro-batch: its share of the loss, partial sums and maxima (>= 0) of metrics."""

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)


Objective = Callable[[MicroBatch, Tensor, Tensor], LossOutcome]
"""Loss function of (micro-batch, values or logits, entropies [R]).

The ranks of the last pipeline stage call it once for each micro-batch, in order.
"""


@dataclass
class StepTotals:
    """Sums and maxima of a step's outcomes, on the device; empty on ranks without the last pipeline stage."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def add(self, outcome: LossOutcome) -> None:
        for name, value in outcome.sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        for name, value in outcome.maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value


@dataclass(frozen=True)
class TokenScores:
    """Log-probs (a critic's: values) of one micro-batch's response tokens, and entropies if they were requested.

    They are on the device or on the host, as the backend produces them.
    """

    values: Tensor
    entropy: Tensor | None = None


@dataclass(frozen=True)
class TrainedAdapter:
    """LoRA adapter that is trained (`--lora-rank`) while the model's own weights stay frozen."""

    facts: AdapterConfig
    targets: tuple[str, ...]
    """Target names as the flags give them."""
    peft_targets: tuple[str, ...]
    """Target names as written to PEFT's config."""
    base: Path
    """Folder of the frozen weights under the adapter."""

    def to_meta(self) -> JsonObject:
        """Entry of a checkpoint's metadata; `slime.config.initial_weights.read_checkpoint_adapter` reads it."""
        facts = self.facts.to_dict()
        own = {"rank": self.facts.rank, "alpha": self.facts.alpha, "targets": list(self.targets)}
        return {**own, "base": str(self.base), "base_dtype": facts["base_dtype"]}


OPTIMIZER_STATE = "optimizer"
"""Kind of the resident tensors that only an update reads and writes."""


@dataclass(frozen=True)
class ResidentTensors:
    """Tensors of one kind that stay on the device between two passes."""

    kind: str
    tensors: Sequence[Tensor]
    version: int | None = None
    """Changes when the tensors' values change; None: every update changes them."""
    is_zero: bool = False
    """True if they contain only zeros between two passes, such as gradients that are kept in one buffer."""


class TrainBackend(Protocol):
    """One model that is trained, its optimizer, and the frozen sets of weights it is compared with."""

    topology: Topology
    progress: RankProgress
    model_config: PretrainedConfig
    adapter: TrainedAdapter | None
    """The LoRA adapter; None if the weights themselves are trained."""

    # passes

    def begin_step(self, rollout_id: int, step_id: int, rates: Rates) -> None:
        """Prepare for the passes of an optimizer step; `step_id` counts the steps of the rollout."""

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        *,
        reads: ObjectiveInput = "log_probs",
        entropy: bool = False,
    ) -> StepTotals:
        """Add the gradients of the objective's losses to the present ones. Routers follow the batches' `routing`."""

    def forward(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        weights: str = POLICY,
        entropy: bool = False,
        own_routing: bool = False,
    ) -> list[TokenScores]:
        """Score the response tokens with a named set of weights, on every rank that has the samples.

        Routers of experts follow the micro-batches' `routing`; with `own_routing` they choose themselves.
        """

    # updates

    def clip_gradients(self) -> Tensor:
        """Clip the gradients and return their global norm before clipping, as a scalar tensor on the device."""

    def update(self, rates: Rates) -> None:
        """Apply the optimizer and drop the gradients."""

    def drop_gradients(self) -> None:
        """Discard the gradients accumulated since the last update."""

    def reset_optimizer_state(self) -> None:
        """Reset the optimizer's state, as before the first update."""

    # device memory

    def resident(self) -> Iterator[ResidentTensors]:
        """Yield the tensors that stay on the device between two passes; frees weights that were gathered for a pass."""

    def register_update_hook(self, call: Callable[[], None]) -> None:
        """Register `call` to run each time before the optimizer's state is used."""

    # frozen sets

    def load_frozen(self, name: str, source: InitialWeights) -> None:
        """Load a set from a folder, in the compute dtype; its shape may differ from the policy's."""

    def snapshot(self, name: str, *, decay: float = 0.0, on_host: bool = False) -> None:
        """Make or overwrite a set: `decay * set + (1 - decay) * policy`, with the policy's present weights."""

    def forget(self, name: str) -> None:
        """Drop a set."""

    def has(self, name: str) -> bool:
        """Return True if there is a set of this name."""

    def using(self, name: str) -> AbstractContextManager[None]:
        """Run passes inside the context with this set; gradients are only ever those of the policy."""

    # contents of a checkpoint: all weights, or only the trained ones with LoRA

    def full_parameters(self, weights: str = POLICY) -> Iterator[NamedTensor]:
        """Yield whole parameters under the module's names, each tied weight once; all ranks iterate together."""

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes of the tensors that `full_parameters` yields."""

    def state_parts(self, kinds: Sequence[str]) -> Iterator[SavedPart]:
        """Yield the parts of the model, the optimizer and frozen sets that this rank writes, one kind after another.

        They are the live tensors, which later training changes; the parts of all ranks cover everything once.
        """

    def load_parts(self, kind: str, saved: SavedTensors) -> None:
        """Overwrite this rank's parts of one kind, from any saved layout; reads only these parts."""

    # export: the weights as in a Hugging Face folder, floating ones in `dtype`, with the LoRA adapter merged if there
    # is one; and the adapter alone

    def hf_plan(
        self, dtype: torch.dtype, max_bytes: int, *, owners: Sequence[int] | None = None
    ) -> list[tuple[HfTensor, ...]]:
        """Layouts of the buckets that `hf_buckets` will yield; equal on all ranks, and computed without gathering."""

    def hf_buckets(
        self,
        dtype: torch.dtype,
        max_bytes: int,
        *,
        owners: Sequence[int] | None = None,
        earlier: PreviousExport | None = None,
    ) -> Iterator[HfBucket]:
        """Yield every tensor once, whole on its owner alone.

        The owner is one of the world's ranks `owners` (default: all ranks), the same in every call. A tensor larger
        than `max_bytes` gets a bucket of its own. All ranks iterate together, to the end. With `earlier` a backend may
        have its ranks compare their parts and send only the changes; the buckets are the same.
        """

    def full_adapter(self) -> Iterator[NamedTensor]:
        """Yield the adapter's whole matrices under PEFT's names, if there is one; all ranks iterate together."""


class Builder(Protocol):
    """Makes the models of a run on this run's ranks."""

    topology: Topology
    progress: RankProgress

    def policy(self, config: Config, start: InitialWeights) -> TrainBackend:
        """Build the policy with its initial weights; a resumed checkpoint is loaded into it later."""

    def critic(self, config: Config, start: InitialWeights) -> TrainBackend:
        """Build the value model that is trained: a policy's body with a scalar head."""
