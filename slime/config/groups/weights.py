"""How new weights reach the engines."""

from dataclasses import dataclass

from slime.config.flag import at_least, flag


@dataclass(frozen=True, kw_only=True)
class WeightFlags:
    """Weights: from the trainer to the engines"""

    update_weight_transport: str = flag(
        "auto",
        "carrier of weight updates: shared memory, a broadcast (NCCL; gloo on a CPU), or files; auto: shared memory on "
        "one machine, else a broadcast",
        choices=("auto", "tensor", "nccl", "disk"),
    )
    update_weight_mode: str = flag(
        "full", "send all weights, or (through files) only the bytes that changed", choices=("full", "delta")
    )
    update_weight_delta_encoding: str = flag(
        "sparse",
        "a delta's changed bytes: with their distances, against all old ones, or with their positions",
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
        "what happens to running requests: aborted and continued by the rollout, kept in place, or put back",
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
