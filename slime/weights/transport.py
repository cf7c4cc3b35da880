"""Chooses the transport of weight updates, and creates its publisher and the check of the engines' weights.

Invariant: a check (`--check-weight-update-equal`) that returns has compared every tensor of every engine; a difference
ends the run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from slime.cluster.memory.staging import choose_root
from slime.cluster.node import Cluster, SlotPlacement
from slime.cluster.watchdog import Limit, named
from slime.config import Config
from slime.config.plugins import load_function
from slime.config.plugins.view import plugin_args
from slime.engine.http.client import EngineClient, EngineRejected, PauseMode, call_all
from slime.errors import RunFailed, UserError
from slime.models.delta.folder import delta_checksum, safetensors_entries
from slime.storage.json_types import JsonObject
from slime.weights.broadcast import BroadcastPublisher
from slime.weights.delta import DeltaPublisher
from slime.weights.folder import Contents, FolderPublisher, VersionFolders
from slime.weights.ipc import SharedMemoryPublisher
from slime.weights.publisher import (
    Delivery,
    EngineKind,
    PublisherSettings,
    RunOnClientLoop,
    WeightPublisher,
    WeightSource,
)

_NAMED = 3


class WeightsDiffer(RunFailed):
    """The bytes of an engine differ from the trainers' after an update."""


def check_checksums(settings: PublisherSettings, version: int) -> None:
    """Compare the tensor checksums that embedded engines report with those of the trainers."""
    expected = {
        name: checksum for owned in settings.source.call("weight_checksums") for name, checksum in owned.items()
    }
    clients = list(settings.clients)
    asking = call_all(clients, lambda client: client.check_weights("checksum", timeout_s=settings.timeout_s))
    answers = settings.run_async(named(asking, f"weight check {version}"))
    for client, answer in zip(clients, answers, strict=True):
        wrong = [name for name, checksum in expected.items() if answer["checksums"].get(name) != checksum]
        if wrong:
            raise WeightsDiffer(
                f"engine {client.base_url} differs from the trainers in {len(wrong)} of {len(expected)} tensors "
                f"after version {version}: {', '.join(wrong[:_NAMED])}"
            )


def check_by_reloading(settings: PublisherSettings, reload: WeightPublisher, version: int) -> None:
    """Check SGLang's engines: they take a snapshot, load a folder with all weights, and compare it with the snapshot.

    SGLang stores its tensors under its own names, and can compare them only with a snapshot of itself.
    """

    def ask(action: str) -> Coroutine[object, object, list[JsonObject]]:
        clients = list(settings.clients)
        return call_all(clients, lambda client: client.check_weights(action, timeout_s=settings.timeout_s))

    settings.run_async(named(ask("snapshot"), f"snapshot of version {version}"))
    reload.publish(version)
    try:
        settings.run_async(named(ask("compare"), f"comparison of version {version}"))
    except EngineRejected as cause:
        raise WeightsDiffer(f"version {version} differs from the same weights loaded as a folder: {cause}") from cause


POST_WRITE = "--custom-update-weight-post-write-path"
_LOOPBACK = ("127.", "localhost", "[::1]", "::1")

logger = logging.getLogger(__name__)


