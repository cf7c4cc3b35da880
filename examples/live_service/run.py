"""A model that is served to users learns from their conversations while it serves them.

python examples/live_service/run.py [--seed N] [--device cpu|cuda] [--output-dir DIR]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import task  # noqa: E402
import users  # noqa: E402
from tiny_chat import make_model  # noqa: E402
from tiny_run import exit_code  # noqa: E402

import slime  # noqa: E402
from slime.agent.interaction import FILE_NAME  # noqa: E402
from slime.agent.server.settings import ADDRESS_FILE  # noqa: E402
from slime.data.buffer.codec import Codec  # noqa: E402
from slime.data.buffer.reader import Choice, reading  # noqa: E402
from slime.errors import UserError  # noqa: E402
from slime.observability.metrics import read_metrics  # noqa: E402

LEARNED = 0.85
HELD_OUT = 96


def main(words: list[str] | None = None) -> int:
    args = _parser().parse_args(words)
    if importlib.util.find_spec("openai") is None:
        raise UserError("the users talk to the model through the OpenAI SDK: pip install openai")
    began = time.monotonic()
    common = {"device": args.device, "dtype": "float32", "seed": args.seed}
    files = task.write_files(args.output_dir / "data", shown=4000, held_out=HELD_OUT, seed=args.seed)
    warm = args.warm_model or _warmed_up(args, files, common)
    print(f"{args.clients} processes of users talk to the model, which learns from those who consent", flush=True)
    answers = args.output_dir / "answers.jsonl"
    with _talking(args, answers):
        _live(args, files, warm, common)
    metrics = read_metrics(args.output_dir / "metrics.jsonl")
    before, after = (share_of(metrics)[place] for place in (0, -1))
    print(times_of_answers(answers, metrics).in_words())
    traces = traces_of(users.MARK, args.output_dir)
    print(f"words of users without consent on the disk: {len(traces)} files {traces or ''}".rstrip())
    seconds = time.monotonic() - began
    scores = f"{after:.1%} of users are satisfied on held-out questions, {before:.1%} before ({seconds:.0f} s)"
    has_learned = after >= LEARNED and not traces
    print(f"It learned from its conversations: {scores}." if has_learned else f"It did not learn enough: {scores}.")
    return 0 if has_learned else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/live_service"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="cpu")
    parser.add_argument("--warm-up-steps", type=int, default=60)
    parser.add_argument("--steps", type=int, default=18, help="of learning from conversations")
    parser.add_argument("--clients", type=int, default=2, help="processes of users")
    parser.add_argument("--quiet", type=int, default=100, help="answers of each before the first user consents")
    parser.add_argument("--warm-model", type=Path, help="a model folder of an earlier warm-up, instead of another one")
    parser.add_argument("--no-hints", action="store_true", help="learn from thanks and complaints alone")
    return parser


def _warmed_up(args: argparse.Namespace, files: task.Files, common: dict[str, Any]) -> Path:
    folder = args.output_dir / "warmup"
    if (folder / "model").exists() and (args.output_dir / ADDRESS_FILE).exists():
        print(f"goes on in {args.output_dir}, with the warm-up that was there", flush=True)
        return folder / "model"
    print("warm-up: a model of 0.3 M parameters copies an assistant that repeats what it is asked", flush=True)
    rows = [json.loads(line) for line in files.demonstrations.read_text().splitlines()]
    base = make_model(args.output_dir / "base", rows, words=task.WORDS, seed=args.seed)
    slime.run(
        **common,
        hf_checkpoint=str(base),
        prompt_data=str(files.demonstrations),
        input_key="messages",
        loss_type="sft_loss",
        calculate_per_token_loss=True,
        rollout_shuffle=True,
        num_rollout=args.warm_up_steps,
        rollout_batch_size=32,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=8192,
        lr=6e-3,
        lr_warmup_iters=10,
        lr_decay_style="cosine",
        output_dir=str(folder),
        save_hf=str(folder / "model"),
    )
    return folder / "model"


def _live(args: argparse.Namespace, files: task.Files, warm: Path, common: dict[str, Any]) -> None:
    hints = {} if args.no_hints else {"use_opd": True, "opd_type": "sample", "opd_kl_coef": 0.2}
    slime.run(
        **common,
        **hints,
        hf_checkpoint=str(warm),
        async_mode="full",
        colocate=True,  # one GPU does both
        live_judge_path=f"{HERE / 'task.py'}:judge",
        live_filter_path=f"{HERE / 'task.py'}:without_addresses",
        live_idle_timeout=5.0,
        rollout_max_response_len=10,
        num_rollout=args.steps,
        rollout_batch_size=32,
        n_samples_per_prompt=1,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=8192,
        lr=5e-4,
        lr_warmup_iters=3,
        custom_rm_path=f"{HERE / 'task.py'}:right_answer",
        eval_prompt_data=[("held-out", str(files.held_out))],
        eval_input_key="prompt",
        eval_label_key="label",
        apply_chat_template=True,
        eval_interval=6,
        output_dir=str(args.output_dir),
        save=str(args.output_dir / "checkpoints"),
        load=str(args.output_dir / "checkpoints"),
        save_interval=6,
        save_hf=str(args.output_dir / "model"),
    )


@contextmanager
def _talking(args: argparse.Namespace, answers: Path) -> Iterator[None]:
    """Processes of users, for as long as the block lasts."""
    common = [str(args.output_dir / ADDRESS_FILE), str(answers), "--task-seed", str(args.seed)]
    common += ["--held-out", str(HELD_OUT), "--quiet", str(args.quiet)]
    command = [sys.executable, str(HERE / "users.py"), *common]
    started = [
        subprocess.Popen([*command, "--seed", str(args.seed * 1000 + number)], stderr=subprocess.DEVNULL)
        for number in range(args.clients)
    ]
    try:
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


class Times(NamedTuple):
    """Seconds that answers took their users, sorted."""

    alone: list[float]
    beside_training: list[float]

    def in_words(self) -> str:
        """p50 and p95 of both, and how they compare."""
        found = {}
        for words, seconds in (("without training", self.alone), ("with training beside it", self.beside_training)):
            if len(seconds) < 2:
                return "too few answers to say how long they take: use a longer --quiet, or more --steps"
            found[words] = [1000 * seconds[int(share * (len(seconds) - 1))] for share in (0.5, 0.95)]
        (p50, p95), (later_p50, later_p95) = found.values()
        lines = [f"{words}: p50 {low:.0f} ms, p95 {high:.0f} ms" for words, (low, high) in found.items()]
        return "\n".join([*lines, f"ratio: p50 {later_p50 / p50:.2f}, p95 {later_p95 / p95:.2f}"])


def times_of_answers(answers: Path, metrics: list[dict[str, Any]]) -> Times:
    """Of answers before anybody had consented, and of those between the first step's end and the last one's."""
    notes = [json.loads(line) for line in answers.read_text().splitlines()]
    steps = [row["time"] for row in metrics if row["kind"] == "train"]
    alone = sorted(note["s"] for note in notes if note["quiet"])
    beside = [
        note for note in notes if not note["quiet"] and note["at"] - note["s"] > steps[0] and note["at"] < steps[-1]
    ]
    return Times(alone, sorted(note["s"] for note in beside))


def share_of(metrics: list[dict[str, Any]]) -> list[float]:
    """Of held-out questions, those that were answered as users want it, evaluation by evaluation."""
    return [row["eval/held-out"] for row in metrics if row["kind"] == "eval"]


def traces_of(mark: str, folder: Path) -> list[str]:
    """The files of a run in which these words are found; of the journal and the store also what is packed in them."""
    found = [
        str(file.relative_to(folder))
        for file in sorted(folder.rglob("*"))
        if file.is_file() and mark.encode() in file.read_bytes()
    ]
    with reading(str(folder)) as journal:
        found += ["a sample" for one in journal.samples(Choice()) if mark in repr(one.sample.to_dict())]
    with closing(sqlite3.connect(folder / FILE_NAME)) as connection:
        records = [Codec().unpack(row[0]) for row in connection.execute("SELECT record FROM exchanges")]
    return found + ["an exchange" for record in records if mark in repr(record)]


if __name__ == "__main__":
    sys.exit(exit_code(main))
