"""Flags of upstream slime's scripts that cannot change a result here.

Each is parsed and kept under its name for plugins; a run that gets a value other than the default reports that it has
no effect, and why.
"""

# ruff: noqa: RUF009 (`flag` declares a dataclass field)

from dataclasses import dataclass

from slime.config.fields import at_least, between, flag

BUFFER_FLAGS = ("rollout_buffer_url", "fetch_trajectory_retry_times", "rollout_task_type")
"""Flags for rollout functions that get their samples from a buffer server."""

_MEMORY = "memory is not recorded"
_MTP = "layers that predict several tokens at once are neither trained nor used"
_OWN_FUNCTION = "only a rollout function of your own reads it"


@dataclass(frozen=True, kw_only=True)
class UpstreamFlags:
    """Upstream's flags without effect here"""

    num_gpus_per_node: int = flag(
        8, "GPUs of one machine", check=at_least(1), no_effect="the GPUs of this machine are counted"
    )
    distributed_backend: str = flag(
        "nccl", "how trainers communicate", no_effect="it is nccl on GPUs and gloo on a CPU"
    )
    allgather_cp: bool = flag(False, "how a sequence is split over processes", no_effect="it follows from the backend")
    model_name: str | None = flag(
        None, "family whose weight names are converted", no_effect="the family is read from the model folder"
    )
    padded_vocab_size: int | None = flag(
        None, "rows of the embedding", no_effect="the vocabulary is that of the model folder"
    )
    data_pad_size_multiplier: int = flag(
        128,
        "rows are padded to a multiple of this",
        check=at_least(1),
        no_effect="rows are padded only as far as splitting them requires",
    )
    log_probs_max_tokens_per_gpu: int | None = flag(
        None,
        "tokens per forward pass without gradients",
        check=at_least(1),
        no_effect="all passes have the micro-batches of training, as in upstream",
    )
    mtp_num_layers: int | None = flag(None, "layers for several tokens at once", check=at_least(0), no_effect=_MTP)
    mtp_loss_scaling_factor: float = flag(0.2, "weight of their loss", no_effect=_MTP)
    rollout_data_transport: str = flag(
        "object-store",
        "how samples reach the trainers",
        choices=("object-store", "nixl"),
        no_effect="they go over a channel to each trainer",
    )
    http_proxy: str | None = flag(
        None, "proxy for requests", metavar="URL", no_effect="engines are called directly, as in upstream"
    )
    use_distributed_post: bool = flag(
        False, "send requests from several machines", no_effect="one event loop sends all of them"
    )
    rollout_buffer_url: str | None = flag(None, "buffer server", metavar="URL", no_effect=_OWN_FUNCTION)
    fetch_trajectory_retry_times: int = flag(
        -1, "retries of requests to the buffer server; -1: no limit", no_effect=_OWN_FUNCTION
    )
    rollout_task_type: str = flag("math", "task to request from the buffer server", no_effect=_OWN_FUNCTION)
    min_batch_collection_ratio: float = flag(
        1.0,
        "share of a batch to wait for",
        check=between(0, 1, low_open=True),
        no_effect="a batch is always complete, as in upstream",
    )
    record_memory_history: bool = flag(False, "record allocations", no_effect=_MEMORY)
    memory_recorder: str = flag("torch", "recorder of allocations", choices=("torch", "memray"), no_effect=_MEMORY)
    memory_snapshot_dir: str = flag(".", "folder of the snapshots", metavar="DIR", no_effect=_MEMORY)
    memory_snapshot_num_steps: int | None = flag(None, "steps until a snapshot", check=at_least(1), no_effect=_MEMORY)
    profile_target: list[str] = flag(
        ["train_overall"],
        "parts that are profiled: train_overall, train_actor, train_log_probs",
        no_effect="nothing is profiled; the perf/ metrics say where time goes",
    )
