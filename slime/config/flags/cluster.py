"""Where processes run and how many there are; on a CPU the "GPU" counts are process counts."""

# ruff: noqa: RUF009 (`flag` declares a dataclass field)

from dataclasses import dataclass
from typing import Any

from slime.config.fields import at_least, flag


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
        "what spreads the model over training processes; megatron is Megatron-Core, which takes Megatron's flags",
        choices=("fsdp", "megatron"),
    )
    fsdp_shard_size: int | None = flag(
        None,
        "training processes that share one copy of the model (default: all); with fewer, copies on each so many "
        "processes add up their gradients once a step (HSDP)",
        check=at_least(1),
    )
    context_parallel_size: int = flag(
        1,
        "training processes that share each sequence, a slice of its tokens each (Ulysses: the model's attention heads "
        "must be a multiple); a micro-batch then holds so many times --max-tokens-per-gpu tokens",
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
        "engines give their GPU memory back while the trainers work, and keep their CUDA graphs; nothing on a CPU",
    )
    offload_train: bool = flag(
        False,
        "trainers move weights, optimizer state and frozen models to pinned host memory while the engines generate; "
        "nothing on a CPU",
    )
    device: str = flag("auto", "where tensors live; auto: CUDA if there is a GPU", choices=("auto", "cpu", "cuda"))
    distributed_timeout_minutes: int = flag(
        10,
        "how long trainers may go without finishing a piece of their work (a micro-batch, a tensor read or written)",
        check=at_least(1),
    )
    max_restarts: int | None = flag(
        None,
        "how often in a row a run that loses a trainer, an engine or a node starts again by itself, from its last "
        "checkpoint and the journal; one that comes further than before may do so as often again (default: 3 on Ray, "
        "else 0)",
        check=at_least(0),
    )
    train_env_vars: dict[str, Any] = flag(
        {}, "environment variables that trainers get beside the run's own; they are kept in config.yaml", metavar="JSON"
    )
    pass_env: list[str] | None = flag(
        None,
        "environment variables that engines and trainers get although their names look like secrets",
        metavar="NAME",
    )
    host: str = flag("127.0.0.1", "address that servers bind to; loopback unless told otherwise")
