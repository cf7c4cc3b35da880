"""Host memory and seconds of loading a model folder on several ranks of one machine: in parts, and whole.

    python benchmarks/loading.py                                    # 8 ranks on the CPU, both ways
    python benchmarks/loading.py --shape qwen3-0.6b --ways parts
    python benchmarks/loading.py --device cuda --ranks 1 --shape qwen3-4b

"parts": what the trainer does, each rank reads its part of every weight into a model on the meta device. "whole": each
rank loads all of the folder with transformers and keeps its part, as it was done before. Master weights are float32,
the folder is bfloat16. The memory is the sum over the ranks of their proportional set sizes (a page that n processes
share counts for one n-th in each), less what they had before they began; it is looked at all the time, and the largest
sum counts; freed memory goes back to the system at once. On the CPU the weights themselves stay in it. "copies" are of
the model in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from training_memory import RETURN_MEMORY
from workload import make_model

from slime.cluster.devices import threads_per_process

MIB = 2**20
WAYS = ("parts", "whole")
EVERY_S = 0.02


def load(way: str, folder: str, ranks: Any, device: str) -> Any:
    """The policy of this rank."""
    import torch

    from slime.config import Config, derive
    from slime.config.initial_weights import InitialWeights
    from slime.models.loading import load_causal_lm
    from slime.train.backends.fsdp import builder
    from slime.train.backends.fsdp import builder as loading
    from slime.train.backends.fsdp.attention import ATTENTION_NAME
    from slime.train.backends.fsdp.packed_model import PolicyModel
    from slime.train.timers import RankProgress

    config = derive(
        Config(hf_checkpoint=folder, rollout_batch_size=ranks.size, actor_num_gpus_per_node=ranks.size, device=device)
    )
    if way == "whole":
        loading.register_packed_attention()
        how = {"dtype": torch.float32, "device": "cpu", "attn_implementation": ATTENTION_NAME}
        builder.load_packed = lambda *_args: PolicyModel(load_causal_lm(folder, **how))
    made = builder.FSDPBuilder(config, ranks, compute_dtype=torch.bfloat16, progress=RankProgress())
    return made.policy(config, InitialWeights())


def one_rank(way: str, folder: str, tiny: str, store: str, device: str) -> None:
    """Says when it is ready, begins when it is told to, says how long it took, and goes when it is told to."""
    from transformers.utils.logging import disable_progress_bar

    from slime.train.processes import TrainerRendezvous
    from slime.train.topology import join_ranks

    disable_progress_bar()
    ranks = join_ranks(device, meeting=TrainerRendezvous(store), timeout_minutes=5)
    load(way, tiny, ranks, device)  # what it imports and starts is no weight
    ranks.barrier()
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.perf_counter()
    loaded = load(way, folder, ranks, device)
    ranks.barrier()
    print(json.dumps({"seconds": time.perf_counter() - begin}), flush=True)
    sys.stdin.readline()
    del loaded
    os._exit(0)


def proportional_bytes(pids: list[int]) -> int:
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def measure(way: str, folder: Path, tiny: Path, ranks: int, device: str, scratch: Path) -> dict[str, float]:
    """Peak and rest of all ranks, in bytes over what they had, and seconds."""
    processes = []
    for rank in range(ranks):
        env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        env |= {"GLOO_SOCKET_IFNAME": "lo", **RETURN_MEMORY, **threads_per_process(ranks)}
        argv = [sys.executable, __file__, "--one-rank", way, str(folder), str(tiny), str(scratch / way), device]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        processes.append(subprocess.Popen(argv, env=env, text=True, **pipes))
    pids = [process.pid for process in processes]
    for process in processes:
        if process.stdout.readline() != "ready\n":
            raise SystemExit("a rank failed: its error is above")
    before = proportional_bytes(pids)
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    peak = before
    while not select.select([processes[0].stdout], [], [], EVERY_S)[0]:
        peak = max(peak, proportional_bytes(pids))
    answer = processes[0].stdout.readline()
    rest = proportional_bytes(pids)
    for process in processes:
        process.stdin.write("end\n")
        process.stdin.flush()
        process.wait()
    return {"peak": peak - before, "rest": rest - before, "seconds": json.loads(answer)["seconds"]}


def main() -> None:
    if sys.argv[1:2] == ["--one-rank"]:
        one_rank(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="75m")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    args = parser.parse_args()
    table = Table(title=f"{args.shape} on {args.device}", title_justify="left")
    for column in ("ranks", "way", "peak MiB", "copies", "afterwards MiB", "seconds"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as made:
        folder = make_model(Path(made) / "model", args.shape, "bfloat16")
        tiny = make_model(Path(made) / "tiny", "tiny", "bfloat16")
        copy = 2 * sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        for ranks in args.ranks:
            for way in args.ways:
                scratch = Path(made) / str(ranks)
                scratch.mkdir(exist_ok=True)
                found = measure(way, folder, tiny, ranks, args.device, scratch)
                print(json.dumps({"ranks": ranks, "way": way, "copy": copy, **found}), flush=True)
                table.add_row(
                    str(ranks),
                    way,
                    f"{found['peak'] / MIB:,.0f}",
                    f"{found['peak'] / copy:.2f}",
                    f"{found['rest'] / MIB:,.0f}",
                    f"{found['seconds']:.1f}",
                )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