def choose_transport(
    config: Config, device: str, engine_kind: EngineKind = "embedded", *, nodes: Sequence[str] = ()
) -> tuple[str, str]:
    """Return the transport (`tensor`, `nccl` or `disk`) of a run and the reason; raises an error for conflicting flags.

    `nodes` are the nodes with trainers or engines other than the driver's machine.
    """
    asked = config.update_weight_transport
    if sends_adapter(config) and config.update_weight_mode == "delta":
        raise UserError(
            "--lora-sync adapter sends the adapter whole, so there is no delta: drop --update-weight-mode delta, or "
            "use --lora-sync merged"
        )
    if sends_adapter(config) and engine_kind == "sglang":
        raise UserError(
            "--lora-sync adapter: SGLang's servers add an adapter in the requests that name it, and no request here "
            "does: use --lora-sync merged, or the embedded engine"
        )
    if config.update_weight_mode == "delta":
        if asked not in ("auto", "disk"):
            raise UserError(
                f"--update-weight-mode delta travels through files, not by --update-weight-transport {asked}: use disk"
            )
        where = "each engine applies them to its own weights"
        if engine_kind == "sglang":
            if nodes and config.update_weight_local_checkpoint_dir is None:
                raise UserError(
                    "--update-weight-mode delta: SGLang's servers load the folder that deltas are applied to, and "
                    f"{_first_names(nodes)} does not have the driver's: use --update-weight-mode full, or name a "
                    "folder that "
                    "all nodes share with --update-weight-local-checkpoint-dir"
                )
            where = "they are applied to a model folder next to the engines, which load it"
        return "disk", f"only changed bytes ({config.update_weight_delta_encoding}), {where}"
    if asked == "nccl" and device == "cuda" and config.colocate and not nodes:
        raise UserError(
            "--update-weight-transport nccl cannot join two processes on one GPU, which --colocate makes: use tensor"
        )
    if config.custom_update_weight_post_write_path is not None and asked != "disk":
        raise UserError(f"{POST_WRITE} is called for versions on disk: add --update-weight-transport disk")
    if asked == "tensor" and nodes:
        raise UserError(
            "--update-weight-transport tensor passes weights through the memory of one machine, and "
            f"{_first_names(nodes)} is "
            "another one: use nccl, or disk with --update-weight-disk-dir on a file system that all nodes share"
        )
    if asked != "auto":
        return asked, "asked for"
    if nodes:
        return "nccl", f"trainers and engines are on several nodes ({_first_names(nodes)})"
    addresses = config.rollout_external_engine_addrs or []
    if away := [one for one in addresses if not one.removeprefix("http://").startswith(_LOOPBACK)]:
        return "nccl", f"engines run on other machines ({', '.join(away)})"
    how = "files in shared memory" if engine_kind == "embedded" else "a model folder in shared memory"
    if device == "cuda" and engine_kind == "embedded" and not sends_adapter(config):
        how = "memory of the GPU where they can open it, else a pinned region of the host, else files in shared memory"
    what = f"{'the adapter' if sends_adapter(config) else 'weights'} on {device}"
    verb = "passes" if sends_adapter(config) else "pass"
    return "tensor", f"trainer and engines are on one machine, {what} {verb} through {how}"


