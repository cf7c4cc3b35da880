"""Flags of the inference engines and of weight updates."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import above, at_least, between, flag

# ruff: noqa: RUF009 (`flag` declares a dataclass field)


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
