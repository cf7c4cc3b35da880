"""Compares the memory estimate of a run with the available memory, and searches for flags or GPUs with which it fits.

Invariant: a remedy is named only together with the estimate of the run that uses it. The config is not changed here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from slime.config import Config
from slime.config.parallelism import uses_megatron
from slime.driver.plan.memory import ProcessPlan, longest_sample, tokens_per_forward
from slime.storage.json_types import JsonObject

_LEAST_TOKENS = 1024
_SMALL_CHUNK = 512
_GPUS_OF_A_NODE = 8
_MOST_NODES = 128
_MOST_GPUS_PER_ENGINE = 64
_GIB = 2**30


class MemoryDemand:
    """Memory that the processes of a run need."""

    def __init__(self, config: Config, processes: Sequence[ProcessPlan], device: str) -> None:
        found = [(one.count, one.memory) for one in processes if one.memory is not None]
        shares_gpus = config.colocate and not config.offload_rollout
        sizes = [memory.total for _, memory in found]
        self.needed = sum(sizes) if shares_gpus else max(sizes, default=0)
        """Bytes of the GPU that needs the most, or on a CPU those of all processes together."""
        if device != "cuda":
            self.needed = sum(count * memory.total for count, memory in found)
        self.engines_lack = max((memory.lacks for _, memory in found), default=0)
        """Bytes by which an engine's share of its GPU is too small."""
        self.on_host = max((sum(memory.on_host.values()) for _, memory in found), default=0)
        """Bytes of host memory of each trainer."""


@dataclasses.dataclass(frozen=True)
class MemoryBudget:
    """The available memory, and the function that plans the processes of a run."""

    processes_of: Callable[[Config], Sequence[ProcessPlan]]
    available: int
    device: str

    def demand(self, config: Config) -> MemoryDemand:
        """Estimate the memory of a run."""
        return MemoryDemand(config, self.processes_of(config), self.device)

    def lacking(self, config: Config) -> int:
        """Return the bytes that are missing for a run; 0 if it fits."""
        taken = self.demand(config)
        return max(0, taken.needed - self.available, taken.engines_lack)

    def in_words(self, config: Config) -> str:
        """Format the memory that a run needs, as the end of a sentence."""
        taken = self.demand(config)
        host = f" and {format_gib(taken.on_host)} of the host's memory for each trainer" if taken.on_host else ""
        return f"it is {format_gib(taken.needed)}{host}"


@dataclasses.dataclass(frozen=True)
class Remedy:
    """Flags as they are written, and the config fields that they set."""

    flags: str
    changes: JsonObject


def fit_notes(config: Config, room: MemoryBudget) -> list[str]:
    """Return a sentence for a run that does not fit, with a remedy; nothing for a run that fits."""
    if not room.lacking(config):
        return []
    taken, remedy = room.demand(config), _describe_remedy(config, room)
    if taken.needed > room.available:
        unit = "each GPU" if room.device == "cuda" else "all processes"
        more = format_gib(taken.needed - room.available)
        return [
            f"the estimate of {format_gib(taken.needed)} for {unit} is {more} more than the "
            f"{format_gib(room.available)} there are: {remedy}"
        ]
    share = "sglang_mem_fraction_static" if "sglang_mem_fraction_static" in config.carried else "engine_mem_fraction"
    value = config.carried.get(share, config.engine_mem_fraction)
    return [
        f"an engine lacks {format_gib(taken.engines_lack)} for its weights and one sample of {longest_sample(config)} "
        f"tokens: --{share.replace('_', '-')} {value} is too small; {remedy}"
    ]


def _describe_remedy(config: Config, room: MemoryBudget) -> str:
    """Describe flags, GPUs or both with which the run fits, else what the user can still do."""
    chosen = _choose_remedies(config, room)
    with_all = _apply_remedies(config, chosen)
    ways = [] if room.lacking(with_all) else [f"with {_join_flags(chosen)} {room.in_words(with_all)}"]
    if room.device == "cuda" and (gpus := _more_gpus(config, room)) is not None:
        ways.append(gpus)
    if ways:
        return "; or ".join(ways)
    if room.device == "cuda" and (gpus := _more_gpus(with_all, room)) is not None:
        return gpus.replace("with ", f"with {_join_flags(chosen)} ", 1) if chosen else gpus
    still = f"with {_join_flags(chosen)} {room.in_words(with_all)}; " if chosen else ""
    if room.device != "cuda":
        return f"{still}use a machine with more memory, or fewer processes"
    if uses_megatron(config):
        return (
            f"{still}cut the model into more parts (--tensor-model-parallel-size, --pipeline-model-parallel-size, "
            "--expert-model-parallel-size; slime models NAME --layout shows a layout that fits)"
        )
    return f"{still}cut the model (--train-backend megatron; slime models NAME --layout), or train a smaller one"


