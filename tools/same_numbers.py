"""Does training still compute the numbers of an older commit, bit for bit?

    python tools/same_numbers.py --against REV                    # about two minutes on two cores
    python tools/same_numbers.py --against REV --world 1          # one process only
    python tools/same_numbers.py --against REV --only ppo moe     # cases whose name has one of these words
    python tools/same_numbers.py --against REV --cold             # every process started from nothing

Each case is a short training on the CPU: real trainer processes, started and fed through `TrainerGroup` as the driver
does, on samples that are the same for both sides. What is compared: every metric of every step and rollout, and the
exported float32 weights at the end. Metrics that REV does not have are named and are no difference; anything else is,
and the exit code is 1. What REV computed is kept in `~/.cache/slime/same_numbers`, so the second call runs one side.

The moments of the optimizer and the weights of a critic are compared through the metrics of the steps after them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROLLOUTS = 3
TOOL = "same_numbers"  # how a trainer imports this file
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "entropy_coef": 0.01}


@dataclass(frozen=True)
class Case:
    """Flags of a training, the tiny model it is of, and the layouts it is run in."""

    flags: Mapping[str, Any] = field(default_factory=dict)
    model: str = "qwen3"
    dtypes: Sequence[str] = ("float32", "bfloat16")
    worlds: Sequence[int] = (1, 2)
    resumes: bool = False


ONE_STEP = {"num_steps_per_rollout": 1, "global_batch_size": 9}
CASES: dict[str, Case] = {
    "grpo, KL and reference": Case(KL),
    "one step per rollout": Case({**KL, **ONE_STEP}),
    "gspo, sequence TIS, normalised": Case(
        {"advantage_estimator": "gspo", "use_tis": True, "tis_level": "sequence", "tis_batch_normalize": True}
    ),
    "cispo, OPSM": Case({"advantage_estimator": "cispo", "eps_clip": 1.0, "use_opsm": True}, worlds=(1,)),
    "reinforce++": Case(
        {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "kl_coef": 0.1},
        dtypes=("float32",),
    ),
    "reinforce++ baseline": Case(
        {"advantage_estimator": "reinforce_plus_plus_baseline", "normalize_advantages": True, "kl_coef": 0.1},
        dtypes=("float32",),
        worlds=(1,),
    ),
    "ppo with critic": Case(
        {"advantage_estimator": "ppo", "lambd": 0.95, "gamma": 0.99, "kl_coef": 0.05, "normalize_advantages": True}
    ),
    "rloo": Case({"advantage_estimator": "rloo"}, dtypes=("float32",), worlds=(1,)),
    "dr_grpo": Case({"advantage_estimator": "dr_grpo"}, dtypes=("float32",), worlds=(1,)),
    "dapo, rejection": Case(
        {"advantage_estimator": "dapo", "use_rs": True, "rs_lower_bound": 0.1, "rs_upper_bound": 9.0},
        dtypes=("float32",),
        worlds=(1,),
    ),
    "TIS, rollout entropy": Case({"use_tis": True, "use_rollout_entropy": True}, worlds=(1,)),
    "rollout log-probs as old": Case({"use_rollout_logprobs": True}, dtypes=("float32",), worlds=(1,)),
    "sft, token mean": Case({"loss_type": "sft_loss", "calculate_per_token_loss": True}, model="llama"),
    "custom loss": Case({"loss_type": "custom_loss", "custom_loss_function_path": f"{TOOL}.likelihood"}, model="llama"),
    "moving reference": Case({**KL, "ref_update_interval": 2}, dtypes=("float32",), worlds=(1,)),
    "old actor": Case({"keep_old_actor": True}, worlds=(1,)),
    "old actor by version": Case(
        {"keep_old_actor": True, "async_mode": "one-step", "use_tis": False}, dtypes=("float32",)
    ),
    "teacher in the trainer": Case(
        {"use_opd": True, "opd_type": "trainer", "opd_kl_coef": 0.5, "opd_teacher_load": "<llama teacher>"},
        model="llama",
        dtypes=("float32",),
        worlds=(1,),
    ),
    "moe": Case(KL, model="qwen3_moe"),
    "windows, sinks, experts": Case(model="gpt_oss"),
    "windows, softcaps": Case(model="gemma2", worlds=(1,)),
    "dynamic batch, balanced": Case(
        {**KL, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "balance_data": True}
    ),
    "recomputed, chunked, frozen in part": Case(
        {
            "recompute_activations": True,
            "log_probs_chunk_size": 4,
            "freeze_params_name_list": ["embed_tokens"],
            "lr_decay_style": "cosine",
        },
        model="llama",
    ),
    "stopped and resumed": Case({**KL, "ref_update_interval": 2}, resumes=True),
}


@dataclass(frozen=True)
class Run:
    """One case in one layout."""

    name: str
    case: Case
    world: int
    dtype: str

    @property
    def key(self) -> str:
        return f"{self.name} | {self.world} x {self.dtype}"

    @property
    def file_name(self) -> str:
        return "".join(letter if letter.isalnum() else "_" for letter in self.key)


def chosen_runs(words: Sequence[str], worlds: Sequence[int], dtypes: Sequence[str]) -> list[Run]:
    return [
        Run(name, case, world, dtype)
        for name, case in CASES.items()
        if not words or any(word.lower() in name.lower() for word in words)
        for world in case.worlds
        if world in worlds
        for dtype in case.dtypes
        if dtype in dtypes
    ]


def likelihood(args: Any, batch: Any, logits: Any, sum_of_sample_mean: Any) -> tuple[Any, dict[str, Any]]:
    """A custom loss as a user would write it: negative log-likelihood, heavier for samples with a reward."""
    import torch

    log_p = torch.log_softmax(logits[0].float(), -1)
    parts, begin = [], 0
    columns = (batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"], batch["rewards"])
    for tokens, total, response, reward in zip(*columns, strict=True):
        rows = torch.arange(begin + total - response - 1, begin + total - 1)
        parts.append(-(1.0 + float(reward)) * log_p[rows, tokens[-response:]])
        begin += total
    return sum_of_sample_mean(torch.cat(parts)), {"samples": torch.tensor(float(len(parts)))}


# what both sides are given


def make_inputs(folder: Path) -> None:
    """Model folders, and samples for each model, with log-probs near its own, as an engine would have them."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from tests.train.tiny_training import build_model, make_samples

    torch.set_num_threads(1)
    disable_progress_bar()
    build_model("llama", seed=3).save_pretrained(folder / "llama teacher")
    for kind in sorted({case.model for case in CASES.values()}):
        model = build_model(kind)
        model.save_pretrained(folder / kind)
        noise = torch.Generator().manual_seed(7)
        rollouts = []
        for rollout_id in range(ROLLOUTS):
            groups = make_samples(3, 3, seed=rollout_id)
            for sample in (sample for group in groups for sample in group):
                tokens, length = torch.tensor(sample.tokens), sample.response_length
                with torch.no_grad():
                    log_p = torch.log_softmax(model(input_ids=tokens[None]).logits[0], -1)
                own = log_p[-length - 1 : -1].gather(1, tokens[-length:, None])[:, 0]
                sample.rollout_log_probs = (own + 0.05 * torch.randn(length, generator=noise)).tolist()
            rollouts.append([[_plain(sample) for sample in group] for group in groups])
        (folder / f"{kind}.json").write_text(json.dumps(rollouts))


