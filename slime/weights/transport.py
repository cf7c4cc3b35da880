"""Which transport a run uses, and the publisher that goes with it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from slime.cluster.memory.staging import choose_root
from slime.cluster.node import Cluster, Node, Placement
from slime.cluster.watchdog import Limit, named
from slime.config import Config
from slime.config.plugins import load_function
from slime.config.plugins.view import plugin_args
from slime.engine.http.client import EngineClient, EngineRejected, PauseMode
from slime.errors import RunFailed, UserError
from slime.models.delta.folder import delta_checksum, safetensors_entries
from slime.weights.broadcast import BroadcastPublisher, Meet
from slime.weights.delta import DeltaPublisher, LocalDeltaPublisher
from slime.weights.disk import DiskPublisher, VersionFolders
from slime.weights.ipc import SharedMemoryPublisher
from slime.weights.publisher import Delivery, EngineKind, RunAsync, Settings, WeightPublisher, WeightSource, all_of
from slime.weights.shm_files import (
    AdapterBroadcastPublisher,
    AdapterDiskPublisher,
    AdapterInMemoryPublisher,
    FolderInMemoryPublisher,
    TensorPublisher,
)

# Whether the engines have exactly the trainers' weights (`--check-weight-update-equal`).
#
# The invariant: a check that returns has compared every tensor of every engine; a difference ends the run.

_NAMED = 3


class WeightsDiffer(RunFailed):
    """An engine has other bytes than the trainers after an update."""


class ChecksumCheck:
    """Embedded engines name the checksum of each tensor; the trainers compute theirs."""

    def __init__(
        self, source: WeightSource, clients: Sequence[EngineClient], run_async: RunAsync, *, timeout_s: float
    ) -> None:
        self._source = source
        self._clients = clients
        self._run_async = run_async
        self._timeout_s = timeout_s

    def __call__(self, version: int) -> None:
        expected = self._source.weight_checksums()
        clients = list(self._clients)
        answers = self._run_async(named(self._ask(clients), f"weight check {version}"))
        for client, found in zip(clients, answers, strict=True):
            wrong = [name for name, checksum in expected.items() if found.get(name) != checksum]
            if wrong:
                raise WeightsDiffer(
                    f"engine {client.base_url} differs from the trainers in {len(wrong)} of {len(expected)} tensors "
                    f"after version {version}: {', '.join(wrong[:_NAMED])}"
                )

    async def _ask(self, clients: Sequence[EngineClient]) -> list[dict[str, str]]:
        answers = await all_of(clients, lambda c: c.check_weights("checksum", timeout_s=self._timeout_s))
        return [answer["checksums"] for answer in answers]


class ReloadCheck:
    """SGLang keeps its tensors under its own names and compares them only with a snapshot of itself: the engines take
    one, load a folder with all weights, and compare."""

    def __init__(
        self, reload: WeightPublisher, clients: Sequence[EngineClient], run_async: RunAsync, *, timeout_s: float
    ) -> None:
        self._reload = reload
        self._clients = clients
        self._run_async = run_async
        self._timeout_s = timeout_s

    def __call__(self, version: int) -> None:
        self._run_async(named(self._ask("snapshot"), f"snapshot of version {version}"))
        self._reload.publish(version)
        try:
            self._run_async(named(self._ask("compare"), f"comparison of version {version}"))
        except EngineRejected as cause:
            raise WeightsDiffer(
                f"version {version} differs from the same weights loaded as a folder: {cause}"
            ) from cause

    def _ask(self, action: str) -> Coroutine[Any, Any, list[dict[str, Any]]]:
        return all_of(list(self._clients), lambda client: client.check_weights(action, timeout_s=self._timeout_s))


POST_WRITE = "--custom-update-weight-post-write-path"
_LOOPBACK = ("127.", "localhost", "[::1]", "::1")

logger = logging.getLogger(__name__)


def choose_transport(
    config: Config, device: str, engine_kind: EngineKind = "embedded", *, nodes: Sequence[str] = ()
) -> tuple[str, str]:
    """The transport (`tensor`, `nccl` or `disk`) of a run, and why; refuses flags that contradict one another. `nodes`
    are those with trainers or engines that are not the driver's machine."""
    asked = config.update_weight_transport
    if sends_adapter(config):
        _refuse_with_adapters(config, engine_kind)
    if config.update_weight_mode == "delta":
        if asked not in ("auto", "disk"):
            raise UserError(
                f"--update-weight-mode delta travels through files, not by --update-weight-transport {asked}: use disk"
            )
        where = "each engine applies them to its own weights"
        if engine_kind == "sglang":
            _refuse_local_folder(config, nodes)
            where = "they are applied to a model folder beside the engines, which load it"
        return "disk", f"only changed bytes ({config.update_weight_delta_encoding}), {where}"
    if asked == "nccl" and device == "cuda" and config.colocate and not nodes:
        raise UserError(
            "--update-weight-transport nccl cannot join two processes on one GPU, which --colocate makes: use tensor"
        )
    if config.custom_update_weight_post_write_path is not None and asked != "disk":
        raise UserError(f"{POST_WRITE} is called for versions on disk: add --update-weight-transport disk")
    if asked == "tensor" and nodes:
        raise UserError(
            f"--update-weight-transport tensor passes weights through the memory of one machine, and {_some(nodes)} is "
            "another one: use nccl, or disk with --update-weight-disk-dir on a file system that all nodes share"
        )
    if asked != "auto":
        return asked, "asked for"
    if nodes:
        return "nccl", f"trainers and engines are on several nodes ({_some(nodes)})"
    if away := _addresses_elsewhere(config):
        return "nccl", f"engines run on other machines ({', '.join(away)})"
    how = "files in shared memory" if engine_kind == "embedded" else "a model folder in shared memory"
    if device == "cuda" and engine_kind == "embedded" and not sends_adapter(config):
        how = "memory of the GPU where they can open it, else a pinned region of the host, else files in shared memory"
    what = f"{'the adapter' if sends_adapter(config) else 'weights'} on {device}"
    verb = "passes" if sends_adapter(config) else "pass"
    return "tensor", f"trainer and engines are on one machine, {what} {verb} through {how}"


