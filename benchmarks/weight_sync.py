"""Bytes and seconds of a weight update: all weights (the GPU's memory, a pinned region of the host, files in shared
memory, disk), changed bytes (sparse, xor, overwrite), and of LoRA (`--lora-rank`, all linear layers) the merged weights
or the adapter alone, both through shared memory.

    python benchmarks/weight_sync.py                            # 29 M parameters on the CPU
    python benchmarks/weight_sync.py --shape qwen3-0.6b         # 0.6 B: 15 GiB of memory on the CPU
    python benchmarks/weight_sync.py --shape qwen3-0.6b --device cuda
    python benchmarks/weight_sync.py --shape qwen3-0.6b --device cuda --untrained --modes "full, GPU memory"

A real trainer makes real Adam steps (`--lr`, 1e-6 unless told) and publishes to a real engine after each; weights are
bfloat16 on the wire. Every figure is the median over `--repeat` updates after the first one, which is whole in every
mode. `encode` is finding, gathering and compressing (for whole weights: casting and writing), `write` the rest until
the files are there, `apply` the engine's own part, `paused` how long it stood still, `total` the whole update.
`--untrained` leaves the steps out: whole weights take as long whatever changed.

Of weights in shared memory the parts are told besides: `export` (the trainer gathers them into the memory), `open` (the
engine checks names and opens the memory, while it generates), `copy`, `stop` (what else of the pause: ending requests,
dropping prefixes, going on), `request` (HTTP and JSON), `free` (the trainer's memory is its own again).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from workload import engine, make_model

from slime.config import Config, derive
from slime.data.sample import Sample
from slime.engine.http.client import EngineClient
from slime.train.trainer_group import TrainerGroup
from slime.weights import make_publisher
from slime.weights.ipc import DEVICE, HOST, SharedMemoryPublisher
from slime.weights.publisher import PublisherSettings, WeightPublisher
from slime.weights.transport import largest_export_bytes

WAYS = {"full, GPU memory": DEVICE, "full, pinned region": HOST}
MODES: dict[str, dict[str, Any]] = {
    **{mode: {"update_weight_transport": "tensor"} for mode in WAYS},
    "full, shared memory": {"update_weight_transport": "tensor"},
    "full, disk": {"update_weight_transport": "disk"},
    "delta, xor": {"update_weight_mode": "delta", "update_weight_delta_encoding": "xor"},
    "delta, overwrite": {"update_weight_mode": "delta", "update_weight_delta_encoding": "overwrite"},
    "delta, sparse": {"update_weight_mode": "delta", "update_weight_delta_encoding": "sparse"},
    "LoRA, merged": {"update_weight_transport": "tensor", "lora_sync": "merged"},
    "LoRA, adapter": {"update_weight_transport": "tensor", "lora_sync": "adapter"},
}
PARTS = ("encode", "write", "apply", "paused", "total")


class MeasuredTrainers(TrainerGroup):
    """Keeps what the ranks say about their last delta."""

    parts: Sequence[dict[str, Any]] = ()

    def call(self, verb: str, **params: object) -> list[Any]:
        answers = super().call(verb, **params)
        if verb == "export_delta":
            self.parts = answers
        return answers


class MeasuredEngine(EngineClient):
    """Keeps what the engine says about its last update, and how long the call took."""

    told: dict[str, float] = {}  # noqa: RUF012

    async def _control_json(self, *call: Any) -> dict[str, Any]:
        began = time.perf_counter()
        answer = await super()._control_json(*call)
        if "seconds" in answer:
            self.told = {"call": time.perf_counter() - began} | {
                name.removesuffix("_seconds"): value for name, value in answer.items() if name.endswith("seconds")
            }
        return answer

    def parts(self, export: float, total: float) -> dict[str, float]:
        """Of an update through shared memory."""
        told = self.told
        return {
            "export": export,
            "open": told["open"],
            "copy": told["copy"],
            "stop": told["seconds"] - told["copy"],
            "request": told["call"] - told["open"] - told["seconds"],
            "free": total - export - told["call"],
        }


def make_samples(count: int, length: int, seed: int) -> list[list[Sample]]:
    rng = np.random.default_rng(seed)
    return [
        [Sample(group_index=i, index=i, tokens=rng.integers(2, 90, length).tolist(), response_length=length - 4,
                loss_mask=[1] * (length - 4), status=Sample.Status.COMPLETED)]
        for i in range(count)
    ]  # fmt: skip


def publisher_of(
    mode: str, config: Config, device: str, trainers: TrainerGroup, client: EngineClient, run_dir: Path, run_async: Any
) -> WeightPublisher:
    """The publisher of a mode; of shared memory, one that goes that way and no other."""
    if mode not in WAYS:
        device = "cpu" if mode == "full, shared memory" else device  # files, whatever the device
        return make_publisher(
            config, device=device, run_dir=run_dir, source=trainers, clients=[client], run_async=run_async
        )

    def refuse() -> WeightPublisher:
        raise SystemExit(f"{mode}: the engine could not open the memory")

    largest = largest_export_bytes(Path(config.hf_checkpoint or ""))
    settings = PublisherSettings(trainers, [client], run_async)
    return SharedMemoryPublisher(settings, through_files=refuse, largest_bytes=largest, ways=[WAYS[mode]])


def measure(
    mode: str, folder: Path, url: str, args: argparse.Namespace, run_dir: Path, run_async: Any
) -> dict[str, Any]:
    """The medians of one mode."""
    flags = MODES[mode] | {"update_weight_disk_dir": str(Path(args.disk_dir or run_dir) / "versions")}
    if "lora_sync" in flags:
        flags["lora_rank"] = args.lora_rank
    config = derive(
        Config(hf_checkpoint=str(folder), loss_type="sft_loss", rollout_batch_size=args.samples, num_rollout=99,
               global_batch_size=args.samples, micro_batch_size=1, dtype="bfloat16", lr=args.lr, **flags)
    )  # fmt: skip
    rows: list[dict[str, float]] = []
    client = MeasuredEngine(url)
    with MeasuredTrainers(config, device=args.device, run_dir=run_dir) as trainers:
        trainers.start()
        publisher = publisher_of(mode, config, args.device, trainers, client, run_dir, run_async)
        for version in range(args.repeat + 1):
            if version and not args.untrained:
                trainers.train(version - 1, make_samples(args.samples, args.length, version))
            result = publisher.publish(version)
            encode = max((part["encode_seconds"] for part in trainers.parts), default=result.write_seconds)
            rows.append({
                "bytes": result.bytes, "density": 1.0 if result.density is None else result.density, "encode": encode,
                "write": result.write_seconds - encode, "apply": client.told["seconds"],
                "paused": result.paused_seconds, "total": result.seconds,
                **(client.parts(result.write_seconds, result.seconds) if mode in WAYS else {}),
            })  # fmt: skip
        publisher.close()
    run_async(client.aclose())
    return {"mode": mode} | {name: median(row[name] for row in rows[1:]) for name in rows[0]}


def show(results: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    full = {row["mode"]: row for row in results}.get("full, disk", results[0])
    title = f"{args.shape}, bfloat16, {args.device}, lr {args.lr:g}: one update, median of {args.repeat}"
    table = Table(
        "mode", "MiB", "of full", "changed", *(f"{part} s" for part in PARTS), f"total vs {full['mode']}", title=title
    )
    for row in results:
        table.add_row(
            row["mode"], f"{row['bytes'] / 2**20:.1f}", f"{row['bytes'] / full['bytes']:.2%}", f"{row['density']:.2%}",
            *(f"{row[part]:.3f}" for part in PARTS), f"{full['total'] / row['total']:.2f}x",
        )  # fmt: skip
    Console(width=140).print(table)
    shared = [row for row in results if row["mode"] in WAYS]
    names = ("export", "open", "copy", "stop", "request", "free")
    parts = Table("mode", *(f"{name} ms" for name in names), "paused ms", "total ms", title="through shared memory")
    for row in shared:
        parts.add_row(row["mode"], *(f"{1e3 * row[name]:.1f}" for name in (*names, "paused", "total")))
    if shared:
        Console(width=140).print(parts)
    print(json.dumps({"benchmark": "weight_sync", **vars(args), "results": list(results)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", default="small")
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--repeat", type=int, default=3)
    add("--samples", type=int, default=2)
    add("--length", type=int, default=64)
    add("--lr", type=float, default=1e-6)
    add("--lora-rank", type=int, default=16)
    add("--disk-dir", help="where versions are written; default: a temporary folder")
    add("--untrained", action="store_true", help="no training between updates")
    add("--modes", nargs="+", choices=list(MODES), help="default: all that the device has")
    args = parser.parse_args()
    args.modes = args.modes or [mode for mode in MODES if args.device == "cuda" or WAYS.get(mode) != DEVICE]
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def run_async(coro: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coro, loop).result()

    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(Path(scratch) / "model", args.shape, "bfloat16")
        options = ["--dtype", "bfloat16", "--max-total-tokens", "1024", "--no-compile"]
        results = []
        with engine(folder, Path(scratch) / "engine.log", options, args.device) as url:
            for mode in args.modes:
                run_dir = Path(scratch) / mode.replace(", ", "-").replace(" ", "-")
                results.append(measure(mode, folder, url, args, run_dir, run_async))
                parts = ", ".join(f"{part} {results[-1][part]:.3f}" for part in PARTS)
                print(f"{mode}: {results[-1]['bytes'] / 2**20:.1f} MiB, seconds: {parts}", flush=True)
        show(results, args)


if __name__ == "__main__":
    main()
