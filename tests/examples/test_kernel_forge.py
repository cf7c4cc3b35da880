"""examples/kernel_forge: rewards of kernels, including kernels that cheat."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.examples.conftest import EXAMPLES, Ran, modules_of
from tests.rows import long

HERE = EXAMPLES / "kernel_forge"
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="needs a C compiler"),
]


@pytest.fixture
def forge() -> Iterator[Callable[[str], Any]]:
    """The modules of the example by name."""
    with modules_of(HERE) as read:
        yield read


@pytest.fixture
def judged(forge: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Judge source texts for a problem in one sandboxed bench, with small sizes because speed does not matter."""
    monkeypatch.setattr(forge("bench"), "PATIENCE_S", 120.0)

    def judge(problem: str, *sources: str) -> list[Any]:
        naive = forge("languages").LANGUAGES["c"].naive
        sizes = {"row sums": (64, 64, 1), "column sums": (64, 64, 1), "product": (24, 24, 1)}

        async def main() -> list[Any]:
            judge = forge("judge").Judge(forge("bench").CBench(), naive, sizes=sizes)
            try:
                return [await judge.of(forge("problems").problem_of(problem), source) for source in sources]
            finally:
                await judge.aclose()

        return asyncio.run(main())

    return judge


@pytest.mark.parametrize("problem", ["product of leak", long("row sums of relu"), long("column sums of square")])
def test_verdicts_match_the_mistakes_in_pupil_drafts(
    problem: str, forge: Callable[[str], Any], judged: Callable[..., list[Any]]
) -> None:
    asked, language = forge("problems").problem_of(problem), forge("languages").LANGUAGES["c"]
    drafts = list(language.drafts(asked))
    verdicts = judged(problem, *(language.text(asked, draft) for draft in drafts))
    complaints = set()
    for draft, found in zip(drafts, verdicts, strict=True):
        assert found.right == draft.is_right, (draft, found)
        assert (found.reward >= 0.4) == draft.is_right
        if draft.forgets is not None:
            complaints.add(found.feedback)
            continue
        assert found.compiled == (draft.mistake != "semicolon"), (draft, found)
        assert found.feedback.startswith(
            {None: "right, speed ", "semicolon": "does not compile: expected "}.get(draft.mistake, "wrong at n=")
        )
    said = "\n".join(complaints)  # feedback texts for several mistakes, with any compiler
    assert "undeclared" in said
    assert "wrong at n=" in said
    assert len(complaints) > 3


def test_repeated_loop_is_judged_wrong(forge: Callable[[str], Any], judged: Callable[..., list[Any]]) -> None:
    """If a harmless repetition earned the full reward, responses would grow until they are truncated."""
    programs, problem = forge("c_programs"), forge("problems").problem_of("row sums of square")
    text = programs.write(problem, programs.Draft("lanes", None))
    begins, ends = text.index("for (int k"), text.index("y[i] = s[0]")
    once, twice = judged(problem.text, text, text[:ends] + text[begins:])
    assert once.right
    assert (twice.compiled, twice.right, twice.feedback) == (True, False, "wrong at n=1 m=1")


RIGHT = """for (int i = 0; i < n; i++) {
float s = 0;
for (int j = 0; j < m; j++) { float v = a * x[i * m + j] + b; s += v > 0 ? v : 0; }
y[i] = s;
}
"""
CALLS = "#include <stdio.h>\n#include <stdlib.h>\n#include <unistd.h>\n#include <fcntl.h>\n#include <time.h>\n#include <pthread.h>\n#include <sys/socket.h>\n"
ZEROS = "for (int i = 0; i < n; i++) y[i] = 0;"
CHEATS = {
    "exits with 0 at once": ("exit(0);", "ended early"),
    "exits before main": ("} __attribute__((constructor)) void first(void) { _exit(0);", "ended early"),
    "prints that it is right": (f'puts("right, speed 9"); fflush(stdout); {ZEROS}', "wrong at"),
    "writes answers by itself": ("float z[64] = {0}; for (int k = 0; k < 64; k++) write(1, z, sizeof z); " + ZEROS, "wrong at"),
    "looks for expected results": (f'FILE *f = fopen("expected", "r"); if (f) fread(y, 4, n, f); else {{ {ZEROS} }}', "wrong at"),
    "forks": (f"fork(); {RIGHT}", "did what a kernel may not do"),
    "forks in a resolver": (
        f"{RIGHT} }} static void g(void) {{}} void *pick(void) {{ long r; fork(); return g; }} "
        'void h(void) __attribute__((ifunc("pick"))); void use(void) { h();',
        "did what a kernel may not do",
    ),
    "starts a thread": (f"pthread_t t; pthread_create(&t, 0, (void *(*)(void *))abort, 0); {RIGHT}", "did what a kernel may not do"),
    "writes a file": (f'int f = open("left.txt", O_CREAT | O_WRONLY, 0644); write(f, "x", 1); {RIGHT}', "did what a kernel may not do"),
    "opens a socket": (f"socket(AF_INET, SOCK_STREAM, 0); {RIGHT}", "did what a kernel may not do"),
    "kills everybody": (f"kill(-1, 9); {RIGHT}", "did what a kernel may not do"),
    "remembers its first answer": (
        "static float kept[4096]; static int have, rows; if (have && rows == n) { for (int i = 0; i < n; i++) y[i] = kept[i]; return; }"
        f"{RIGHT} for (int i = 0; i < n; i++) kept[i] = y[i]; have = 1; rows = n;",
        "wrong at",
    ),
    "writes behind the end": (f"{RIGHT} y[n] = 0;", "wrong at"),
    "writes nothing": ("", "wrong at"),
    "writes everywhere": ("for (long i = 0; ; i++) y[i] = 1;", "crashed"),
    "closes its output": (f"close(1); {RIGHT}", "ended early"),
    "includes what is not its own": ('}\n#include "/etc/shadow"\nvoid f(void) {', "does not compile"),
    "is another main": (f"{RIGHT} }} int main(void) {{ return 0;", "does not compile"),
}  # fmt: skip


