"""Estimates of the memory of each kind of process, from shapes and flags alone.

The trainer's formula follows one optimizer step of FSDP: the memory that a rank holds all the time, plus that of the
moment of the step that needs the most. `benchmarks/training_memory.py` prints both next to what a rank really uses.
"""

from __future__ import annotations

import dataclasses

import psutil

from slime.cluster.devices import resolve_dtype
from slime.config import Config
from slime.config.algorithm import has_critic, needs_reference
from slime.config.async_mode import max_versions_behind
from slime.config.flags.rollout import DEFAULT_RESPONSE_LEN
from slime.config.lora import reference_is_base, uses_lora
from slime.models.lora import adapter_shapes, choose_targets, linears_of
from slime.models.shape import BYTES_PER_ELEMENT, ModelShape, layer_bytes, layer_input_bytes, root_bytes

KEPT_BYTES = 2 << 30
"""Default limit of the logit gradients kept for the backward, as in `slime.algorithms.logprobs` (a test compares)."""
CHUNK_LOGITS = {"cpu": 16 * 1024 * 1024, "cuda": 3072 * 151936}
"""Logits that exist at once, by the chunks of `slime.algorithms.logprobs` (a test compares)."""
COMPILE_MIN_PARAMETERS = 100_000_000
"""Parameters from which on layers are compiled on a GPU, as in `slime.train.backends.fsdp.sharding`."""
FUSED_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Models whose layers use slime's kernels on a GPU, as in `slime.train.backends.fsdp.fused.layer`."""
STREAMED_ELEMENTS = 1 << 24
"""Elements that are updated at a time when moments are on the host or in bfloat16."""
_MOMENT_BYTES = {"fp32": 4, "bf16": 2}
_MASTER = 4  # bytes: master weights and gradients are float32
_CPU_KV_LIMIT = 2 * 2**30
_SFT_DEFAULT_LENGTH = 1024


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one process by purpose; purposes of unknown size are left out."""

    parts: dict[str, int]
    peak: str = ""
    """The moment that needs the most; `parts` are those of that moment."""
    on_host: dict[str, int] = dataclasses.field(default_factory=dict)
    """Bytes in host memory, in addition to `parts` on the GPU."""
    lacks: int = 0
    """Bytes by which an engine's share of the GPU is too small for its weights and the longest sample."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclasses.dataclass(frozen=True)
class ProcessPlan:
    """Processes of one kind."""

    name: str
    count: int
    where: str
    memory: MemoryEstimate | None


def trainer_memory(config: Config, shape: ModelShape, *, device: str, trainers: int) -> MemoryEstimate:
    """Estimate one training process at the peak of an optimizer step, except the first of the run."""
    step = _Step.of(config, shape, device=device, trainers=trainers)
    # what a rank holds between two steps
    frozen, updated = step.compute * step.shard(step.total), step.shard(step.trained)
    always = {"weights": _MASTER * updated}
    if step.trained != step.total:
        always |= {"frozen weights": frozen}
    if has_critic(config):  # a critic trains as many parameters
        always["critic"] = _MASTER * updated + (0 if step.trains_all else frozen)
        updated *= 2
    kinds = (config.exp_avg_dtype, config.exp_avg_sq_dtype)
    always["Adam moments"] = 0 if config.use_stateless_adam else sum(_MOMENT_BYTES[kind] for kind in kinds) * updated
    # with LoRA a version of the old policy is an adapter
    version = frozen if step.trains_all else _MASTER * step.shard(step.trained)
    average = _MASTER * step.shard(step.total)
    always |= other_models(config, device, frozen=frozen, average=average, version=version)
    # what the host holds of it
    names = ["Adam moments"] if config.optimizer_cpu_offload else []
    names = list(always) if config.fsdp_cpu_offload else names
    on_host = {name: always.pop(name) for name in names} if step.on_gpu else {}
    if config.fsdp_cpu_offload and step.on_gpu:
        on_host["gradients"] = step.reduced
    # float32 copies of the moments that are being updated, and the noise to round them
    narrow = [kind for kind in kinds if kind != "fp32"]
    copies = 2 if config.optimizer_cpu_offload and step.on_gpu else len(narrow)
    passing = _MASTER * (copies + 2 * bool(narrow)) * min(STREAMED_ELEMENTS, step.shard(step.head))
    if config.fsdp_cpu_offload and step.on_gpu:  # the update is made on the host
        passing = 0
    moments = {
        "loss": step.loss(),
        "backward of the last layer": step.last_layer(),
        "backward of the layers before": step.inner_layer(),
        "gradients of the embedding": step.embedding(),
        "optimizer": {"gradients": step.gradients, "moments in passing": passing},
    }
    peak = max(moments, key=lambda name: sum(moments[name].values()))
    parts = {name: size for name, size in {**always, **moments[peak]}.items() if size}
    return MemoryEstimate(parts, peak, {name: size for name, size in on_host.items() if size})


