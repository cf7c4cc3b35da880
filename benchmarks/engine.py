"""The embedded engine over HTTP against transformers.generate: same model, prompts and lengths, in one run.

All requests are sent at once. Response lengths are mixed: generate has to run every row to the longest, the engine lets
a finished one go. Only the tokens that were asked for count. A second part shows what prefix sharing saves: eight
samples of each prompt, against as many prompts that have nothing in common.

    python benchmarks/engine.py                                                        # a small model on the CPU
    python benchmarks/engine.py --shape qwen3-0.6b --device cuda --dtype bfloat16 \
        --requests 256 --prompt-len 128 128 --response-len 512 512                         # the figure for GPUs
    python benchmarks/engine.py --against HEAD~5    # in the place of both: this engine and an earlier one, in turns
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from answers import checked_out
from rich.console import Console
from rich.table import Table
from workload import ROOT, engine, make_model, threads_per_process

ONES = 8  # single requests of a turn: on a noisy machine one says little
Requests = list[tuple[list[int], int]]  # prompt ids, response length


def make_requests(count: int, prompt_len: list[int], response_len: list[int], *, seed: int) -> Requests:
    """Random prompts of the tokenizer's 99 tokens; lengths uniform between the bounds."""
    rng = random.Random(seed)
    return [
        ([rng.randrange(3, 99) for _ in range(rng.randint(*prompt_len))], rng.randint(*response_len))
        for _ in range(count)
    ]


def total(requests: Requests) -> int:
    """Tokens asked for."""
    return sum(length for _, length in requests)


async def send_all(url: str, requests: Requests) -> float:
    """Seconds until every request is answered, log-probs included."""
    timeout = aiohttp.ClientTimeout(total=3600)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def send(ids: list[int], length: int) -> None:
            params = {"max_new_tokens": length, "ignore_eos": True, "temperature": 1.0}
            body = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
            async with session.post(f"{url}/generate", json=body) as answer:
                reply = await answer.json()
                assert answer.status == 200, reply
                assert len(reply["meta_info"]["output_token_logprobs"]) == length

        began = time.perf_counter()
        await asyncio.gather(*(send(ids, length) for ids, length in requests))
        return time.perf_counter() - began


