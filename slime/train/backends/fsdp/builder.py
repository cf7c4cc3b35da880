"""Builds sharded models from Hugging Face folders, and checks their packed forward first.

Invariant: a model is built without its weights, on the meta device; each rank reads its own part of them when the model
is sharded, so no process ever has a whole copy.

Ranks are numbered with context innermost, then the ranks that share one copy of the model, then the copies. Parameters
are sharded over all ranks of a copy, including those of a context group, and equal on the ranks of other copies.

`check_packed` compares packed rows with transformers' eager forward before training. Invariant: a model that passes
gave, on a small model of its config, the log-probs and entropies of transformers at every position of sequences that
are longer than any window, packed into one row, with shared prompts and without.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel

from slime.algorithms.logprobs import KEPT_BYTES
from slime.config import Config
from slime.config.batch import model_replica_size
from slime.config.initial_weights import InitialWeights, adapter_base_path
from slime.errors import UserError
from slime.models.folder import first_line
from slime.models.heads import output_projection
from slime.models.meta_model import load_meta_model
from slime.models.small import plain_logits, sample_tokens, small_model
from slime.models.tensor_sources import memory_source
from slime.models.torch_dist.hugging_face import checkpoint_sources
from slime.train.backends.fsdp.attention import ATTENTION_NAME, register_packed_attention
from slime.train.backends.fsdp.backend import FSDPBackend
from slime.train.backends.fsdp.lora import lora_of, put_adapter
from slime.train.backends.fsdp.packed_model import PackedModel, PolicyModel, ValueModel
from slime.train.checkpoints.folder import CheckpointFolder
from slime.train.samples.packing import pack
from slime.train.timers import RankProgress
from slime.train.topology import Ranks, Topology


def load_packed(config: Config, source: InitialWeights, dtype: torch.dtype, *, value_head: bool = False) -> PackedModel:
    """Load the model of the source's folder (of --hf-checkpoint if the source is a checkpoint), without its weights.

    `dtype` is float32 for a trained model (its master weights) and the compute dtype for a frozen one. With
    `value_head` it is a critic: the body of a language model with a new head.
    """
    register_packed_attention()
    folder = source.hf_folder or Path(config.hf_checkpoint)
    outline = load_meta_model(
        folder,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        trust_remote_code=config.trust_remote_code,
        weights=None if source.megatron is None else checkpoint_sources(folder, source.megatron),
    )
    if value_head:
        outline.put_value_head()
        return ValueModel(outline.model, outline.sources, gdn_backend=config.qwen_gdn_backend)
    sampled = config.loss_type != "sft_loss"  # supervised answers were not sampled at a temperature
    keep = config.log_probs_keep_gib
    policy = PolicyModel(
        outline.model,
        outline.sources,
        temperature=config.rollout_temperature if sampled else 1.0,
        chunk_rows=config.log_probs_chunk_size,
        keep_bytes=KEPT_BYTES if keep is None else int(keep * 2**30),
        gdn_backend=config.qwen_gdn_backend,
    )
    if config.use_routing_replay:
        policy.enable_routing_replay()
    return policy


def build_sharded_topology(world: Ranks, *, copy_size: int, context_size: int = 1) -> tuple[Topology, DeviceMesh]:
    """Form the groups of ranks: `copy_size` ranks share a copy of the model, `context_size` of these share samples.

    Parameters are sharded over the mesh, which has two dimensions (copies, ranks of a copy) if there are several
    copies. The flags have been checked for divisibility. All ranks form all groups together, in the same order.
    """
    device = world.device
    num_copies = world.size // copy_size
    sizes, names = ((num_copies, copy_size), ("replicate", "shard")) if num_copies > 1 else ((copy_size,), ("shard",))
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
    alone = Ranks(0, 1, device)
    if context_size == 1:
        return Topology(world=world, data=world, context=alone, model=alone), mesh
    by_context = [list(range(first, first + context_size)) for first in range(0, world.size, context_size)]
    by_data = [list(range(place, world.size, context_size)) for place in range(context_size)]
    own_groups: list[Ranks] = []
    for groups in (by_context, by_data):
        own, _ = dist.new_subgroups_by_enumeration(groups)
        assert own is not None
        own_groups.append(Ranks.of(own, device))
    context, data = own_groups
    return Topology(world=world, data=data, context=context, model=alone), mesh


_TOLERANCE = 1e-3
"""Largest error of log-probs, in standard deviations of the position's log-probs; rounding errors are about 1e-5."""
_DRAWS = 3
"""Draws of tokens tried: a token between two equally good experts may differ in one, a wrong computation in all."""


