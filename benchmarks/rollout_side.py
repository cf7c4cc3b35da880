"""The driver's side of a rollout alone: how long requests take to leave it and answers to become a recorded batch.

The engine samples nothing. It waits until all requests of a rollout are in, and answers them together from bytes that
it has ready, log-probs included; so what is left of the time is ours: prompts, requests, reading answers, rewards
(random), checks, the journal, shared memory. With `--against` the code of another revision does the same in turns.

    python benchmarks/rollout_side.py                    # this code
    python benchmarks/rollout_side.py --against HEAD~5   # and the ratio to an earlier one, or to a folder with one
    python benchmarks/rollout_side.py --profile          # where the driver's time goes

in        until the last request has reached the engine
answers   from the engine's first answer until the batch is whole (what the log calls generation ends here)
batch     from there until it is in the journal as a batch, and the trainers could have it
cpu       seconds of a core that the driver took for all of it, which other work on the machine changes little
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import cProfile
import gc
import json
import os
import pstats
import random
import shutil
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "slime/quickstart/tokenizer"
PARTS = ("in", "answers", "batch", "cpu")


def serve(count: int, length: int) -> None:
    """An engine that answers when `count` requests are in; says when that was and when it had sent the first."""
    import orjson
    from aiohttp import web

    bodies = [
        [orjson.dumps(scripted(random.Random(seed), length, columns)) for seed in range(count)]
        for columns in (False, True)
    ]
    waiting: list[asyncio.Future[int]] = []

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        answer = asyncio.get_running_loop().create_future()
        waiting.append(answer)
        if len(waiting) == count:
            all_in = time.monotonic()
            await asyncio.sleep(0.2)
            print(json.dumps({"in": all_in, "ended": time.monotonic()}), flush=True)
            for place, one in enumerate(waiting):
                one.set_result(place)
            waiting.clear()
        body = bodies["X-Slime-Columns" in request.headers][await answer]
        return web.Response(body=body, content_type="application/json")

    async def run() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        print(runner.addresses[0][1], flush=True)
        gc.freeze()
        await asyncio.Event().wait()

    asyncio.run(run())


def scripted(rng: random.Random, length: int, columns: bool) -> dict[str, Any]:
    """An answer as the embedded engine gives it, with the tokens in columns where those are asked for."""
    ids = [rng.randrange(3, 99) for _ in range(length)]
    log_probs = [-float(np.float32(rng.expovariate(1.0))) for _ in ids]
    told: Any = [(value, token, None) for value, token in zip(log_probs, ids, strict=True)]
    if columns:
        packed = {"ids": np.array(ids, dtype="<i4"), "logprobs": np.array(log_probs, dtype="<f4")}
        told = {name: base64.b64encode(values).decode() for name, values in packed.items()}
    meta = {
        "id": "scripted", "finish_reason": {"type": "length", "length": length}, "prompt_tokens": 128,
        "completion_tokens": length, "cached_tokens": 0, "weight_version": "0", "e2e_latency": 1.0,
        "weight_versions": [{"version": "0", "start": 0, "end": length}], "output_token_logprobs": told,
    }  # fmt: skip
    text = "".join(rng.choices(string.ascii_lowercase + " ", k=length))
    return {"text": text, "meta_info": meta} | ({} if columns else {"output_ids": ids})


@contextmanager
def child(tree: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """This program with other arguments, and with the `slime` of `tree`."""
    command = [sys.executable, __file__, *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": f"{tree}:{':'.join(sys.path)}"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        sys.exit("a process of the benchmark ended; what it said is above")
    return json.loads(line)


def drive(url: str, groups: int, samples: int, length: int, rollouts: int, profile: bool) -> None:
    """Make rollouts, one for each line of the standard input, as a run does; says when each part ended."""
    from slime.cluster.memory.arena import SharedArena
    from slime.config import Config, derive
    from slime.config.plugins.view import plugin_args
    from slime.data.buffer.source import JournaledSource, open_journal
    from slime.data.custom_source import make_data_source
    from slime.rollout.pipeline import RolloutMaker
    from slime.rollout.runtime import RolloutRuntime
    from slime.rollout.sample_pipeline import generate_and_rm_group
    from slime.rollout.sglang_rollout import generate_rollout

    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        rng = random.Random(1)
        prompts = Path(scratch) / "prompts.jsonl"
        rows = ("".join(rng.choices(string.ascii_lowercase, k=128)) for _ in range(groups * rollouts))
        prompts.write_text("".join(json.dumps({"input": row}) + "\n" for row in rows))
        config = derive(
            Config(
                hf_checkpoint=str(model_folder(Path(scratch))), prompt_data=str(prompts), rm_type="random",
                device="cpu", num_rollout=rollouts, rollout_batch_size=groups, n_samples_per_prompt=samples,
                rollout_max_response_len=length, output_dir=scratch,
            )
        )  # fmt: skip
        journal = open_journal(config, Path(scratch) / "journal.sqlite")
        stack.callback(journal.close)
        source = JournaledSource(make_data_source(config, plugin_args(config)), journal)
        runtime = stack.enter_context(RolloutRuntime(config, [url], dispatch=generate_and_rm_group))
        arena = SharedArena()
        stack.callback(arena.close)
        runtime.journal, runtime.keep = journal, arena.keep
        source.resume(0)
        ended: list[float] = []

        def rollout(*args: Any, **kwargs: Any) -> Any:
            made = generate_rollout(*args, **kwargs)
            ended.append(time.monotonic())
            return made

        make: Any
        if hasattr(RolloutMaker, "make"):  # an older revision, with --against
            given = {"journal": journal, "log": lambda *_: False, "at_work": ExitStack, "pulse": runtime.pulse}
            make = RolloutMaker(runtime.args, rollout, source, **given).make  # type: ignore[arg-type, attr-defined, call-arg]
        else:
            make = RolloutMaker(runtime, rollout, source, log=lambda *_: False, at_work=ExitStack).get
        profiler = cProfile.Profile(time.thread_time)
        print(json.dumps("ready"), flush=True)
        for number, _ in enumerate(sys.stdin):
            if profile and number == 1:
                runtime.loop_thread.loop.call_soon_threadsafe(profiler.enable)
            began, busy = time.monotonic(), time.process_time()
            made = make(number)
            over, busy = time.monotonic(), time.process_time() - busy
            assert len(made.samples) == groups, len(made.samples)
            print(json.dumps({"began": began, "whole": ended[-1], "over": over, "busy": busy}), flush=True)
            journal.consumed(number)
            journal.checkpointed(number)
        if profile:
            done = threading.Event()
            runtime.loop_thread.loop.call_soon_threadsafe(lambda: (profiler.disable(), done.set()))
            done.wait()
            pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(40).sort_stats(
                "cumtime"
            ).print_stats(90)


def model_folder(scratch: Path) -> Path:
    """A tokenizer and a config.json: nobody reads weights here."""
    folder = Path(shutil.copytree(TOKENIZER, scratch / "model"))
    shape = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 512}
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def measure(trees: dict[str, Path], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Milliseconds of each part, medians; the trees take turns."""
    seen: dict[str, dict[str, list[float]]] = {name: {part: [] for part in PARTS} for name in trees}
    load = args.groups, args.samples, args.length
    with ExitStack() as stack:
        engine = stack.enter_context(child(ROOT, "--serve", args.groups * args.samples, args.length))
        url = f"http://127.0.0.1:{read(engine)}"
        drivers = {
            name: stack.enter_context(
                child(tree, "--drive", url, *load, args.repeat + 1, *(["--profile"] if args.profile else []))
            )
            for name, tree in trees.items()
        }
        for process in drivers.values():
            read(process)
        for turn in range(args.repeat + 1):
            for name, process in drivers.items():
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
                there, here = read(engine), read(process)
                if turn:  # the first one is for warmth
                    seen[name]["in"].append(1e3 * (there["in"] - here["began"]))
                    seen[name]["answers"].append(1e3 * (here["whole"] - there["ended"]))
                    seen[name]["batch"].append(1e3 * (here["over"] - here["whole"]))
                    seen[name]["cpu"].append(1e3 * here["busy"])
        for process in drivers.values():
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
    return {name: {part: median(values) for part, values in parts.items()} for name, parts in seen.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="REV", help="a revision of this repository, or a folder with its `slime`")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8, help="of each group")
    parser.add_argument("--length", type=int, default=512, help="tokens of each answer")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--serve", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--drive", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(*args.serve)
    if args.drive:
        return drive(args.drive[0], *map(int, args.drive[1:]), args.profile)
    with tempfile.TemporaryDirectory() as scratch:
        trees = {"this": ROOT}
        if args.against:
            from answers import checked_out

            trees[args.against] = checked_out(args.against, Path(scratch))
        found = measure(trees, args)
    for name, parts in found.items():
        print(f"{name:12}", "   ".join(f"{part} {parts[part]:7.1f} ms" for part in PARTS))
    if args.against:
        ratios = (f"{part} {found[args.against][part] / found['this'][part]:7.2f} x " for part in PARTS)
        print(f"{'ratio':12}", "   ".join(ratios))
    return None


if __name__ == "__main__":
    main()