def _plain(sample: Any) -> dict[str, Any]:
    names = ("group_index", "index", "tokens", "response_length", "loss_mask", "reward", "rollout_log_probs")
    return {name: getattr(sample, name) for name in names}


# one side: runs in a process of its own, which imports that side's slime


def record(runs: Sequence[Run], inputs: Path, out: Path, *, warm: bool) -> None:
    """Run everything with the `slime` that is imported here; one JSON and one safetensors file each."""
    import slime

    print(f"  slime from {Path(slime.__file__).parent}", flush=True)
    if warm:
        from tests.warm.popen import Starter, install

        install(Starter())
    for run in runs:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="slime-same-numbers-") as work:
            _record(run, inputs, Path(work), out)
        print(f"  {run.key}: {time.monotonic() - begin:.1f} s", flush=True)


def _record(run: Run, inputs: Path, work: Path, out: Path) -> None:
    from safetensors.torch import load_file, save_file

    rollouts = json.loads((inputs / f"{run.case.model}.json").read_text())
    found: dict[str, float] = {}
    weights: dict[str, Any] = {}
    for begin, end in ((0, 2), (2, ROLLOUTS)) if run.case.resumes else ((0, ROLLOUTS),):
        config = _config(run, inputs, work, load=begin > 0)
        for rollout_id, result, paths in _train(config, rollouts, range(begin, end), work):
            for place, step in enumerate(result.metrics):
                found |= {f"rollout {rollout_id} step {place} {name}": value for name, value in step.items()}
            found |= {f"rollout {rollout_id} {name}": value for name, value in result.rollout_metrics.items()}
            weights = {name: tensor for path in paths for name, tensor in load_file(path).items()}
    found = {name: value for name, value in found.items() if " perf/" not in name}
    save_file(weights, work / "tensors")
    (work / "numbers").write_text(json.dumps(found, indent=1))
    for made, ending in (("tensors", "safetensors"), ("numbers", "json")):  # a name in `out` is that of a whole file
        shutil.copyfile(work / made, out / f".{run.file_name}.{os.getpid()}")
        os.replace(out / f".{run.file_name}.{os.getpid()}", out / f"{run.file_name}.{ending}")