def other_models(config: Config, device: str, *, frozen: int, average: int, version: int) -> dict[str, int]:
    """Return the bytes of the models that a rank holds next to policy and critic.

    `frozen` are those of a frozen model, `average` of the moving average of the reference, `version` of one version of
    the old policy.
    """
    parts: dict[str, int] = {}
    if needs_reference(config) and not reference_is_base(config):
        parts["reference"] = frozen
        if config.ref_update_decay:
            parts["average of the reference"] = average
    if config.keep_old_actor:
        behind = max_versions_behind(config)
        on_host = behind + 1 if behind and device != "cuda" else 0  # older versions are kept in host memory
        parts["old policy"] = version * (1 + on_host)
    if config.use_opd and config.opd_type == "trainer":
        parts["teacher (if it is as large)"] = frozen
    return parts


def logit_bytes(config: Config, device: str, vocab: int, *, sharers: int = 1) -> int:
    """Return the bytes of the logits that exist at once, for forward passes of `sharers` times the usual tokens."""
    rows = config.log_probs_chunk_size
    if rows <= 0:
        rows = CHUNK_LOGITS[device] // (vocab or 1)
    if config.loss_type == "custom_loss":
        rows = tokens_per_forward(config) * sharers
    return 4 * min(rows, response_tokens(config) * sharers) * vocab