def _join_flags(remedies: list[Remedy]) -> str:
    return " ".join(remedy.flags for remedy in remedies)


def _choose_remedies(config: Config, room: MemoryBudget) -> list[Remedy]:
    """Choose the first remedies that help, until the run fits; then drop those that turn out to be unnecessary."""
    chosen: list[Remedy] = []
    lacking = room.lacking(config)
    for remedy in _remedies(config, room.device):
        with_it = [one for one in chosen if one.changes.keys() != remedy.changes.keys()] + [remedy]
        less = room.lacking(_apply_remedies(config, with_it))
        if less < lacking:
            chosen, lacking = with_it, less
        if not lacking:
            break
    for remedy in reversed(list(chosen)) if not lacking else ():  # the most expensive first
        fewer = [one for one in chosen if one is not remedy]
        if not room.lacking(_apply_remedies(config, fewer)):
            chosen = fewer
    return chosen


def _more_gpus(config: Config, room: MemoryBudget) -> str | None:
    """Find the smallest larger number of GPUs on which the run fits unchanged: of one machine, then of several."""
    nodes, gpus = config.actor_num_nodes, config.actor_num_gpus_per_node
    clusters: list[tuple[int, int]] = []
    while gpus * 2 <= _GPUS_OF_A_NODE:
        gpus *= 2
        clusters.append((nodes, gpus))
    while (nodes := nodes * 2) <= _MOST_NODES:
        clusters.append((nodes, gpus))
    for nodes, gpus in clusters:
        changed = config.replace(actor_num_nodes=nodes, actor_num_gpus_per_node=gpus)
        if not room.lacking(changed):
            words = f"--actor-num-nodes {nodes} --actor-num-gpus-per-node {gpus} ({nodes * gpus} GPUs)"
            return f"with {words} {room.in_words(changed)}"
    return None


def _apply_remedies(config: Config, remedies: list[Remedy]) -> Config:
    for remedy in remedies:
        config = config.replace(**remedy.changes)
    return config


def _remedies(config: Config, device: str) -> list[Remedy]:
    """List the remedies that reduce memory, the cheapest first."""
    found: list[Remedy] = []
    on_gpu, megatron = device == "cuda", uses_megatron(config)
    if on_gpu and config.colocate and not (config.offload_rollout and config.offload_train):
        found.append(Remedy("--offload", {"offload_rollout": True, "offload_train": True}))
    if on_gpu:
        gpus = config.rollout_num_gpus_per_engine
        while (gpus := gpus * 2) <= min(_MOST_GPUS_PER_ENGINE, config.rollout_num_gpus or 0):
            found.append(Remedy(f"--rollout-num-gpus-per-engine {gpus}", {"rollout_num_gpus_per_engine": gpus}))
    if megatron and config.recompute_granularity != "full":
        words = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        how = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        found.append(Remedy(words, how))
    if not megatron and not config.recompute_activations:
        found.append(Remedy("--recompute-activations", {"recompute_activations": True}))
    if config.use_dynamic_batch_size and config.max_tokens_per_gpu is not None:
        tokens = tokens_per_forward(config)
        while (tokens := tokens // 2) >= _LEAST_TOKENS:
            found.append(Remedy(f"--max-tokens-per-gpu {tokens}", {"max_tokens_per_gpu": tokens}))
    elif config.micro_batch_size > 1:
        found.append(Remedy("--micro-batch-size 1", {"micro_batch_size": 1}))
    if config.log_probs_chunk_size <= 0 or config.log_probs_chunk_size > _SMALL_CHUNK:
        found.append(Remedy(f"--log-probs-chunk-size {_SMALL_CHUNK}", {"log_probs_chunk_size": _SMALL_CHUNK}))
    if on_gpu and not megatron and config.log_probs_keep_gib != 0:
        found.append(Remedy("--log-probs-keep-gib 0", {"log_probs_keep_gib": 0.0}))
    if on_gpu and not megatron and not config.use_stateless_adam:
        if not config.optimizer_cpu_offload:
            found.append(Remedy("--optimizer-cpu-offload", {"optimizer_cpu_offload": True}))
        if not config.fsdp_cpu_offload:
            found.append(Remedy("--fsdp-cpu-offload", {"fsdp_cpu_offload": True}))
    return found


def format_gib(size: int) -> str:
    """Format bytes as GiB, or as MiB below 0.1 GiB."""
    return f"{size / _GIB:.2f} GiB" if size >= 0.1 * _GIB else f"{size / 2**20:.1f} MiB"