def _train(config: Any, rollouts: Any, which: range, work: Path) -> Iterator[tuple[int, Any, list[Path]]]:
    from slime.data.sample import Sample
    from slime.train.trainer_group import TrainerGroup

    with TrainerGroup(config, device="cpu", run_dir=work / "run") as group:
        if group.start() != which.start:
            raise SystemExit(f"training began at another rollout than {which.start}")
        _export(group, work / "weights", which.start)
        for rollout_id in which:
            groups = [
                [Sample(**facts, status=Sample.Status.COMPLETED) for facts in group] for group in rollouts[rollout_id]
            ]
            if config.async_mode == "one-step":
                for sample in (sample for group in groups for sample in group):
                    sample.version_spans = [[str(max(rollout_id - 1, 0)), sample.response_length]]
            result = group.train(rollout_id, groups)
            paths = _export(group, work / "weights", rollout_id + 1)
            if config.save is not None:
                group.save(rollout_id)
            yield rollout_id, result, paths


def _export(group: Any, folder: Path, version: int) -> list[Path]:
    if not hasattr(group, "call"):  # a REV from before trainers were called by the names of their methods
        older: list[Path] = group.export_weights(folder, version=version)
        return older
    written = group.call("export_weights", out_dir=str(folder), version=version)
    return sorted(Path(path) for paths in written for path in paths)


def _config(run: Run, inputs: Path, work: Path, *, load: bool) -> Any:
    from slime.config import Config, derive

    values: dict[str, Any] = {
        "hf_checkpoint": str(inputs / run.case.model),
        "rollout_batch_size": 3,
        "n_samples_per_prompt": 3,
        "num_steps_per_rollout": 3,
        "global_batch_size": 3,
        "num_rollout": ROLLOUTS,
        "rollout_max_response_len": 16,
        "lr": 1e-3,
        "micro_batch_size": 2,
        "dtype": run.dtype,
        "rollout_dtype": "float32",
        "actor_num_gpus_per_node": run.world,
        "distributed_timeout_minutes": 5,
        "output_dir": str(work),
        "train_env_vars": {"OMP_NUM_THREADS": "1"},
    }
    values |= run.case.flags
    if run.case.resumes:
        values |= {"save": str(work / "checkpoints"), "load": str(work / "checkpoints") if load else None}
    for name, value in values.items():
        if isinstance(value, str) and value.startswith("<"):
            values[name] = str(inputs / value.strip("<>"))
    return derive(Config(**values))


# both sides


@dataclass(frozen=True)
class Difference:
    """Where the two sides part; `size` is the largest absolute difference of any number."""

    numbers: int
    tensors: int
    size: float
    first: str
    new: tuple[str, ...] = ()

    @property
    def is_none(self) -> bool:
        return not self.numbers and not self.tensors


def compare(run: Run, old: Path, new: Path) -> Difference:
    """Bit for bit, so that equal numbers that are no numbers are the same, and 0.0 and -0.0 are not."""
    import torch
    from safetensors.torch import load_file

    one, two = (json.loads((side / f"{run.file_name}.json").read_text()) for side in (old, new))
    wrong = [name for name in one if name not in two or repr(one[name]) != repr(two[name])]
    sizes = [abs(one[name] - two[name]) if name in two else math.inf for name in wrong]
    first = "; ".join(f"{name}: {one[name]!r} -> {two.get(name)!r}" for name in wrong[:1])
    before, after = (load_file(side / f"{run.file_name}.safetensors") for side in (old, new))
    tensors = []
    for name in sorted(before.keys() | after.keys()):
        mine, other = before.get(name), after.get(name)
        if mine is None or other is None or mine.shape != other.shape or mine.dtype != other.dtype:
            tensors.append(name)
            sizes.append(math.inf)
        elif not torch.equal(mine.view(torch.uint8), other.view(torch.uint8)):
            tensors.append(name)
            sizes.append(float((mine.double() - other.double()).abs().max()))
    first = first or "".join(tensors[:1])
    return Difference(len(wrong), len(tensors), max(sizes, default=0.0), first, tuple(sorted(two.keys() - one.keys())))


