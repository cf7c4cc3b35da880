"""How new weights reach the engines."""

from dataclasses import dataclass

from slime.config.flag import at_least, flag


@dataclass(frozen=True, kw_only=True)
class WeightFlags:
    """Weights: from the trainer to the engines"""

    update_weight_transport: str = flag(
        "auto",
        "carrier of weight updates; auto: shared memory on one machine (nccl is read as auto)",
        choices=("auto", "tensor", "disk", "nccl"),
    )
    update_weight_disk_dir: str | None = flag(
        None, "folder for the disk transport", metavar="DIR", derived="weights/ in the run folder"
    )
    update_weight_buffer_size: int = flag(512 * 2**20, "bytes per bucket of weights", check=at_least(2**16))