def _first_names(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")


def with_delta_checksum(config: Config, device: str, backend: str) -> Config:
    """Return the config with a default checksum of deltas, if none is set.

    The default is fast on GPUs if the engines apply deltas there, and on the host if deltas are applied to files, as
    for SGLang.
    """
    if config.update_weight_mode != "delta":
        return config
    where = device if backend == "embedded" else "cpu"
    return config.replace(update_weight_delta_checksum=delta_checksum(config.update_weight_delta_checksum, where))


def sends_whole_weights(config: Config, engine_kind: EngineKind) -> bool:
    """Return whether an update is independent of the earlier weights, which embedded engines can then discard."""
    return engine_kind == "embedded" and config.update_weight_mode == "full" and not sends_adapter(config)


def weights_folder(config: Config, run_dir: str | os.PathLike[str]) -> Path:
    """Return the folder of versions on disk."""
    return Path(config.update_weight_disk_dir or Path(run_dir) / "weights")


def check_weights_folder(config: Config, cluster: Cluster, run_dir: str | os.PathLike[str]) -> None:
    """Raise an error if weights pass through files and a node does not share their folder."""
    if config.update_weight_transport != "disk" and config.update_weight_mode != "delta":
        return
    folder = weights_folder(config, run_dir)
    if others := cluster.nodes_without(str(folder)):
        raise UserError(
            f"weights pass through the folder {folder}, which is not the same on the node {others[0]}: set "
            "--update-weight-disk-dir to one on a file system that all nodes share, or use --update-weight-transport "
            "nccl"
        )


def sends_adapter(config: Config) -> bool:
    """Return whether the engines get a LoRA adapter instead of whole weights."""
    return config.lora_rank > 0 and config.lora_sync == "adapter"


def make_publisher(
    config: Config,
    *,
    device: str,
    run_dir: str | os.PathLike[str],
    source: WeightSource,
    clients: Sequence[EngineClient],
    run_async: RunOnClientLoop,
    engine_kind: EngineKind = "embedded",
    placement: SlotPlacement | None = None,
    delivery: Delivery | None = None,
) -> WeightPublisher:
    """Create the publisher of this run.

    Loading new weights has the same deadline as loading the first ones (engine_start_timeout). Without a placement,
    trainers and engines are on this machine.
    """
    nodes = () if placement is None else tuple(node.name for node in placement.nodes if not node.is_here)
    transport, reason = choose_transport(config, device, engine_kind, nodes=nodes)
    logger.info("weight updates by %s: %s", transport, reason)
    limit_s = Limit(config.engine_start_timeout, "--engine-start-timeout")
    pause_mode = cast(PauseMode, config.update_weight_pause_mode)
    settings = PublisherSettings(source, clients, run_async, limit_s, pause_mode, delivery=delivery)
    if config.check_weight_update_equal:
        if nodes and engine_kind == "sglang":
            raise UserError(
                "--check-weight-update-equal has SGLang's servers load a folder in this machine's memory, and "
                f"{_first_names(nodes)} is another one: drop it, or use the embedded engine"
            )
        check = partial(check_checksums, settings)
        if engine_kind == "sglang":
            check = partial(check_by_reloading, settings, _in_memory(config, "cpu", settings, engine_kind))
        settings = replace(settings, check=check)
    if transport == "tensor":
        return _in_memory(config, device, settings, engine_kind)
    if transport == "nccl":
        node = None if placement is None or not nodes else placement.trainers[0].node  # the trainers' rank 0 is there
        return BroadcastPublisher(
            settings,
            # NCCL does not allow two members on one GPU, which colocated trainers and engines would be
            backend="nccl" if device == "cuda" and not config.colocate else "gloo",
            meet=None if node is None else lambda urls: (node.address, node.free_ports(1)[0]),
            engine_kind=engine_kind,
            with_adapter=sends_adapter(config),
            processes_per_engine=config.rollout_num_gpus_per_engine if engine_kind == "sglang" else 1,
        )
    on_written: Callable[[Path], None] | None = None
    if config.custom_update_weight_post_write_path is not None:
        hook = load_function(
            config.custom_update_weight_post_write_path, what=POST_WRITE,
            params=("args", "version_dir", "rollout_engines"),
        )  # fmt: skip

        def on_written(version_dir: Path) -> None:
            hook(plugin_args(config), str(version_dir), list(clients))

    folders = VersionFolders(
        weights_folder(config, run_dir),
        Path(config.hf_checkpoint or ""),
        keep_files=config.update_weight_disk_keep_files,
        on_written=on_written,
    )
    if config.update_weight_mode == "full":
        return FolderPublisher(settings, folders, "adapter" if sends_adapter(config) else "model")
    return DeltaPublisher(
        settings,
        folders,
        encoding=config.update_weight_delta_encoding,
        checksum=delta_checksum(config.update_weight_delta_checksum, device),
        local=None
        if engine_kind == "embedded"
        else Path(config.update_weight_local_checkpoint_dir or Path(run_dir) / "weights_local"),
    )


def largest_export_bytes(hf_checkpoint: Path) -> int:
    """Return an upper bound of the size of a version: twice the checkpoint, as 16 bits may be published as 32."""
    return 2 * sum(path.stat().st_size for path in hf_checkpoint.glob("*.safetensors"))


def largest_adapter_bytes(hf_checkpoint: Path, rank: int) -> int:
    """Return an upper bound of the size of an adapter: two float32 matrices of that rank per matrix of the folder."""
    entries = [entry for path in hf_checkpoint.glob("*.safetensors") for entry in safetensors_entries(path)]
    return sum(4 * rank * sum(entry.shape) for entry in entries if len(entry.shape) == 2)


def _in_memory(config: Config, device: str, settings: PublisherSettings, engine_kind: EngineKind) -> WeightPublisher:
    """Create a publisher for engines on the trainers' machine."""
    hf_checkpoint = Path(config.hf_checkpoint or "")
    with_adapter = sends_adapter(config)
    largest = largest_export_bytes(hf_checkpoint)
    root, why = choose_root(largest_adapter_bytes(hf_checkpoint, config.lora_rank) if with_adapter else largest)
    logger.info("weights are staged in %s: %s", root, why)
    contents: Contents = "adapter" if with_adapter else "tensors" if engine_kind == "embedded" else "model"

    def through_files() -> WeightPublisher:
        return FolderPublisher(settings, VersionFolders(root, hf_checkpoint, in_memory=True), contents)

    if contents != "tensors" or device != "cuda":
        return through_files()
    return SharedMemoryPublisher(settings, through_files=through_files, largest_bytes=largest)