def generate_all(folder: Path, requests: Requests, device: str, dtype: str) -> float:
    """The same with transformers: one left-padded batch, each row done at its own length."""
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
    longest = max(len(ids) for ids, _ in requests)
    ids = torch.tensor([[0] * (longest - len(p)) + p for p, _ in requests], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in requests], device=device)
    lengths = torch.tensor([length for _, length in requests], device=device)

    class OwnLength(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return lengths <= input_ids.shape[1] - longest

    def run(limit: int) -> float:
        began = time.perf_counter()
        model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=limit, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True,
            stopping_criteria=StoppingCriteriaList([OwnLength()]),
        )  # fmt: skip
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    run(4)
    return run(int(lengths.max()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, nargs=2, default=[16, 128], metavar=("MIN", "MAX"))
    parser.add_argument("--response-len", type=int, nargs=2, default=[16, 256], metavar=("MIN", "MAX"))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--against", metavar="REV", help="a revision of this repository, or a folder with its `slime`")
    return parser.parse_args()


def measure(args: argparse.Namespace, folder: Path, scratch: Path) -> dict[str, Any]:
    """Both sides; the engine's figure is its median run, each with prompts it has not seen."""
    workloads = [make_requests(args.requests, args.prompt_len, args.response_len, seed=s) for s in range(args.repeat)]
    shared = make_requests(max(2, args.requests // 8), [256, 256], [8, 8], seed=100)
    distinct = make_requests(len(shared) * 8, [256, 256], [8, 8], seed=102)  # the same work with nothing to share
    options = ["--dtype", args.dtype, "--max-running-requests", str(args.requests)]
    figures: dict[str, Any] = {"shape": args.shape, "device": args.device, "dtype": args.dtype}
    began = time.perf_counter()
    with engine(folder, scratch / "engine.log", options, args.device) as url:
        figures["engine_start_s"] = time.perf_counter() - began
        asyncio.run(send_all(url, make_requests(4, [16, 16], [16, 16], seed=101)))
        rates = [total(w) / asyncio.run(send_all(url, w)) for w in workloads]
        figures |= {"engine_tok_s": median(rates), "engine_runs": [round(rate) for rate in rates]}
        asyncio.run(send_all(url, make_requests(len(distinct), [256, 256], [8, 8], seed=103)))  # warm for this shape
        sharing = asyncio.run(send_all(url, shared * 8))
        apart = asyncio.run(send_all(url, distinct))
    figures |= {"shared_prefix_s": sharing, "unshared_prefix_s": apart, "prefix_ratio": apart / sharing}
    rate = total(workloads[0]) / generate_all(folder, workloads[0], args.device, args.dtype)
    return figures | {"generate_tok_s": rate, "ratio": figures["engine_tok_s"] / rate}


def compare(args: argparse.Namespace, folder: Path, scratch: Path) -> dict[str, Any]:
    """Tokens a second of this engine and of another revision's: the mixed requests, and one of 64 tokens."""
    other = scratch / "other"
    other.mkdir()
    trees = {"this": ROOT, args.against: checked_out(args.against, other)}
    options = ["--dtype", args.dtype, "--max-running-requests", str(args.requests)]
    rates: dict[str, dict[str, list[float]]] = {name: {"mixed": [], "one": []} for name in trees}
    with ExitStack() as stack:
        urls = {
            name: stack.enter_context(engine(folder, scratch / f"engine{place}.log", options, args.device, tree))
            for place, (name, tree) in enumerate(trees.items())
        }
        for turn in range(args.repeat + 1):
            loads = {
                "mixed": [make_requests(args.requests, args.prompt_len, args.response_len, seed=turn)],
                "one": [make_requests(1, [64, 64], [64, 64], seed=200 + ONES * turn + at) for at in range(ONES)],
            }
            for name in sorted(trees, reverse=turn % 2 == 1):  # neither is always the first
                for load, requests in ((load, one) for load, several in loads.items() for one in several):
                    rate = total(requests) / asyncio.run(send_all(urls[name], requests))
                    rates[name][load] += [rate] if turn else []  # the first turn is for warmth
    figures: dict[str, Any] = {
        name: {f"{load}_tok_s": median(r) for load, r in own.items()} for name, own in rates.items()
    }
    runs = {name: {load: [round(rate) for rate in r] for load, r in own.items()} for name, own in rates.items()}
    return figures | {"runs": runs}


def main() -> None:
    args = parse()
    if args.device == "cpu":
        os.environ.update(threads_per_process(1))  # both sides with the same threads
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(Path(scratch) / "model", args.shape, args.dtype)
        if args.against:
            show_comparison(args, compare(args, folder, Path(scratch)))
        else:
            show(args, measure(args, folder, Path(scratch)))


def show(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    title = f"{args.requests} requests at once, {args.shape} on {args.device}, {args.dtype}"
    table = Table(title=title, title_justify="left")
    for column in ("what", "figure", "ratio"):
        table.add_column(column, justify="left" if column == "what" else "right")
    rows = [
        ("embedded engine over HTTP, log-probs", f"{figures['engine_tok_s']:,.0f} tok/s", ""),
        ("transformers.generate", f"{figures['generate_tok_s']:,.0f} tok/s", f"{figures['ratio']:.2f}x"),
        ("8 samples a prompt, prefixes shared", f"{figures['shared_prefix_s']:.2f} s", ""),
        (
            "8 samples a prompt, each computed",
            f"{figures['unshared_prefix_s']:.2f} s",
            f"{figures['prefix_ratio']:.2f}x",
        ),
    ]
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items()}))


def show_comparison(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    for load in ("mixed_tok_s", "one_tok_s"):
        this, other = figures["this"][load], figures[args.against][load]
        print(f"{load}: {args.against} {other:,.1f}, this {this:,.1f}, {this / other:.2f}x")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
