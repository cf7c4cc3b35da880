"""Which transport a run uses, and the publisher that goes with it."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from slime.config import Config
from slime.engine.client import EngineClient
from slime.weights.disk import DiskPublisher
from slime.weights.publisher import RunAsync, WeightPublisher, WeightSource
from slime.weights.staging import choose_root
from slime.weights.tensor import TensorPublisher

logger = logging.getLogger(__name__)


def choose_transport(config: Config, device: str) -> tuple[str, str]:
    """The transport ("tensor" or "disk") for `--update-weight-transport`, and why."""
    asked = config.update_weight_transport
    if asked in ("tensor", "disk"):
        return asked, "asked for"
    note = " (nccl is read as auto)" if asked == "nccl" else ""
    return "tensor", f"trainer and engines are on one machine, weights on {device} pass through shared memory{note}"


def make_publisher(
    config: Config,
    *,
    device: str,
    run_dir: str | os.PathLike[str],
    source: WeightSource,
    clients: Sequence[EngineClient],
    run_async: RunAsync,
) -> WeightPublisher:
    """The publisher of this run; loading new weights gets as long as loading the first ones (engine_start_timeout)."""
    transport, reason = choose_transport(config, device)
    logger.info("weight updates by %s: %s", transport, reason)
    hf_checkpoint = Path(config.hf_checkpoint)
    timeout_s = config.engine_start_timeout
    if transport == "disk":
        root = Path(config.update_weight_disk_dir or Path(run_dir) / "weights")
        return DiskPublisher(source, clients, run_async, root=root, hf_checkpoint=hf_checkpoint, timeout_s=timeout_s)
    root, why = choose_root(largest_export_bytes(hf_checkpoint))
    logger.info("weights are staged in %s: %s", root, why)
    return TensorPublisher(source, clients, run_async, root=root, timeout_s=timeout_s)


def largest_export_bytes(hf_checkpoint: Path) -> int:
    """An upper bound of what one version takes: the checkpoint's tensors, should a 16-bit one be published in 32."""
    return 2 * sum(path.stat().st_size for path in hf_checkpoint.glob("*.safetensors"))
