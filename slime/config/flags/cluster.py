"""Flags of processes and devices; on a CPU the "GPU" counts are process counts."""

# ruff: noqa: RUF009 (`flag` declares a dataclass field)

from dataclasses import dataclass

from slime.config.fields import at_least, flag
from slime.storage.json_types import JsonObject


@dataclass(frozen=True, kw_only=True)
class ClusterFlags:
    """Cluster: processes and devices"""

    cluster: str | None = flag(
        None,
        "where processes run: local is this machine, ray the nodes of a Ray cluster (default: ray with --ray-address, "
        "with RAY_ADDRESS in the environment, or with several training nodes of GPUs; else local)",
        choices=("local", "ray"),
    )
    ray_address: str | None = flag(
        None,
        "HOST:PORT of the Ray cluster's head, as `ray start` prints it; auto: the cluster that this machine is part of "
        "(default: RAY_ADDRESS, else auto)",
        metavar="HOST:PORT",
    )
    actor_num_nodes: int = flag(
        1, "training nodes; on this machine and a CPU a factor of the training processes", check=at_least(1)
    )
    actor_num_gpus_per_node: int = flag(
        1, "training processes per node (one GPU each; on a CPU: processes)", check=at_least(1)
    )
    train_backend: str = flag(
        "fsdp",
        "training backend that shards the model over processes; megatron: Megatron-Core, which uses Megatron's flags",
        choices=("fsdp", "megatron"),
    )
    fsdp_shard_size: int | None = flag(
        None,
        "training processes that share one copy of the model (default: all); with fewer, each group of that "
        "many processes has a copy, and copies sum their gradients once per step (HSDP)",
        check=at_least(1),
    )
    context_parallel_size: int = flag(
        1,
        "training processes that share each sequence, a slice of its tokens each (Ulysses: the model's attention heads "
        "must be a multiple); a micro-batch then holds that many times --max-tokens-per-gpu tokens",
        check=at_least(1),
    )
    rollout_num_gpus: int = flag(
        None,
        "GPUs for inference engines (on a CPU: engine processes)",
        check=at_least(0),
        derived="the trainers' GPUs, shared with them (implies --colocate)",
    )
    rollout_num_gpus_per_engine: int = flag(1, "GPUs of one inference engine", check=at_least(1))
    colocate: bool = flag(False, "engines and trainers share the same GPUs; on when --rollout-num-gpus is not given")
    offload: bool = flag(False, "--offload-rollout and --offload-train together")
    offload_rollout: bool = flag(
        False,
        "engines free their GPU memory during training, and keep their CUDA graphs; no effect on a CPU",
    )
    offload_train: bool = flag(
        False,
        "trainers move weights, optimizer state and frozen models to pinned host memory while the engines generate; "
        "no effect on a CPU",
    )
    device: str = flag("auto", "where tensors live; auto: CUDA if there is a GPU", choices=("auto", "cpu", "cuda"))
    distributed_timeout_minutes: int = flag(
        10,
        "minutes that trainers may take for one unit of work (a micro-batch, a tensor read or written)",
        check=at_least(1),
    )
    max_restarts: int | None = flag(
        None,
        "most automatic restarts in a row of a run that loses a trainer, an engine or a node, from its last checkpoint "
        "and the journal; the count starts again once a run gets further than before (default: 3 on Ray, else 0)",
        check=at_least(0),
    )
    train_env_vars: JsonObject = flag(
        {}, "additional environment variables for trainers; they are stored in config.yaml", metavar="JSON"
    )
    pass_env: list[str] | None = flag(
        None,
        "environment variables passed to engines and trainers although their names look like secrets",
        metavar="NAME",
    )
    host: str = flag("127.0.0.1", "address that servers bind to")