def _some(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")


def _refuse_local_folder(config: Config, nodes: Sequence[str]) -> None:
    if nodes and config.update_weight_local_checkpoint_dir is None:
        raise UserError(
            "--update-weight-mode delta: SGLang's servers load the folder that deltas are applied to, and "
            f"{_some(nodes)} has not the driver's: use --update-weight-mode full, or name a folder that all share "
            "with --update-weight-local-checkpoint-dir"
        )


def with_delta_checksum(config: Config, device: str, backend: str) -> Config:
    """The same with a checksum of deltas, if it has none: one that GPUs compute where engines apply deltas there, and
    one that is quick on the host where deltas are applied to files, as for SGLang."""
    if config.update_weight_mode != "delta":
        return config
    where = device if backend == "embedded" else "cpu"
    return config.replace(update_weight_delta_checksum=delta_checksum(config.update_weight_delta_checksum, where))


def sends_whole_weights(config: Config, engine_kind: EngineKind) -> bool:
    """Whether an update needs nothing of what an engine had before; asked for embedded engines, which can forget it."""
    return engine_kind == "embedded" and config.update_weight_mode == "full" and not sends_adapter(config)


def weights_folder(config: Config, run_dir: str | os.PathLike[str]) -> Path:
    """Where versions on disk are."""
    return Path(config.update_weight_disk_dir or Path(run_dir) / "weights")


def check_weights_folder(config: Config, cluster: Cluster, run_dir: str | os.PathLike[str]) -> None:
    """Weights that pass through files need a folder that all nodes share: one that does not see it is named."""
    if config.update_weight_transport != "disk" and config.update_weight_mode != "delta":
        return
    folder = weights_folder(config, run_dir)
    if strangers := cluster.strangers_to(str(folder)):
        raise UserError(
            f"weights pass through the folder {folder}, which is not the same on the node {strangers[0]}: give one on "
            "a file system that all nodes share with --update-weight-disk-dir, or use --update-weight-transport nccl"
        )


def sends_adapter(config: Config) -> bool:
    """Whether the engines get a LoRA adapter in the place of whole weights."""
    return config.lora_rank > 0 and config.lora_sync == "adapter"


def _refuse_with_adapters(config: Config, engine_kind: EngineKind) -> None:
    if config.update_weight_mode == "delta":
        raise UserError(
            "--lora-sync adapter sends the adapter whole, so there is no delta: drop --update-weight-mode delta, or "
            "use --lora-sync merged"
        )
    if engine_kind == "sglang":
        raise UserError(
            "--lora-sync adapter: SGLang's servers add an adapter in the requests that name it, and no request here "
            "does: use --lora-sync merged, or the embedded engine"
        )


def make_publisher(
    config: Config,
    *,
    device: str,
    run_dir: str | os.PathLike[str],
    source: WeightSource,
    clients: Sequence[EngineClient],
    run_async: RunAsync,
    engine_kind: EngineKind = "embedded",
    placement: Placement | None = None,
    delivery: Delivery | None = None,
) -> WeightPublisher:
    """The publisher of this run; loading new weights gets as long as loading the first ones (engine_start_timeout).
    Without a placement trainers and engines are on this machine."""
    nodes = () if placement is None else tuple(node.name for node in placement.nodes if not node.is_here)
    transport, reason = choose_transport(config, device, engine_kind, nodes=nodes)
    logger.info("weight updates by %s: %s", transport, reason)
    limit_s = Limit(config.engine_start_timeout, "--engine-start-timeout")
    settings = Settings(limit_s, cast(PauseMode, config.update_weight_pause_mode), delivery=delivery)
    if config.check_weight_update_equal:
        if nodes and engine_kind == "sglang":
            raise UserError(
                "--check-weight-update-equal has SGLang's servers load a folder in this machine's memory, and "
                f"{_some(nodes)} is another one: drop it, or use the embedded engine"
            )
        check = _make_check(config, source, clients, run_async, engine_kind, settings)
        settings = replace(settings, check=check)
    if transport == "tensor":
        return _in_memory(config, device, source, clients, run_async, engine_kind, settings)
    if transport == "nccl":
        by_broadcast = AdapterBroadcastPublisher if sends_adapter(config) else BroadcastPublisher
        return by_broadcast(
            source,
            clients,
            run_async,
            backend=_broadcast_backend(config, device),
            meet=None if placement is None or not nodes else _meeting_at(placement.trainers[0].node),
            engine_kind=engine_kind,
            processes_per_engine=config.rollout_num_gpus_per_engine if engine_kind == "sglang" else 1,
            settings=settings,
        )
    folders = VersionFolders(
        weights_folder(config, run_dir),
        Path(config.hf_checkpoint or ""),
        keep_files=config.update_weight_disk_keep_files,
        on_written=_post_write_hook(config, clients),
    )
    if config.update_weight_mode == "full":
        by_disk = AdapterDiskPublisher if sends_adapter(config) else DiskPublisher
        return by_disk(source, clients, run_async, folders, settings)
    checksum = delta_checksum(config.update_weight_delta_checksum, device)
    kind = {"encoding": config.update_weight_delta_encoding, "checksum": checksum}
    if engine_kind == "embedded":
        return DeltaPublisher(source, clients, run_async, folders, settings, **kind)
    local = Path(config.update_weight_local_checkpoint_dir or Path(run_dir) / "weights_local")
    return LocalDeltaPublisher(source, clients, run_async, folders, settings, **kind, local=local)


def largest_export_bytes(hf_checkpoint: Path) -> int:
    """An upper bound of what one version takes: the checkpoint's tensors, should a 16-bit one be published in 32."""
    return 2 * sum(path.stat().st_size for path in hf_checkpoint.glob("*.safetensors"))


def largest_adapter_bytes(hf_checkpoint: Path, rank: int) -> int:
    """An upper bound of an adapter: two float32 matrices of that rank beside every matrix of the folder."""
    entries = [entry for path in hf_checkpoint.glob("*.safetensors") for entry in safetensors_entries(path)]
    return sum(4 * rank * sum(entry.shape) for entry in entries if len(entry.shape) == 2)


def _in_memory(
    config: Config,
    device: str,
    source: WeightSource,
    clients: Sequence[EngineClient],
    run_async: RunAsync,
    engine_kind: EngineKind,
    settings: Settings,
) -> WeightPublisher:
    hf_checkpoint = Path(config.hf_checkpoint or "")
    with_adapter = sends_adapter(config)
    needed = largest_adapter_bytes(hf_checkpoint, config.lora_rank) if with_adapter else None
    root, why = choose_root(largest_export_bytes(hf_checkpoint) if needed is None else needed)
    logger.info("weights are staged in %s: %s", root, why)
    if with_adapter:
        return AdapterInMemoryPublisher(
            source, clients, run_async, root=root, hf_checkpoint=hf_checkpoint, settings=settings
        )
    if engine_kind == "embedded":

        def through_files() -> WeightPublisher:
            return TensorPublisher(source, clients, run_async, root=root, settings=settings)

        if device != "cuda":
            return through_files()
        return SharedMemoryPublisher(
            source,
            clients,
            run_async,
            through_files=through_files,
            largest_bytes=largest_export_bytes(hf_checkpoint),
            settings=settings,
        )
    return FolderInMemoryPublisher(
        source, clients, run_async, root=root, hf_checkpoint=hf_checkpoint, settings=settings
    )


def _make_check(
    config: Config,
    source: WeightSource,
    clients: Sequence[EngineClient],
    run_async: RunAsync,
    engine_kind: EngineKind,
    settings: Settings,
) -> Callable[[int], None]:
    if engine_kind == "embedded":
        return ChecksumCheck(source, clients, run_async, timeout_s=settings.timeout_s)
    reload = _in_memory(config, "cpu", source, clients, run_async, engine_kind, settings)
    return ReloadCheck(reload, clients, run_async, timeout_s=settings.timeout_s)


def _broadcast_backend(config: Config, device: str) -> str:
    """NCCL refuses two members on one GPU, which trainers and engines that share theirs would be."""
    return "nccl" if device == "cuda" and not config.colocate else "gloo"


def _meeting_at(node: Node) -> Meet:
    """Where the trainers' rank 0 serves the store of the group: a port of its node."""
    return lambda urls: (node.address, node.free_ports(1)[0])


def _post_write_hook(config: Config, clients: Sequence[EngineClient]) -> Callable[[Path], None] | None:
    path = config.custom_update_weight_post_write_path
    if path is None:
        return None
    hook = load_function(path, what=POST_WRITE, params=("args", "version_dir", "rollout_engines"))

    def call(version_dir: Path) -> None:
        hook(plugin_args(config), str(version_dir), list(clients))

    return call


def _addresses_elsewhere(config: Config) -> list[str]:
    addresses = config.rollout_external_engine_addrs or []
    return [one for one in addresses if not one.removeprefix("http://").startswith(_LOOPBACK)]
