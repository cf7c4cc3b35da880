"""examples/kernel_forge with Triton, without a GPU.

Kernels are compiled for a GPU in sandboxes. They run in Triton's interpreter; a fake libcuda accepts their launch but
does not execute them. No test uses a real GPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.agent.sandbox import SandboxError
from slime.errors import UserError
from tests.examples.conftest import EXAMPLES, modules_of

pytestmark = pytest.mark.kernels

HERE = EXAMPLES / "kernel_forge"
pytest.importorskip("triton")
SMALL = {"row sums": (64, 64, 2), "column sums": (64, 64, 2), "product": (24, 24, 2)}


@pytest.fixture
def forge() -> Iterator[Callable[[str], Any]]:
    """The modules of the example by name."""
    with modules_of(HERE) as read:
        yield read


def every_draft(forge: Callable[[str], Any], kind: str) -> list[Any]:
    languages = forge("languages")
    styles = languages.LANGUAGES["triton"].styles[kind]
    return [forge("c_programs").Draft(style, mistake) for style in styles for mistake in (None, *languages.MISTAKES)]


INTERPRETED = """
import json, sys
from pathlib import Path
import numpy as np
import torch
sys.path[:0] = [sys.argv[1], "."]
import problems
import importlib
rng, found = np.random.default_rng(7), []
for number, row in enumerate(json.loads(Path("drafts.json").read_text())):
    problem, right = problems.problem_of(row["problem"]), True
    Path(f"draft{number}.py").write_text("import triton\\nimport triton.language as tl\\n" + row["text"] + "\\n")
    try:
        text = importlib.import_module(f"draft{number}")
    except SyntaxError:
        found.append("no Python")
        continue
    for size in ((1, 1), (1, 6), (5, 1), (4, 5)):
        n, m, x, w = problems.draw_inputs(problem, size, rng)
        a, b = problems.draw_numbers(1, rng)[0]
        behind = 70 * m  # what a kernel reads or writes too far is ours, too
        room = [torch.full((values.size + behind,), float("nan")) for values in (x, w)]
        for place, values in zip(room, (x, w)):
            place[: values.size] = torch.from_numpy(values.ravel())
        length = problem.lengths(n, m)[1]
        y = torch.full((length + behind,), 7.0)
        y[:length] = float("nan")
        text.kernel[text.GRID(n, m)](n, m, float(a), float(b), *room, y)
        expected, slack = problem.reference(x, w, a, b)
        right &= bool((np.abs(y[:length].numpy() - expected) <= slack).all() and (y[length:] == 7).all())
    found.append("right" if right else "wrong")
