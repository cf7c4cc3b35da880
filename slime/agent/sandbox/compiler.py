"""The machine's C compiler, for programs that a model wrote; it runs only in sandboxes."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from slime.agent.sandbox.host_sandbox import MachineSandbox
from slime.agent.sandbox.protocol import Outcome
from slime.errors import UserError

NAMES = ("cc", "gcc", "clang")
_ERROR = re.compile(r"^[^\n:]*:\d+:(?:\d+:)? (?:fatal )?error: (.*)$", re.MULTILINE)
_LINKING = re.compile(r"^.*?((?:undefined reference|multiple definition|undefined symbol|duplicate symbol).*)$", re.M)


@dataclass(frozen=True)
class CCompiler:
    """A compiler of this machine, which is visible in sandboxes too (as part of `/usr`)."""

    path: str
    version: str
    """First line of its `--version` output, which verdicts on programs depend on."""

    async def build(
        self, sandbox: MachineSandbox, sources: Sequence[str], output: str, flags: Sequence[str] = ()
    ) -> Outcome:
        """Compile and link in the sandbox, under its limits; return the compiler's outcome."""
        return await sandbox.exec([self.path, *flags, *sources, "-o", output])


def find_c_compiler(names: Sequence[str] = NAMES) -> CCompiler:
    """Find the first of these compilers on the PATH; UserError with install commands if there is none."""
    for name in names:
        path = shutil.which(name)
        if path is None:
            continue
        result = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        if result.returncode == 0 and result.stdout:
            return CCompiler(path, result.stdout.splitlines()[0])
    raise UserError(
        f"no C compiler on the PATH ({', '.join(names)}): install one, for example with `apt install gcc libc6-dev`"
        ", `dnf install gcc` or `xcode-select --install`"
    )


def first_error(outcome: Outcome, *, limit: int = 120) -> str:
    """The compiler's first error message as one line, without the source position and with ASCII quotes."""
    if outcome.cause is not None:
        return f"the compiler ran into the limit on {outcome.cause}"
    found = _ERROR.search(outcome.err) or _LINKING.search(outcome.err)
    text = found[1] if found else next(iter(outcome.err.strip().splitlines()), f"exit code {outcome.code}")
    return re.sub("[‘’`]", "'", text).strip()[:limit]
