"""Flags of processes, devices, inference engines and weight updates; on a CPU "GPU" counts are process counts."""

# ruff: noqa: RUF009 (`flag` declares a dataclass field)

from dataclasses import dataclass

from slime.config.fields import above, at_least, between, flag
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


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """Engine: token generation"""

    rollout_backend: str = flag(
        "auto",
        "inference engine; auto: SGLang where it is installed and there is a GPU, else the embedded one",
        choices=("auto", "embedded", "sglang"),
    )
    sglang_python: str | None = flag(
        None, "Python interpreter that has SGLang, if it is not the run's own", metavar="FILE", derived="this one"
    )
    sglang_config: str | None = flag(
        None,
        "YAML file of SGLang server groups and models: their own arguments, frozen models, disaggregation",
        metavar="FILE",
    )
    prefill_num_servers: int | None = flag(
        None, "this many SGLang engines only prefill, the others decode", check=at_least(1)
    )
    rollout_external_engine_addrs: list[str] | None = flag(
        None,
        "external engines, which are used and updated but never started or stopped",
        metavar="HOST:PORT",
    )
    rollout_router: str = flag(
        "auto",
        "distributes requests over engines: sglang-router, or the run itself; auto: sglang-router with SGLang engines, "
        "if it is installed",
        choices=("auto", "builtin", "sglang"),
    )
    sglang_router_python: str | None = flag(
        None, "Python interpreter that has sglang-router", metavar="FILE", derived="that of SGLang"
    )
    fleet_address: str | None = flag(
        None,
        "address where engines on other machines can join the run (slime serve --join) and leave it; PORT alone "
        "listens on loopback, port 0 selects a free one; implies --use-fault-tolerance",
        metavar="[HOST:]PORT",
    )
    use_fault_tolerance: bool = flag(
        False, "restart engines that die or hang, and resume their requests on other engines"
    )
    rollout_health_check_interval: float = flag(30.0, "seconds between health checks of an engine", check=above(0))
    rollout_health_check_timeout: float = flag(30.0, "timeout of a health check in seconds", check=above(0))
    rollout_health_check_first_wait: float = flag(0.0, "seconds before the first health check", check=at_least(0))
    engine_max_restarts: int = flag(5, "restarts of one engine after which the run fails", check=at_least(0))
    rollout_compile: bool | None = flag(None, "embedded engine: use torch.compile", derived="on for CUDA")
    engine_max_running_requests: int = flag(256, "embedded engine: sequences decoded together", check=at_least(1))
    engine_max_total_tokens: int | None = flag(
        None, "embedded engine: KV-cache capacity in tokens", check=at_least(16), derived="from the free memory"
    )
    engine_chunked_prefill_size: int = flag(8192, "embedded engine: prompt tokens per prefill pass", check=at_least(16))
    engine_mem_fraction: float = flag(
        0.3,
        "embedded engine: fraction of the free GPU memory for the KV cache",
        check=between(0, 1, low_open=True, high_open=True),
    )
    engine_start_timeout: float = flag(600.0, "timeout of an engine's start in seconds", check=above(0))
    engine_request_timeout: float = flag(3600.0, "timeout of one request in seconds", check=above(0))
    engine_port: int | None = flag(
        None, "port of the first engine, the next ones follow", check=between(1, 65535), derived="free ports"
    )


@dataclass(frozen=True, kw_only=True)
class WeightFlags:
    """Weights: updates from the trainer to the engines"""

    update_weight_transport: str = flag(
        "auto",
        "transport of weight updates: shared memory, a broadcast (NCCL; gloo on a CPU), or files; auto: shared memory "
        "on one machine, else a broadcast",
        choices=("auto", "tensor", "nccl", "disk"),
    )
    update_weight_mode: str = flag(
        "full", "send all weights, or (through files) only the bytes that changed", choices=("full", "delta")
    )
    update_weight_delta_encoding: str = flag(
        "sparse",
        "encoding of a delta: changed bytes with distances, the XOR of all bytes, or changed bytes with positions",
        choices=("sparse", "xor", "overwrite"),
    )
    update_weight_delta_checksum: str | None = flag(
        None,
        "checksum of each new tensor in a delta",
        choices=("xxh3-128", "sum64", "blake3", "adler32"),
        derived="sum64 where engines apply deltas on GPUs, which compute it themselves; else xxh3-128",
    )
    update_weight_pause_mode: str = flag(
        None,
        "running requests in an update: aborted and resumed by the rollout, kept in place, or put back in the queue",
        choices=("abort", "in_place", "retract"),
        derived="abort; in_place with --async-mode full and the embedded engine",
    )
    update_weight_disk_keep_files: bool = flag(False, "keep the files of old versions")
    update_weight_local_checkpoint_dir: str | None = flag(
        None, "folder on the engine's machine in which deltas are applied, for SGLang", metavar="DIR"
    )
    custom_update_weight_post_write_path: str | None = flag(
        None, "function (args, version_dir, rollout_engines) called once the files of a version are written"
    )
    check_weight_update_equal: bool = flag(False, "compare checksums of every tensor after each update")
    update_weight_disk_dir: str | None = flag(
        None, "folder for the disk transport", metavar="DIR", derived="weights/ in the run folder"
    )
    update_weight_buffer_size: int = flag(512 * 2**20, "bytes per bucket of weights", check=at_least(2**16))
