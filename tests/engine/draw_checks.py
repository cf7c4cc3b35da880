"""Checks of the sampling kernels in Triton's interpreter; `main` prints the failures of each."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch

from slime.engine.embedded.model.cpu_sampler import temperature_of
from slime.engine.embedded.model.runner import record_top
from slime.engine.embedded.model.triton_launch import launch
from slime.engine.embedded.sampling import penalties, sampler
from slime.engine.embedded.sampling.sampler import KernelDraw
from slime.engine.embedded.scheduler import Sequence
from tests.engine.drawing import batch_of, sequence, staying, wrong
from tests.engine.table_body import decode_as_on_cuda
from tests.engine.test_numbers import generate, prompt, running_core
from tests.tiny_models import make_model_folder

CPU = torch.device("cpu")
CUT: dict[str, Any] = {"top_p": 0.7, "top_k": 9, "min_p": 0.01, "temperature": 1.7}


def drawn(
    draw: KernelDraw, logits: torch.Tensor, sequences: list[Sequence], uniform: torch.Tensor, ahead: int = 0
) -> list[list[float]]:
    """Draw from each row; return its (token, log-prob)."""
    tokens = torch.full((len(sequences) + 1,), -1)
    batch = batch_of(sequences, uniform, tokens)
    edited = logits.clone()
    draw.plain(edited, batch)
    if not all(seq.plain for seq in sequences):
        arrived = draw.special(edited, batch, sequences, [ahead] * len(sequences))
        if arrived is not None:
            arrived()
    assert tokens[batch.rows].tolist() == batch.results[:, 0].long().tolist()
    return batch.results.tolist()


def faults(
    vocab: int, tile: int, rows: dict[str, torch.Tensor], asked: list[dict[str, Any]], seed: int, room: int = 256
) -> Iterator[str]:
    """Check every row with every setting; the uniform numbers include both ends."""
    cases = [(name, row, raw) for name, row in rows.items() for raw in asked]
    sequences = [sequence(i, vocab, **raw) for i, (_, _, raw) in enumerate(cases)]
    uniform = torch.rand(len(cases), generator=torch.Generator().manual_seed(seed))
    uniform[::5], uniform[1::7] = 0.0, 1 - 2**-24
    logits = torch.stack([row for _, row, _ in cases])
    draw = KernelDraw(len(cases), vocab, CPU, tile=tile, room=room)
    results = drawn(draw, logits, sequences, uniform)
    for (name, row, raw), seq, u, (token, logprob) in zip(cases, sequences, uniform.tolist(), results, strict=True):
        if fault := wrong(row, seq, u, int(token), logprob):
            yield f"{name}, {raw}: {fault}"
        if draw._cuts is not None and not seq.params.greedy_or_full_support and not seq.params.edits_logits:
            far = (row.max() - row) * (1 / torch.tensor(temperature_of(seq)))
            limit, last = draw._cuts.limit[seq.row], draw._cuts.last[seq.row]
            stays = (far < limit) | ((far == limit) & (torch.arange(vocab) <= last))
            fewest, most = staying(row, seq)
            fewest &= far <= 87  # beyond that the weight is negligible
            if (fewest & ~stays).any() or (stays & ~most).any():
                yield f"{name}, {raw}: {int(stays.sum())} tokens stay, not {int(fewest.sum())} to {int(most.sum())}"


def plain_rows() -> Iterator[str]:
    torch.manual_seed(0)
    rows = {
        "equal": torch.zeros(37),
        "normal": torch.randn(37),
        "one token": torch.full((37,), -50.0).index_fill(0, torch.tensor([36]), 60.0),
        "a tile of -inf": torch.cat([torch.full((16,), -torch.inf), torch.randn(21)]),
    }
    yield from faults(37, 16, rows, [{}, {"temperature": 0.3}, {"temperature": 0}, {"temperature": 3e38}], seed=1)
    yield from faults(5000, 1024, {"ragged": torch.randn(5000)}, [{}, {"temperature": 0}, {"top_k": 1}], seed=2)


def small_cuts() -> Iterator[str]:
    torch.manual_seed(1)
    few, sparse = torch.randint(0, 3, (37,)).float(), torch.randn(37).masked_fill(torch.rand(37) < 0.7, -torch.inf)
    yield from faults(37, 16, {"few values": few, "mostly -inf": sparse}, [CUT, {"top_p": 0.9}, {"min_p": 0.3}], seed=3)
    yield from faults(37, 16, {"equal": torch.zeros(37)}, [{"top_k": 5}, {"top_p": 1e-9}], seed=3)


def large_cuts() -> Iterator[str]:
    torch.manual_seed(2)
    yield from faults(5000, 1024, {"normal": torch.randn(5000) * 0.6}, [{"top_p": 0.95}], seed=4)
    yield from faults(5000, 1024, {"few values": torch.randint(0, 3, (5000,)).float()}, [{"top_k": 2000}], seed=4)


def hard_cuts() -> Iterator[str]:
    """Extreme rows and settings: the kept tokens equal those of a stable sort, ties by index."""
    torch.manual_seed(6)
    one, close = torch.full((40,), -torch.inf), 1 + torch.arange(40).flip(0) * 2**-23
    one[7] = 3.0
    rows = {
        "equal": torch.full((40,), -2.5),
        "one above -inf": one,
        "huge": torch.randint(-3, 4, (40,)) * 1e30,
        "neighbours in fp32": close[torch.randperm(40)],
        "beyond reach": torch.tensor([0.0, -86.0, -88.0, -120.0]).repeat(10),
    }
    asked: list[dict[str, Any]] = [
        {"top_p": 1e-9},
        {"top_p": 0.33},
        {"top_p": 1 - 2**-24},
        {"top_k": 1, "temperature": 0.5},
        {"top_k": 39},
        {"top_k": 40, "min_p": 1.0},
        {"top_k": 4000, "top_p": 0.5, "temperature": 1e-3},
    ]
    yield from faults(40, 16, rows, asked if os.environ.get("SLIME_LONG") else asked[1::2], seed=6)


def full_brackets() -> Iterator[str]:
    """More tokens near the cut than the list holds: whole rows are read instead."""
    torch.manual_seed(7)
    rows = {"close together": torch.randn(500) * 1e-3, "few values": torch.randint(0, 9, (500,)) * 1e-3}
    asked: list[dict[str, Any]] = [{"top_p": 0.6}, {"top_k": 171}, {"top_p": 0.9, "top_k": 460, "min_p": 0.999}]
    yield from faults(500, 128, rows, asked, seed=7, room=4)


def random_cuts() -> Iterator[str]:
    """Random rows and settings; the seed is fixed so that failures repeat."""
    chance = random.Random(8)
    torch.manual_seed(8)
    for _ in range(12):
        row = torch.randn(300) * 10 ** chance.uniform(-2, 1.5)
        row = (row * 8).round() / 8 if chance.random() < 0.5 else row
        raw = {
            "top_p": chance.choice([1.0, chance.random(), 1 - 10 ** chance.uniform(-5, -1)]),
            "top_k": chance.choice([-1, chance.randrange(2, 320)]),
            "min_p": chance.choice([0.0, 10 ** chance.uniform(-6, 0)]),
            "temperature": 10 ** chance.uniform(-1, 1),
        }
        yield from faults(300, 128, {"by chance": row}, [raw], seed=8, room=chance.choice([8, 256]))


def nan_rows() -> Iterator[str]:
    """A row with non-finite logits gets the log-prob NaN at any settings, and other rows are unaffected."""
    torch.manual_seed(3)
    sequences = [sequence(i, 20, **raw) for i, raw in enumerate([{}, {"temperature": 0}, CUT, {"top_p": 0.5}, {}])]
    logits = torch.randn(5, 20)
    logits[0, 7], logits[1], logits[2], logits[4] = torch.nan, torch.nan, torch.nan, -torch.inf
    results = drawn(KernelDraw(5, 20, CPU, tile=16), logits, sequences, torch.full((5,), 0.4))
    if not all(0 <= token < 20 for token, _ in results):
        yield f"tokens outside the vocabulary: {results}"
    if [i for i, (_, logprob) in enumerate(results) if logprob != logprob] != [0, 1, 2, 4]:
        yield f"other rows than 0, 1, 2 and 4 have no log-prob: {results}"
    if fault := wrong(logits[3], sequences[3], 0.4, int(results[3][0]), results[3][1]):
        yield fault


def distribution() -> Iterator[str]:
    """Chi-square of 150 draws from five tokens."""
    probs = torch.tensor([0.35, 0.05, 0.3, 0.2, 0.1])
    sequences = [sequence(i, 5) for i in range(150)]
    uniform = torch.rand(150, generator=torch.Generator().manual_seed(5))
    results = drawn(KernelDraw(150, 5, CPU, tile=8), probs.log().expand(150, 5), sequences, uniform)
    counts = torch.tensor([token for token, _ in results]).long().bincount(minlength=5)
    if (squared := float(((counts - 150 * probs) ** 2 / (150 * probs)).sum())) > 13.3:  # 1 % at four degrees
        yield f"{counts.tolist()} for {(150 * probs).tolist()}, chi-square {squared}"


def edits_ahead() -> Iterator[str]:
    """Three unread steps: each applies the penalties of the tokens before it; then another sequence reuses the row."""
    torch.manual_seed(4)
    vocab = 12
    penalties = {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "presence_penalty": 0.5}
    draw = KernelDraw(3, vocab, CPU, tile=16)

    def newcomers() -> list[Sequence]:
        return [
            sequence(2, vocab, **penalties),
            sequence(0, vocab, stops=(5, 6, 99), min_new_tokens=3, logit_bias={"5": 9.0, "3": -2.0}),
            sequence(1, vocab, **penalties, top_p=0.9, logit_bias={"2": 4.0}, stops=(2,), min_new_tokens=2),
        ]

    for sequences in (newcomers(), newcomers()):
        steps = [(torch.randn(3, vocab), torch.rand(3)) for _ in range(3)]
        results = [drawn(draw, logits, sequences, u, ahead=i) for i, (logits, u) in enumerate(steps)]
        for (logits, u), result in zip(steps, results, strict=True):
            for row, seq, number, (token, logprob) in zip(logits, sequences, u.tolist(), result, strict=True):
                if fault := wrong(row, seq, number, int(token), logprob):
                    yield f"{seq.rid} after {seq.output_ids}: {fault}"
                seq.output_ids.append(int(token))
    for seq in sequences:  # simulates a failed last step
        del seq.output_ids[2:]
    logits, u = torch.randn(3, vocab), torch.rand(3)
    for row, seq, number, result in zip(logits, sequences, u.tolist(), drawn(draw, logits, sequences, u), strict=True):
        if fault := wrong(row, seq, number, int(result[0]), result[1]):
            yield f"{seq.rid} done once more after {seq.output_ids}: {fault}"


def top_tokens() -> Iterator[str]:
    torch.manual_seed(5)
    sequences = [sequence(i, 20, temperature=0.5, logit_bias={"3": 5.0}) for i in range(3)]
    sequences[0].top_logprobs, sequences[2].top_logprobs = 2, 4
    logits = torch.randn(3, 20)
    drawn(KernelDraw(3, 20, CPU, tile=32), logits, sequences, torch.rand(3))
    found = [seq.output_top for seq in sequences]
    for seq in sequences:
        seq.output_top = []
    record_top(logits, sequences)
    wanted = [seq.output_top for seq in sequences]
    if rounded(found) != rounded(wanted):
        yield f"{found} for {wanted}"


def rounded(tops: list[list[list[tuple[float, int]]]]) -> list[list[list[tuple[float, int]]]]:
    return [[[(round(logprob, 4), token) for logprob, token in best] for best in own] for own in tops]


def whole_engine() -> Iterator[str]:
    """An engine with lookahead and kernel draws gives the tokens of the CPU sampler."""
    seeded = {"max_new_tokens": 5, "sampling_seed": 3, "ignore_eos": True}
    bodies = [
        {"sampling_params": {**seeded, "top_p": 0.8, "repetition_penalty": 1.4, "frequency_penalty": 1.0}},
        {"sampling_params": {**seeded, "presence_penalty": 2.0, "min_new_tokens": 4}, "top_logprobs_num": 2},
        {"sampling_params": {**seeded, "max_new_tokens": 2}},
        {"sampling_params": {**seeded, "logit_bias": {"9": 4.0}, "frequency_penalty": 2.0}},
    ]
    answers = []
    with TemporaryDirectory() as folder:
        make_model_folder(Path(folder), "qwen3")
        for as_on_cuda in (False, True):
            with running_core(Path(folder), "--max-running-requests", "2") as core:
                if as_on_cuda:
                    draw = KernelDraw(2, core.loaded.vocab_size, CPU, tile=128)
                    core.call(partial(decode_as_on_cuda, core, draw)).result()
                got = generate(core, [{"input_ids": prompt(i, 9), **body} for i, body in enumerate(bodies)])
            answers.append([(s.output_ids, [[t for _, t in best] for best in s.output_top], s.finish) for s in got])
    if answers[0] != answers[1]:
        yield f"{answers[1]} for {answers[0]}"
    if [len(ids) for ids, _, _ in answers[0]] != [5, 5, 2, 5]:
        yield f"{answers[0]}"


@contextmanager
def recorded_launches(compiled: set[str], on_compile: Callable[[], object] = lambda: None) -> Iterator[set[str]]:
    """Yield the launches of the sampling kernels while the body runs, and add those of `meta` tensors to `compiled`."""
    launched: set[str] = set()

    def run(kernel: Any, grid: Any, *arguments: Any, **compiled_for: Any) -> None:
        tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
        kinds = [x.dtype if isinstance(x, torch.Tensor) else x for x in arguments]
        text = f"{kernel.fn.__name__} {kinds} {compiled_for}"
        if tensors[0].is_meta:
            compiled.add(text)
            on_compile()
        else:
            launched.add(text)
            launch(kernel, grid, *arguments, **compiled_for)

    with patch.object(penalties, "launch", run), patch.object(sampler, "launch", run):
        yield launched


def prepared() -> Iterator[str]:
    """The kernels compiled at start-up are exactly those launched later."""
    compiled: set[str] = set()
    with recorded_launches(compiled) as launched:
        draw = KernelDraw(2, 20, CPU, tile=16)
        for raw in ({"top_p": 0.9}, {"top_k": 3, "presence_penalty": 1.0}):
            drawn(draw, torch.randn(1, 20), [sequence(0, 20, **raw)], torch.rand(1))
        draw.prepare()
        special, for_special = {text for text in launched if "'REDRAW': False" not in text}, compiled.copy()
        compiled.clear()
        KernelDraw.compile_plain(2, 20, tile=16)
    if compiled != launched - special:
        yield f"{compiled ^ (launched - special)} is compiled and not launched, or the other way round"
    if for_special != special:
        yield f"{for_special ^ special} is compiled and not launched, or the other way round"


def while_compiling() -> Iterator[str]:
    """Torch draws by the same rules until the kernels are compiled; then the kernels take over."""
    torch.manual_seed(9)
    vocab, may_end = 12, threading.Event()
    sequences = [
        sequence(0, vocab),
        sequence(1, vocab, top_p=0.6, temperature=0.7),
        sequence(2, vocab, repetition_penalty=1.5, frequency_penalty=1.0, top_k=4),
    ]
    draw = KernelDraw(3, vocab, CPU, tile=16)
    compiles = threading.Event()

    def wait() -> None:
        compiles.set()
        may_end.wait()

    with recorded_launches(set(), wait) as launched:
        compiling = draw.prepare_in_background()
        compiles.wait()
        for is_compiled in (False, False, True, True):
            if is_compiled:
                may_end.set()
                compiling.join()
            foreseen = [draw.foresees(seq) for seq in sequences]
            if foreseen != [is_compiled, is_compiled, is_compiled and len(sequences[2].output_ids) > 2]:
                yield f"{foreseen} are foreseen behind {len(sequences[0].output_ids)} tokens"
            logits, u = torch.randn(3, vocab), torch.rand(3)
            for row, seq, number, result in zip(
                logits, sequences, u.tolist(), drawn(draw, logits, sequences, u), strict=True
            ):
                if fault := wrong(row, seq, number, int(result[0]), result[1]):
                    yield f"{seq.rid} after {seq.output_ids}: {fault}"
                seq.output_ids.append(int(result[0]))
            if is_compiled != any("probe_kernel" in text for text in launched):
                yield f"compiled: {is_compiled}, launched: {launched}"

    def fail() -> None:
        raise RuntimeError("no compiler")

    with recorded_launches(set(), fail):
        draw.prepare_in_background().join()
    if draw.foresees(sequences[1]):
        yield "kernels that could not be compiled are used"


CHECKS = (
    plain_rows,
    small_cuts,
    large_cuts,
    hard_cuts,
    full_brackets,
    random_cuts,
    nan_rows,
    distribution,
    edits_ahead,
    top_tokens,
    prepared,
    while_compiling,
    whole_engine,
)


def main() -> None:
    for check in CHECKS:
        print(json.dumps({check.__name__: list(check())}), flush=True)
