"""The base of the training backends, and the types that training and its backends use.

Invariant: gradients of all micro-batches and all ranks are summed, not averaged, so the loss that a step adds up is the
loss that is minimised: every token comes with its final weight, and a backend that divides multiplies back. An
objective sees whole responses, however the sequences, the vocabulary or the layers are sharded. All ranks of the world
call each method together.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from slime.config import Config
from slime.config.initial_weights import InitialWeights
from slime.errors import UserError
from slime.models.peft_adapter import AdapterConfig
from slime.storage.json_types import JsonObject
from slime.train.backends.frozen import FrozenSets, Model, ResidentTensors, ShardedModel
from slime.train.backends.hf_buckets import HfExporter
from slime.train.checkpoints.rank_files import MODEL, OPTIMIZER, SavedPart
from slime.train.checkpoints.reader import SavedTensors
from slime.train.samples.micro_batch import LossOutcome, MicroBatch, Objective
from slime.train.timers import RankProgress
from slime.train.topology import Ranks, Topology

NamedTensor = tuple[str, Tensor]
POLICY = "policy"
"""Name of the weights that are trained; every other name is that of a frozen set."""

ObjectiveInput = Literal["log_probs", "logits"]
"""Input of an objective: values [R] of the response tokens (log-probs, or a critic's values), or logits [1, T, V]."""


class Rates(NamedTuple):
    """Learning rate and weight decay of an update."""

    learning_rate: float
    weight_decay: float


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
MOMENTS, STEP = ("exp_avg", "exp_avg_sq"), "step"
"""Adam's state of a parameter; a checkpoint has the tensors `{moment}/{name}` and `step/{name}`."""


def has_optimizer_state(saved: SavedTensors, names: Sequence[str]) -> bool:
    """Return True if the checkpoint has Adam's state of these tensors; raises UserError if it has a part of it."""
    keys = [f"{part}/{name}" for part in (*MOMENTS, STEP) for name in names]
    found = [key for key in keys if key in saved]
    if found and found != keys:
        raise UserError(f"checkpoint {saved.folder} is damaged: the optimizer state of {names[0]} is incomplete")
    return bool(found)


def choose_trainable(parameters: Mapping[str, nn.Parameter], config: Config, world: Ranks, *, known: str) -> None:
    """Freeze parameters by regular expressions over their names; raises UserError if none of any rank is left to train.

    `known` describes the names to the user.
    """
    freeze, only_train = config.freeze_params_name_list, config.only_train_params_name_list
    if freeze and only_train:
        raise UserError("--freeze-params-name-list and --only-train-params-name-list exclude each other: give one")
    trained = 0
    for name, parameter in parameters.items():
        is_named = any(re.search(pattern, name) for pattern in only_train or freeze or ())
        parameter.requires_grad_(is_named if only_train else not is_named)
        trained += parameter.requires_grad
    if not world.sum(torch.tensor([trained], device=world.device)).item():
        flag = "--only-train-params-name-list" if only_train else "--freeze-params-name-list"
        raise UserError(f"{flag} leaves no parameter to train: check the patterns against {known}")


class TrainBackend(ABC, Generic[Model]):
    """One model that is trained, its optimizer, and the frozen sets of weights it is compared with."""

    adapter: TrainedAdapter | None = None
    """The LoRA adapter; None if the weights themselves are trained."""

    def __init__(
        self,
        config: Config,
        topology: Topology,
        progress: RankProgress,
        model_config: PretrainedConfig,
        policy: ShardedModel[Model],
        frozen: FrozenSets[Model],
    ) -> None:
        self.topology = topology
        self.progress = progress
        self.model_config = model_config
        self.frozen = frozen
        self._policy = policy
        self._active = policy
        self._averages = config.ref_update_decay > 0
        self._before_update: Callable[[], None] = lambda: None

    # passes

    def begin_step(self, rollout_id: int, step_id: int, rates: Rates) -> None:
        """Prepare for the passes of an optimizer step; `step_id` counts the steps of the rollout."""

    @abstractmethod
    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        *,
        reads: ObjectiveInput = "log_probs",
        entropy: bool = False,
    ) -> StepTotals:
        """Add the gradients of the objective's losses to the present ones. Routers follow the batches' `routing`."""

    @abstractmethod
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

    @property
    @abstractmethod
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, with factors of the rates: `lr_mult` and `wd_mult`."""

    @abstractmethod
    def clip_gradients(self) -> Tensor:
        """Clip the gradients and return their global norm before clipping, as a scalar tensor on the device."""

    def update(self, rates: Rates) -> None:
        """Apply the optimizer and drop the gradients."""
        self._before_update()
        for group in self.param_groups:
            group["lr"] = rates.learning_rate * group["lr_mult"]
            group["weight_decay"] = rates.weight_decay * group["wd_mult"]
        self._apply_optimizer()
        self.drop_gradients()

    @abstractmethod
    def _apply_optimizer(self) -> None:
        """Update the weights with the present gradients."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Discard the gradients accumulated since the last update."""

    def reset_optimizer_state(self) -> None:
        """Reset the optimizer's state, as before the first update."""
        self._before_update()
        self._forget_optimizer_state()

    @abstractmethod
    def _forget_optimizer_state(self) -> None: ...

    # device memory

    @abstractmethod
    def resident(self) -> Iterator[ResidentTensors]:
        """Yield the tensors that stay on the device between two passes; frees weights that were gathered for a pass."""

    def register_update_hook(self, call: Callable[[], None]) -> None:
        """Register `call` to run each time before the optimizer's state is used."""
        self._before_update = call

    # frozen sets

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Run passes inside the context with this set; gradients are only ever those of the policy."""
        before = self._active
        with nullcontext(self._policy) if name == POLICY else self.frozen.using(name) as self._active:
            try:
                yield
            finally:
                self._active = before

    # contents of a checkpoint: all weights, or only the trained ones with LoRA

    @abstractmethod
    def full_parameters(self, weights: str = POLICY) -> Iterator[NamedTensor]:
        """Yield whole parameters under the module's names, each tied weight once; all ranks iterate together."""

    @abstractmethod
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes of the tensors that `full_parameters` yields."""

    def state_parts(self, kinds: Sequence[str]) -> Iterator[SavedPart]:
        """Yield the parts of the model, the optimizer and frozen sets that this rank writes, one kind after another.

        They are the live tensors, which later training changes; the parts of all ranks cover everything once.
        """
        for kind in kinds:
            yield from self._parts_to_write(kind)

    @abstractmethod
    def _parts_to_write(self, kind: str) -> Iterator[SavedPart]: ...

    def load_parts(self, kind: str, saved: SavedTensors) -> None:
        """Overwrite this rank's parts of one kind, from any saved layout; reads only these parts."""
        is_own = kind in (MODEL, OPTIMIZER)
        with nullcontext() if is_own else self.frozen.reading(kind, saved.names, averages=self._averages):
            self._read_parts(kind, saved)

    @abstractmethod
    def _read_parts(self, kind: str, saved: SavedTensors) -> None: ...

    # export: the weights as in a Hugging Face folder, with the LoRA adapter merged if there is one; the adapter alone

    export: HfExporter[Any]

    def full_adapter(self) -> Iterator[NamedTensor]:
        """Yield the adapter's whole matrices under PEFT's names, if there is one; all ranks iterate together."""
        return iter(())


class Builder(Protocol):
    """Makes the models of a run on this run's ranks."""

    topology: Topology
    progress: RankProgress

    def policy(self, config: Config, start: InitialWeights) -> TrainBackend:
        """Build the policy with its initial weights; a resumed checkpoint is loaded into it later."""

    def critic(self, config: Config, start: InitialWeights) -> TrainBackend:
        """Build the value model that is trained: a policy's body with a scalar head."""