def check_packed(model: PreTrainedModel) -> None:
    """Raise UserError if a packed row of a model of this class and config would be computed wrongly."""
    register_packed_attention()
    worst = np.inf
    for seed in range(_DRAWS):
        small = small_model(type(model), model.config)
        try:
            worst = min(worst, _difference(small, sample_tokens(seed)))
        except UserError:
            raise
        except Exception as cause:  # the family's code may raise anything
            raise UserError(
                f"--train-backend fsdp cannot compute packed rows of {model.config.model_type} models "
                f"({first_line(cause)}): choose another model"
            ) from cause
        if worst <= _TOLERANCE:
            return
    raise UserError(
        f"--train-backend fsdp computes {model.config.model_type} models wrongly (a log-prob of a small one differs by "
        f"{worst:.2g} standard deviations from transformers' eager forward): choose another model"
    )


@torch.no_grad()
def _difference(small: PreTrainedModel, sequences: list[list[int]]) -> float:
    """Largest error of a log-prob or an entropy, in standard deviations of the log-probs at its position."""
    expected, entropies, spread = [], [], []
    for tokens, logits in zip(sequences, plain_logits(small, sequences), strict=True):
        log_probs = logits[:-1].log_softmax(-1)
        expected.append(log_probs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0])
        entropies.append(-(log_probs.exp() * log_probs).sum(-1))
        spread.append(log_probs.std(-1))
    small.set_attn_implementation(ATTENTION_NAME)
    policy = PolicyModel(small)
    arrays = [np.array(tokens) for tokens in sequences]
    worst = 0.0
    for share_prompts in (False, True):
        found = policy(pack(arrays, [len(tokens) - 1 for tokens in arrays], share_prompts=share_prompts))
        for numbers, wanted in zip(found, (expected, entropies), strict=True):
            error = float(((numbers - torch.cat(wanted)).abs() / torch.cat(spread).clamp(min=1e-6)).max())
            worst = max(worst, error if np.isfinite(error) else float("inf"))
    return worst


class FSDPBuilder:
    """Builds a run's FSDP2 models; master weights are float32, frozen weights are in the compute dtype."""

    def __init__(self, config: Config, world: Ranks, *, compute_dtype: torch.dtype, progress: RankProgress) -> None:
        self._config = config
        self._compute_dtype = compute_dtype
        self.progress = progress
        self.topology, self._mesh = build_sharded_topology(
            world, copy_size=model_replica_size(config), context_size=config.context_parallel_size
        )
        self._checked: set[str] = set()  # configs whose packed forward was checked

    def policy(self, config: Config, start: InitialWeights) -> FSDPBackend:
        module = self._load(start, self._trained_dtype(config))
        if module.routers is not None:
            module.routers.check()
        return self._trained(config, start, module, lambda source: self._load(source, self._compute_dtype))

    def critic(self, config: Config, start: InitialWeights) -> FSDPBackend:
        module = load_packed(config, start, self._trained_dtype(config), value_head=True)
        self._prepare(module)
        return self._trained(config, start, module, None)

    def _trained_dtype(self, config: Config) -> torch.dtype:
        """Dtype of a trained model's weights: float32, or with LoRA the compute dtype, as they are frozen."""
        return torch.float32 if lora_of(config) is None else self._compute_dtype

    def _trained(
        self,
        config: Config,
        start: InitialWeights,
        module: PackedModel,
        load_frozen: Callable[[InitialWeights], PackedModel] | None,
    ) -> FSDPBackend:
        lora, layers = lora_of(config), None
        if lora is not None:
            patterns = {"freeze": config.freeze_params_name_list, "only_train": config.only_train_params_name_list}
            layers = put_adapter(module.model, lora, **patterns)
            values = layers.start_values(config.seed, config.lora_load)
            module.sources |= {name: memory_source(value) for name, value in values}
            if isinstance(module, ValueModel):  # its head is new: trained whole, in float32 as all trained parameters
                output_projection(module.model).float().requires_grad_(True)
        elif start.resumes:  # the checkpoint has all weights
            module.use_zero_sources()
        return FSDPBackend(
            config,
            self.topology,
            self._mesh,
            module,
            compute_dtype=self._compute_dtype,
            progress=self.progress,
            load_frozen=load_frozen,
            layers=layers,
            base=adapter_base_path(config, start),
        )

    def _load(self, source: InitialWeights, dtype: torch.dtype) -> PackedModel:
        """Load a policy without its weights; a resumed checkpoint is loaded into it later."""
        module = load_packed(self._config, source, dtype)
        self._prepare(module)
        if source.checkpoint is not None and not source.resumes:
            CheckpointFolder(source.checkpoint).provide_weights(module.model, module.sources, self._config)
        return module

    def _prepare(self, module: PackedModel) -> None:
        """Compare the packed forward with transformers', once for each config, and set the ranks that share rows."""
        facts = module.model.config.to_json_string(use_diff=False)
        if facts not in self._checked:
            check_packed(module.model)
            self._checked.add(facts)
        module.set_context_ranks(self.topology.context)