@dataclasses.dataclass(frozen=True)
class _Step:
    """An optimizer step of one FSDP rank: elements of the model, and bytes of its activations.

    Each layer is an FSDP group, whose whole weights are gathered and freed; embedding and output layer stay whole from
    the forward to the end of the backward. A rank that does not shard the model keeps all of it.
    """

    total: int
    trained: int
    root: int
    layer: int
    head: int
    layers: int
    compute: int
    """Bytes of one weight in forward and backward."""
    sharers: int
    """Ranks that shard one copy of the model."""
    on_gpu: bool
    on_host: bool
    """True if the shards are in host memory."""
    copies: int
    """Copies of the model."""
    accumulates: bool
    """True if a micro-batch adds to the gradients of earlier ones."""
    tied: bool
    kept: int
    """Bytes of activations that all layers keep."""
    again: int
    """Bytes of activations that one layer recomputes."""
    chunk: int
    """Bytes of the logits that exist at once."""
    logit_gradients: int
    """Bytes of the logit gradients that are kept for the backward (--log-probs-keep-gib)."""

    @classmethod
    def of(cls, config: Config, shape: ModelShape, *, device: str, trainers: int) -> _Step:
        dtype = resolve_dtype(config.dtype, device, shape.num_parameters)
        total, on_gpu = shape.num_parameters or 0, device == "cuda"
        compiled = on_gpu and total >= COMPILE_MIN_PARAMETERS and not uses_lora(config)
        tokens, layers = tokens_per_forward(config), shape.num_layers or 0
        fused = on_gpu and shape.model_type in FUSED_TYPES
        how = {"compiled": compiled, "fused": fused, "frozen_norms": uses_lora(config)}
        kept = layer_bytes(shape, dtype=dtype, on_gpu=on_gpu, **how)
        adapted, trained = (planned_adapter(config) or ([], 0)) if uses_lora(config) else ([], total)
        low = BYTES_PER_ELEMENT[dtype] * config.lora_rank * len(adapted) // max(layers, 1)  # between an adapter's two
        layer = tokens * ((kept or 0) + low)
        inputs = tokens * (layer_input_bytes(shape, dtype=dtype) or 0)
        again = config.recompute_activations
        vocab = shape.vocab_size or 0
        gradients = BYTES_PER_ELEMENT[dtype] * response_tokens(config) * vocab
        most = KEPT_BYTES if config.log_probs_keep_gib is None else int(config.log_probs_keep_gib * 2**30)
        at_once = trainers // config.context_parallel_size * config.micro_batch_size
        return cls(
            total=total,
            trained=trained,
            root=shape.root_parameters or 0,
            layer=shape.layer_parameters or 0,
            head=shape.head_parameters or 0,
            layers=layers,
            compute=BYTES_PER_ELEMENT[dtype],
            sharers=config.fsdp_shard_size or trainers,
            on_gpu=on_gpu,
            on_host=config.fsdp_cpu_offload,
            copies=trainers // (config.fsdp_shard_size or trainers),
            accumulates=config.use_dynamic_batch_size or config.global_batch_size > at_once,
            tied=shape.tied_embeddings,
            kept=layers * (inputs if again else layer) + tokens * (root_bytes(shape, dtype=dtype) or 0),
            again=layer if again else 0,
            chunk=logit_bytes(config, device, vocab),
            logit_gradients=gradients if on_gpu and gradients <= most and config.loss_type != "custom_loss" else 0,
        )

    def shard(self, elements: int) -> int:
        return -(-elements // self.sharers)

    @property
    def reduced(self) -> int:
        """Bytes of the gradients of this rank's shards."""
        return _MASTER * self.shard(self.trained)

    @property
    def gradients(self) -> int:
        """Bytes of gradients on the device: 0 for shards on the host, unless several model copies sum them first."""
        return 0 if self.on_host and self.on_gpu and self.copies == 1 else self.reduced

    @property
    def keeps_all(self) -> bool:
        """True for a rank that trains an unsharded model: it does not free whole weights before the end."""
        return self.sharers == 1 and self.trains_all and not self.on_host

    @property
    def earlier(self) -> int:
        """Bytes of the gradients of earlier micro-batches."""
        return self.gradients if self.accumulates else 0

    @property
    def trains_all(self) -> bool:
        return self.trained == self.total

    def whole(self, groups: int) -> int:
        """Return the bytes of whole weights: embedding, output layer, and `groups` layers, the last one prefetched."""
        if self.keeps_all:
            return self.compute * self.total
        return self.compute * (self.root + (groups if self.sharers > 1 else groups - 1) * self.layer)

    def loss(self) -> dict[str, int]:
        """Return the bytes during the loss: all layers have run, the next one is gathered, and the gradient of the
        output layer is summed over chunks."""
        widened = 4 * self.head if self.compute == 2 and not self.on_gpu else 0
        forward = 2 * self.chunk
        halved = self.chunk // 2 if self.compute == 2 and self.on_gpu else 0
        backward = self.chunk + halved + (2 * _MASTER * self.head if self.trains_all else 0)
        return {
            "gradients": self.earlier,
            "whole weights": self.whole(1),
            "activations": self.kept,
            "logits": widened + max(forward, backward) + self.logit_gradients,
        }

    def last_layer(self) -> dict[str, int]:
        """Return the bytes in the backward of the last layer: its whole weights and gradients, and the weights of the
        layer before it."""
        return {
            "gradients": self.earlier,
            "whole weights": self.whole(2),
            "whole gradients": self.compute * (self.head + self.layer) if self.trains_all else 0,
            "activations": self.kept + self.again,
        }

    def inner_layer(self) -> dict[str, int]:
        """Return the bytes in the backward of an earlier layer, while the gradients of the next one are reduced."""
        if self.layers < 2:
            return {}
        found = self.last_layer()
        found["activations"] = self.kept * (self.layers - 1) // self.layers + self.again
        if self.trains_all:
            found["whole weights"] -= self.compute * self.layer if self.keeps_all else 0
            found["whole gradients"] += _MASTER * self.layer
        return found

    def embedding(self) -> dict[str, int]:
        """Return the bytes at the end of the backward, while gradients outside the layers are copied and reduced."""
        if not self.trains_all:
            return {"gradients": self.gradients, "whole weights": self.compute * self.root}
        summed = self.compute * (2 * self.root + (self.head if self.tied else 0))
        copies = 2 if self.sharers == 1 or not self.on_gpu else 1
        reduced = self.compute * self.root + _MASTER * (copies * self.root + self.shard(self.root))
        return {"gradients": self.gradients, "whole gradients": max(summed, reduced)}


def planned_adapter(config: Config) -> tuple[list[str], int] | None:
    """Return the layers that get a LoRA adapter and the elements of its matrices; None if only the trainer knows them.

    Targets that the model does not have are refused.
    """
    linears = linears_of(config.hf_checkpoint)
    if not linears:
        return None
    chosen = choose_targets(
        linears,
        config.lora_target_modules or (),
        f"the model in {config.hf_checkpoint}",
        freeze=config.freeze_params_name_list,
        only_train=config.only_train_params_name_list,
    )
    shapes = adapter_shapes({module: linears[module] for module in chosen}, config.lora_rank)
    return list(chosen), sum(rows * columns for rows, columns in shapes.values())


def engine_memory(
    config: Config, shape: ModelShape, *, dtype: str, device: str, available: int | None, sglang: bool = False
) -> MemoryEstimate:
    """Estimate one embedded engine, or one GPU of an engine with several: weights in the precision `dtype`, KV cache.

    The embedded engine's share applies to the memory that its weights leave free. SGLang's share, if one is given,
    includes the weights.
    """
    parts: dict[str, int] = {}
    gpus = config.rollout_num_gpus_per_engine
    weights = BYTES_PER_ELEMENT[dtype] * (shape.num_parameters or 0) // gpus
    if shape.num_parameters is not None:
        parts["weights"] = weights
    per_token = shape.kv_bytes_per_token(dtype)
    if config.engine_max_total_tokens is not None and per_token is not None:
        parts["KV cache"] = config.engine_max_total_tokens * per_token
        return MemoryEstimate(parts)
    if available is None:
        return MemoryEstimate(parts)
    free = max(available - weights, 0) if device == "cuda" else available
    budget = int(free * config.engine_mem_fraction)
    static = config.carried.get("sglang_mem_fraction_static") if sglang else None
    if static is not None:
        budget = int(available * float(static)) - weights
    if device != "cuda":
        parts["KV cache (at most)"] = min(budget, _CPU_KV_LIMIT)
        return MemoryEstimate(parts)
    parts["KV cache (at most)"] = max(budget, 0)
    kept = 0 if shape.is_latent else (per_token or 0) // min(gpus, shape.num_kv_heads or 1)
    return MemoryEstimate(parts, lacks=max(0, longest_sample(config) * kept - budget))


def tokens_per_forward(config: Config) -> int:
    """Return the largest number of tokens of one process in one training forward pass."""
    if config.use_dynamic_batch_size and config.max_tokens_per_gpu is not None:
        return config.max_tokens_per_gpu
    return -(-config.micro_batch_size * longest_sample(config) // config.context_parallel_size)


def response_tokens(config: Config) -> int:
    """Return the largest number of tokens of one training forward pass whose log-probs are computed."""
    tokens = tokens_per_forward(config)
    if config.use_dynamic_batch_size or config.rollout_max_response_len is None:
        return tokens
    return min(tokens, config.micro_batch_size * config.rollout_max_response_len)


def longest_sample(config: Config) -> int:
    """Return the largest length of prompt and response together, in tokens, that the flags allow."""
    if config.rollout_max_context_len is not None:
        return config.rollout_max_context_len
    sampled = None if config.loss_type == "sft_loss" else DEFAULT_RESPONSE_LEN
    bounds = [config.rollout_max_prompt_len, config.rollout_max_response_len or sampled]
    return sum(bound for bound in bounds if bound is not None) or _SFT_DEFAULT_LENGTH


def available_memory() -> int:
    """Return the bytes of main memory that are available without swapping."""
    return int(psutil.virtual_memory().available)