def test_cheating_kernels_earn_nothing_and_affect_no_other(
    forge: Callable[[str], Any], judged: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    programs, problem = forge("c_programs"), forge("problems").problem_of("row sums of relu")
    cheats = [
        f"#define _GNU_SOURCE\n{CALLS}#include <signal.h>\n{programs.HEAD}\n{body}\n}}\n" for body, _ in CHEATS.values()
    ]
    *found, honest = judged(problem.text, *cheats, programs.write(problem, programs.Draft("plain", None)))
    for name, (_, feedback), judgement in zip(CHEATS, CHEATS.values(), found, strict=True):
        assert judgement.reward == 0.0, (name, judgement)
        assert judgement.feedback.startswith(feedback), (name, judgement)
    assert honest.right
    assert list(tmp_path.iterdir()) == []


def test_endless_kernel_times_out(
    forge: Callable[[str], Any], judged: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forge("bench"), "PATIENCE_S", 1.0)
    [found] = judged("row sums of relu", f"{forge('c_programs').HEAD} for (;;) ; }}")
    assert (found.reward, found.feedback) == (0.0, "took too long")


def test_speed_is_measured_with_the_clock_of_the_harness(
    forge: Callable[[str], Any], judged: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel replaces clock_gettime with a constant; the harness measures its speed with its own clock."""
    programs, problem = forge("c_programs"), forge("problems").problem_of("row sums of relu")
    fake = "int clock_gettime(int c, void *t) { for (int i = 0; i < 4; i++) ((int *)t)[i] = 0; return 0; }\n"
    untimed = itertools.repeat(0.0, 2 * len(forge("judge").EDGES))
    naive_and_new = itertools.cycle((0.0, 1.0, 0.0, 4.0))  # seconds between two clock readings
    ticks = itertools.accumulate(itertools.chain(untimed, naive_and_new))
    monkeypatch.setattr(forge("bench"), "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    [found] = judged(problem.text, f"{fake}{programs.HEAD} {RIGHT} }}")
    assert found.right
    assert found.speed == pytest.approx(0.25)
    assert found.reward == pytest.approx(0.4)


@pytest.mark.parametrize(("seconds", "speed", "turns"), [(0.5, 2.0, 6), (3.0, 1 / 3, 6), (5.0, 0.2, 3)])
def test_naive_and_new_kernel_are_timed_alternately(
    seconds: float, speed: float, turns: int, forge: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first turn is a warm-up; timing ends early for a kernel that is more than four times slower."""
    asked: list[str] = []

    class Clockwork:
        def __init__(self, name: str, seconds: float) -> None:
            self.name, self.seconds = name, seconds

        async def load(self, problem: Any, inputs: Any) -> None:
            self.first = True

        async def timed(self, numbers: Any) -> tuple[Any, float]:
            asked.append(self.name)
            took, self.first = 100.0 if self.first else self.seconds, False
            return np.repeat(numbers[:, :1], 64 + 16, axis=1), took

    async def started_naive(self: Any, problem: Any) -> Clockwork:
        return naive

    judge_class, naive = forge("judge").Judge, Clockwork("naive", 1.0)
    monkeypatch.setattr(judge_class, "_started_naive", started_naive)
    judge = judge_class(forge("bench").CBench(), lambda problem: "", sizes={"row sums": (64, 64, 2)})
    problem = forge("problems").problem_of("row sums of relu")
    assert asyncio.run(judge._speed(problem, Clockwork("new", seconds))) == pytest.approx(speed)
    assert asked == ["naive", "new"] * turns


def test_only_right_kernels_earn_and_rewards_grow_with_speed(forge: Callable[[str], Any]) -> None:
    judgement = forge("judge").Judgement
    assert judgement(True, False, 9.0, "").reward == 0.0
    speeds = [0.2, 1.0, 1.5, 2.0, 50.0]
    assert [judgement(True, True, speed, "").reward for speed in speeds] == pytest.approx([0.4, 0.4, 0.7, 1.0, 1.0])
    wrong, right = judgement(False, False, 0.0, ""), judgement(True, True, 9.0, "")
    summary = forge("generate").summary
    assert summary([right])["reward"] == 1.0
    assert summary([wrong, right])["reward"] == pytest.approx(0.85)
    assert summary([wrong, wrong])["reward"] == 0.0
    too_long = forge("generate").TOO_LONG
    assert [summary([one])["cut"] for one in (wrong, too_long)] == [0.0, 1.0]
    assert summary([too_long])["reward"] == 0.0
    repaired = summary([wrong, right])
    assert (repaired["compiles_at_once"], repaired["right_at_once"], repaired["right"], repaired["turns"]) == (
        0,
        0,
        1,
        2,
    )


def test_references_agree_with_plain_loops(forge: Callable[[str], Any]) -> None:
    problems, rng = forge("problems"), np.random.default_rng(5)
    for kind in problems.KINDS:
        problem = problems.Problem(kind, "leak")
        n, m, x, w = problems.draw_inputs(problem, (3, 2), rng)
        v = [[(lambda u: u if u > 0 else u / 8)(0.5 * float(x[i, j]) + 0.7) for j in range(m)] for i in range(n)]
        if kind == "row sums":
            expected = [sum(row) for row in v]
        elif kind == "column sums":
            expected = [sum(row[j] for row in v) for j in range(m)]
        else:
            expected = [sum(v[i][k] * float(w[k * m + j]) for k in range(m)) for i in range(n) for j in range(m)]
        y, slack = problem.reference(x, w, 0.5, 0.7)
        assert np.allclose(y, expected, rtol=1e-6)
        assert (slack > 0).all()


def test_held_out_problems_recombine_training_kinds_and_maps(forge: Callable[[str], Any]) -> None:
    for maps in (2, 4, 6):
        training, held_out = forge("problems").split_problems(maps)
        assert len(training) + len(held_out) == 3 * maps
        assert not set(training) & set(held_out)
        assert {problem.kind for problem in held_out} == {problem.kind for problem in training}
        assert {problem.map for problem in held_out} <= {problem.map for problem in training}
    with pytest.raises(ValueError, match="'row sums of tan' is no problem"):
        forge("problems").problem_of("row sums of tan")


def test_pupil_makes_mistakes_and_its_kernels_fit_in_a_turn(forge: Callable[[str], Any], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    programs, pupil = forge("c_programs"), forge("pupil")
    training, held_out = forge("problems").split_problems(4)
    judgement = forge("judge").Judgement
    language = forge("languages").LANGUAGES["c"]
    known = {
        (problem, language.text(problem, draft)): judgement(True, draft.is_right, 1.0, "wrong at n=1 m=1")
        for problem in training
        for draft in language.drafts(problem)
    }
    shown = pupil.demonstrations(600, language, known, training, seed=3)
    of = {language.asked(problem): problem for problem in training}
    first = [known[of[row["messages"][0]["content"]], row["messages"][1]["content"]] for row in shown]
    assert 0.3 < np.mean([found.right for found in first]) < 0.5
    alone = pupil.demonstrations(9, language, known, held_out, seed=3)
    assert all(len(row["messages"]) == 2 for row in alone)  # without verdicts there is no feedback turn
    folder = forge("tiny_chat").make_model(tmp_path, shown, words=programs.WORDS, seed=1, width=32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for problem in held_out:
        assert len(tokenizer.encode(language.asked(problem))) == 3
        for draft in language.drafts(problem):
            text = language.text(problem, draft)
            ids = tokenizer.encode(text)
            assert 8 <= len(ids) <= language.turn_tokens * 2 / 3
            assert tokenizer.decode(ids) == text


def test_same_seed_gives_the_same_demonstrations(forge: Callable[[str], Any]) -> None:
    pupil, language = forge("pupil"), forge("languages").LANGUAGES["c"]
    problem = forge("problems").problem_of("product of cube")
    right = forge("judge").Judgement(True, True, 9.0, "right, speed 9")
    known = {(problem, language.text(problem, draft)): right for draft in language.drafts(problem)}
    shown = [pupil.demonstrations(9, language, known, [problem], seed=seed) for seed in (1, 1, 2)]
    assert shown[0] == shown[1] != shown[2]
    assert all(len(row["messages"]) == 2 for row in shown[0])


@pytest.mark.long
@pytest.mark.examples
def test_run_learns_right_and_fast_kernels(run_example: Callable[..., Ran]) -> None:
    ran = run_example("kernel_forge/run.py", "--seed", "1")
    for name, least in (("", 0.15), ("/right_at_once", 0.1)):
        before, *_, after = ran.series(f"eval/held-out{name}")
        assert after > before + least, name
    slow, *_, fast = ran.series("eval/held-out/speed")
    assert fast > 1.5 * slow
    asked, judged = ran.series("kernels/asked")[-1], ran.series("kernels/judged")[-1]
    assert judged < asked / 3  # each text is judged once
    assert (ran.folder / "kernels.png").stat().st_size > 0