def run_side(tree: Path, runs: Sequence[Run], inputs: Path, out: Path, *, warm: bool) -> None:
    """Record with the slime of `tree`; what is already in `out` stays."""
    out.mkdir(parents=True, exist_ok=True)
    missing = [run for run in runs if not (out / f"{run.file_name}.json").is_file()]
    if not missing:
        print(f"  kept in {out}")
        return
    paths = [str(tree), str(ROOT / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, str(Path(__file__).resolve()), "--record", str(out), "--inputs", str(inputs)]
    command += ["--runs", json.dumps([run.key for run in missing]), *([] if warm else ["--cold"])]
    subprocess.run(command, check=True, cwd=tree, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})


def extract(revision: str, tree: Path) -> None:
    """The files of a commit, without making it known to git."""
    archive = tree.parent / "tree.tar"
    subprocess.run(["git", "archive", "--format=tar", "-o", str(archive), revision], check=True, cwd=ROOT)
    with tarfile.open(archive) as files:
        files.extractall(tree, filter="data")
    archive.unlink()


def kept_folder(revision: str) -> Path:
    """Of this commit, by this tool, with these libraries on this kind of machine."""
    import safetensors
    import torch
    import transformers

    facts = [Path(__file__).read_text(), (ROOT / "tests/train/tiny_training.py").read_text(), platform.machine()]
    facts += [sys.version, torch.__version__, transformers.__version__, safetensors.__version__]
    digest = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "slime" / "same_numbers" / f"{revision[:12]}-{digest}"


def show(runs: Sequence[Run], found: Sequence[Difference], revision: str) -> int:
    from rich.console import Console
    from rich.table import Table

    table = Table("case", "processes", "dtype", "numbers", "tensors", "largest", title=f"against {revision[:12]}")
    for run, difference in zip(runs, found, strict=True):
        cells = ["same", "same", "0"]
        if not difference.is_none:
            cells = [f"{difference.numbers} differ", f"{difference.tensors} differ", f"{difference.size:.1e}"]
        table.add_row(run.name, str(run.world), run.dtype, *cells)
    console = Console(width=120)
    console.print(table)
    new = sorted({name.split()[-1] for difference in found for name in difference.new})
    if new:
        console.print("metrics that only this side has:", ", ".join(new))
    different = [(run, one) for run, one in zip(runs, found, strict=True) if not one.is_none]
    for run, one in different:
        print(f"{run.key}: {one.first}")
    print(f"{len(runs) - len(different)} of {len(runs)} trainings have the same numbers")
    return 1 if different else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="REV", help="the commit whose numbers are the right ones")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases whose name has one of these words")
    parser.add_argument("--world", nargs="+", type=int, default=[1, 2], help="numbers of processes")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--cold", action="store_true", help="start every process from nothing, not from a warm one")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--inputs", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--runs", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.record is not None:
        wanted = set(json.loads(given.runs))
        runs = [run for run in chosen_runs([], [1, 2], ["float32", "bfloat16"]) if run.key in wanted]
        record(runs, given.inputs, given.record, warm=not given.cold)
        return 0
    if given.against is None:
        parser.error("--against is needed: the commit to compare with")
    runs = chosen_runs(given.only, given.world, given.dtype)
    if not runs:
        parser.error(f"no case has one of these words: {', '.join(given.only)}; there are: {'; '.join(CASES)}")
    words = ["git", "rev-parse", "--verify", f"{given.against}^{{commit}}"]
    asked = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if asked.returncode:
        parser.error(f"--against {given.against} is no commit of {ROOT}")
    return compare_with(asked.stdout.strip(), runs, warm=not given.cold)


def compare_with(revision: str, runs: Sequence[Run], *, warm: bool) -> int:
    sys.path.insert(0, str(ROOT))
    kept = kept_folder(revision)
    with tempfile.TemporaryDirectory(prefix="slime-same-numbers-") as work:
        inputs, tree, new = (Path(work) / name for name in ("inputs", "tree", "new"))
        inputs.mkdir()
        make_inputs(inputs)
        extract(revision, tree)
        print(f"{revision[:12]}:")
        run_side(tree, runs, inputs, kept, warm=warm and (tree / "tests/warm").is_dir())
        shutil.rmtree(tree)
        print(f"{ROOT}:")
        run_side(ROOT, runs, inputs, new, warm=warm)
        return show(runs, [compare(run, kept, new) for run in runs], revision)


if __name__ == "__main__":
    sys.exit(main())