print(json.dumps(found))
"""


def test_interpreted_kernels_are_right_unless_they_have_a_mistake(forge: Callable[[str], Any], tmp_path: Path) -> None:
    problems, write = forge("problems"), forge("triton_programs").write
    named = [("row sums", "relu"), ("column sums", "leak"), ("product", "magnitude"), ("row sums", "ramp")]
    asked = [(problems.Problem(*name), draft) for name in named for draft in every_draft(forge, name[0])]
    rows = [{"problem": problem.text, "text": write(problem, draft)} for problem, draft in asked]
    (tmp_path / "drafts.json").write_text(json.dumps(rows))
    words = [sys.executable, "-c", INTERPRETED, str(HERE)]
    done = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for (problem, draft), found in zip(asked, json.loads(done.stdout), strict=True):
        expected = {None: "right", "semicolon": "no Python"}.get(draft.mistake, "wrong")
        assert found == expected, (problem, draft)


@pytest.fixture
def pretended(forge: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The GPU reported by a fake libcuda."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("needs a C compiler")
    source = Path(__file__).parent / "fake_libcuda.c"
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", tmp_path / "libcuda.so.1"], check=True)
    tmp_path.chmod(0o755)  # sandboxes run as other users
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    return forge("triton_bench").find_gpu()


def judge_sources(forge: Callable[[str], Any], gpu: Any, problem: str, *sources: str) -> list[Any]:
    async def main() -> list[Any]:
        bench = forge("triton_bench").TritonBench("auto", gpu, SMALL)
        judge = forge("judge").Judge(bench, forge("languages").LANGUAGES["triton"].naive, sizes=SMALL)
        try:
            asked = forge("problems").problem_of(problem)
            return await asyncio.gather(*(judge.of(asked, source) for source in sources))
        finally:
            await judge.aclose()

    return asyncio.run(main())


def test_kernels_are_built_launched_compared_and_timed(forge: Callable[[str], Any], pretended: Any) -> None:
    """The fake libcuda computes row sums of relu for every kernel, so only kernels with that grid are right."""
    assert (pretended.name, pretended.arch, pretended.driver) == ("Pretended", 90, 13000)
    write, draft = forge("triton_programs").write, forge("c_programs").Draft
    problem = forge("problems").problem_of("row sums of relu")
    colon, fast, grid, naive = judge_sources(
        forge,
        pretended,
        problem.text,
        write(problem, draft("plain", "semicolon")),
        write(problem, draft("blocks", None)),
        write(problem, draft("columns first", None)),
        write(problem, draft("plain", None)),
    )
    assert (colon.compiled, colon.feedback) == (False, "does not compile: SyntaxError: expected ':'")
    assert (fast.right, fast.speed, fast.feedback) == (True, 4.0, "right, speed 4")
    assert (grid.compiled, grid.right, grid.feedback) == (True, False, "ended early")
    assert (naive.right, naive.speed) == (True, 1.0)
    [other] = judge_sources(forge, pretended, "row sums of square", write(problem, draft("blocks", None)))
    assert (other.compiled, other.right, other.feedback) == (True, False, "wrong at n=1 m=1")


def test_cheating_at_compile_time_earns_nothing(forge: Callable[[str], Any], pretended: Any) -> None:
    naive = forge("languages").LANGUAGES["triton"].naive(forge("problems").problem_of("row sums of relu"))
    write_own = (
        "import json, os\nopen('kernel.cubin', 'wb').write(b'mine')\n"
        "json.dump({'name': 'kernel', 'shared': 1, 'threads': 32, 'scratch': 0, 'grids': %s}, open('kernel.json', 'w'))\n"
        "os._exit(0)\n"
    )
    sizes = 6 + len(set(SMALL.values()))
    found = judge_sources(
        forge,
        pretended,
        "row sums of relu",
        "import os\nos._exit(0)",
        write_own % "[[0, 1, 1]]",
        write_own % f"[[1, 1, 1]] * {sizes}",
        "assert __import__('glob').glob('/dev/nvidia*') + ['no GPU here'] == ['no GPU here']\nraise ValueError('alone')",
        naive.replace("GRID = lambda n, m: (n,)", "GRID = lambda n, m: ('n',)"),
        naive.replace("GRID = lambda n, m: (n,)", "GRID = lambda n, m: (n, 65536)"),
        naive.replace("tl.program_id(0)", "tl.nothing(0)"),
    )
    assert [one.reward for one in found] == [0.0] * 7
    prefix = "does not compile: "
    assert (
        [one.feedback.removeprefix(prefix) for one in found]
        == [
            "no program came of it",
            "GRID is not one to three whole numbers",
            "ended early",  # the driver rejects an invalid cubin
            "ValueError: alone",
            "GRID is not one to three whole numbers",
            "GRID is out of bounds",
            "AttributeError(\"module 'triton.language' has no attribute 'nothing'\")"[:60],
        ]
    )


def test_only_the_launch_sandbox_gets_the_gpu(forge: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses /dev/full as the device node of the GPU, and checks the options passed to the sandboxes."""
    bench, asked = forge("triton_bench"), []
    gpu = bench.Gpu("G", 80, 1, 2, ("/dev/full",), {"CUDA_VISIBLE_DEVICES": "2", "LD_LIBRARY_PATH": "/usr/lib:/none"})
    make = bench.make_sandbox
    monkeypatch.setattr(bench, "make_sandbox", lambda kind, **options: asked.append(options) or make(kind, **options))
    language = forge("languages").LANGUAGES["triton"]
    source = language.naive(forge("problems").problem_of("column sums of cube"))

    async def start() -> None:
        made = bench.TritonBench("auto", gpu, SMALL)
        assert made.about()["gpu"] == "G 80 1"
        async with made.started(source):
            raise AssertionError("there is a GPU")

    with pytest.raises(SandboxError, match="the sandbox has no GPU: OSError: libcuda"):  # an error, not a verdict
        asyncio.run(start())
    build, launch = asked
    assert "devices" not in build
    assert all(path.name.startswith("triton") for path in build["visible"])
    assert launch["devices"] == ("/dev/full",)
    assert launch["env"]["CUDA_VISIBLE_DEVICES"] == "2"
    assert launch["visible"] == ["/usr/lib"]


def test_missing_gpu_raises_user_error(forge: Callable[[str], Any], pretended: Any) -> None:
    with pytest.raises(UserError, match=r"need an NVIDIA GPU.*cuDeviceGet: CUDA error 101.*use --kernels c"):
        forge("triton_bench").find_gpu(1)


def test_device_selects_the_language(forge: Callable[[str], Any]) -> None:
    choose = forge("languages").language_for
    assert [choose(*words) for words in (("cpu", None), ("cuda", None), ("auto", None), ("cuda", "c"))] == [
        "c",
        "triton",
        "c",
        "c",
    ]


def test_pupil_kernels_fit_in_a_turn(forge: Callable[[str], Any], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    language, problems = forge("languages").LANGUAGES["triton"], forge("problems")
    said, saying = forge("tiny_chat").asking, forge("tiny_chat").saying
    rows = [
        {"messages": [said(language.asked(problem)), saying(language.text(problem, draft))]}
        for problem in map(problems.Problem, problems.KINDS * 2, ["relu"] * 3 + ["cube"] * 3)
        for draft in language.drafts(problem)
    ]
    folder = forge("tiny_chat").make_model(tmp_path, rows * 2, words=language.words, seed=1, width=32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for row in rows:
        text = row["messages"][1]["content"]
        ids = tokenizer.encode(text)
        assert len(ids) <= language.turn_tokens * 2 / 3, text
        assert tokenizer.decode(ids) == text
