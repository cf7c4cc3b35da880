"""The machine's C compiler: detection, builds in a sandbox, quoted errors."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from slime.agent.sandbox import Outcome, make_sandbox
from slime.agent.sandbox.compiler import NAMES, find_c_compiler, first_error
from slime.agent.sandbox.host_sandbox import MachineSandbox
from slime.errors import UserError

WITH_A_COMPILER = pytest.mark.skipif(not any(map(shutil.which, NAMES)), reason="needs a C compiler")


def test_missing_compiler_error_suggests_an_install_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UserError, match=r"no C compiler on the PATH \(cc, gcc, clang\): install one, for example with `apt"
    ):
        find_c_compiler()


@WITH_A_COMPILER
def test_program_is_built_and_run_in_the_sandbox() -> None:
    compiler = find_c_compiler()

    async def main() -> tuple[Outcome, Outcome]:
        async with make_sandbox("auto") as sandbox:
            assert isinstance(sandbox, MachineSandbox)
            await sandbox.write_file("seven.c", "int main(void) { return 7; }\n")
            built = await compiler.build(sandbox, ["seven.c"], "seven", ["-O1"])
            return built, await sandbox.exec(["./seven"])

    built, ran = asyncio.run(main())
    assert (built.code, ran.code) == (0, 7)
    assert not Path("seven").exists()


@WITH_A_COMPILER
def test_syntax_error_is_quoted_without_its_location() -> None:
    compiler = find_c_compiler()

    async def main() -> Outcome:
        async with make_sandbox("auto") as sandbox:
            assert isinstance(sandbox, MachineSandbox)
            await sandbox.write_file("broken.c", "int main(void) { return 7 }\n")
            return await compiler.build(sandbox, ["broken.c"], "broken")

    outcome = asyncio.run(main())
    assert outcome.code != 0
    assert first_error(outcome).startswith("expected ';'")
    assert "\n" not in first_error(outcome)
    assert len(first_error(outcome, limit=9)) == 9


@pytest.mark.parametrize(
    ("said", "quoted"),
    [
        ("k.c:3:1: error: unknown type name ‘flot’\nk.c:9:1: error: another\n", "unknown type name 'flot'"),
        ("k.c:1:10: fatal error: nothing.h: No such file\n", "nothing.h: No such file"),
        ("/usr/bin/ld: k.o: in function `main':\nk.c:(.text+0x5): undefined reference to `g'\n", "undefined reference to 'g'"),
        ("", "exit code 4"),
    ],
)  # fmt: skip
def test_first_error_is_extracted_from_compiler_output(said: str, quoted: str) -> None:
    assert first_error(Outcome(4, "", said)) == quoted


def test_exceeded_limit_is_named_as_the_error() -> None:
    assert first_error(Outcome(-1, "", "", "memory")) == "the compiler ran into the limit on memory"
