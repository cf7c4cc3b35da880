"""Where agent programs come from: a package that the user has, found here and shown or brought to the sandbox.

Invariant: nothing is downloaded. A program is the one that its environment variable names, or a tarball, or the one in
the sandbox's image, or the one on the PATH of this machine; if there is none, one sentence says what to install.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shlex
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from slime.agent.sandbox import Sandbox
from slime.errors import UserError

# How an agent program ended, as it is kept with the sample, and the ways in which it can fail.
#
# Invariant: a program that could not do its work is a `HarnessFailed` with a cause, in one sentence, and never a
# result that looks like a bad attempt; what it had printed is kept either way, cut to `KEPT_BYTES`.

KEPT_BYTES = 16384
"""Of each of stdout and stderr: the end."""
DIFF_BYTES = 131072
"""Of the diff: the beginning, in whole lines."""
NOT_EXECUTABLE, NOT_FOUND = 126, 127

Outcome = Literal["finished", "failed", "timeout"]


class HarnessFailed(Exception):
    """The agent program did not get to work, or ended in a way that says nothing about the model."""


class CliMissing(HarnessFailed):
    """The agent program is not there."""


class CliCrashed(HarnessFailed):
    """The agent program died, or gave up before it had asked for one turn."""


class CliTimedOut(HarnessFailed):
    """The agent program used up its time without asking for one turn."""


@dataclass(frozen=True)
class HarnessResult:
    """One run of an agent program. `reason` is what it said about its end; `stdout` and `stderr` are their last part.

    `finished`: it ended by itself and calls that a success. `failed`: it says, or its exit code says, that something
    went wrong, the end of the session included. `timeout`: its time was up.
    """

    harness: str
    version: str
    exit_code: int
    outcome: Outcome
    reason: str = ""
    wall_s: float = 0.0
    stdout: str = ""
    stderr: str = ""
    diff: str = ""
    diff_truncated: bool = False
    """The diff does not hold every change: `git apply` may refuse it, and so may a verifier that counts on it."""

    def to_metadata(self) -> dict[str, Any]:
        """Plain values, for `sample.metadata["harness"]`."""
        return asdict(self)

    def check(self, turns: int) -> None:
        """Raise `HarnessFailed` unless this run says something about the model: a crash does not, nor does silence.

        With `turns` in the session, a program that gave up or ran out of time has made an attempt, which can be judged.
        """
        what = f"{self.harness} {self.version}".strip()
        if self.exit_code in (NOT_EXECUTABLE, NOT_FOUND):
            raise CliMissing(f"{what} could not be started in the sandbox: {self._last_words()}")
        if self.outcome == "timeout":
            if not turns:
                raise CliTimedOut(f"{what} asked for no turn within {self.wall_s:.0f} s: {self._last_words()}")
        elif self.exit_code > 128 or (self.exit_code < 0 and self.outcome != "finished"):
            raise CliCrashed(f"{what} was ended by signal {self._signal()}: {self._last_words()}")
        elif not turns:
            raise CliCrashed(
                f"{what} ended with exit code {self.exit_code} before its first turn: {self._last_words()}"
            )

    def _signal(self) -> int:
        return self.exit_code - 128 if self.exit_code > 128 else -self.exit_code

    def _last_words(self) -> str:
        words = self.reason or self.stderr.strip() or self.stdout.strip() or "it said nothing"
        return " ".join(words[-300:].split())


NODE_TARBALL = "SLIME_AGENT_NODE_TARBALL"
INSTALL_TIMEOUT_S = 600
_ARCHITECTURES = {"aarch64": "arm64", "arm64": "arm64", "x86_64": "x64", "AMD64": "x64"}


@dataclass(frozen=True)
class Package:
    """An agent program: its command, its name for people, and the prefix of its environment variables."""

    program: str
    title: str
    variable: str
    install: str
    natives: tuple[str, ...] = ()
    """Where the native binary is, from the folder of the npm package's parent scope: `{arch}` is arm64 or x64."""
    needs_node: bool = False

    @property
    def path_variable(self) -> str:
        return f"SLIME_AGENT_{self.variable}_PATH"

    @property
    def tarball_variable(self) -> str:
        return f"SLIME_AGENT_{self.variable}_TARBALL"

    def tarball(self) -> Path | None:
        """The tarball that the user names."""
        return named_file(self.tarball_variable)

    def on_this_machine(self) -> HostProgram | None:
        """The program that the user names, or the first one on the PATH; None when there is none."""
        named = os.environ.get(self.path_variable)
        if named:
            path = Path(named).expanduser()
            path = path / self.program if path.is_dir() else path
            if not os.access(path, os.X_OK):
                raise UserError(f"{self.path_variable}={named}: there is no program {self.program} to execute there")
        else:
            found = shutil.which(self.program)
            if found is None:
                return None
            path = Path(found)
        return _host_program(path.absolute(), self)

    def missing(self) -> str:
        """One sentence for when it is nowhere."""
        return (
            f"{self.title} is not installed: {self.install}, or name the program with {self.path_variable} "
            f"or a package with {self.tarball_variable}"
        )


@dataclass(frozen=True)
class HostProgram:
    """A program of this machine: how it is started, and the folders that it needs to see, by their path here."""

    argv: tuple[str, ...]
    folders: tuple[Path, ...]


def _host_program(path: Path, package: Package) -> HostProgram:
    real = path.resolve()
    for pattern in package.natives:
        for parent in real.parents:
            found = sorted(parent.glob(pattern.format(arch=_ARCHITECTURES.get(platform.machine(), platform.machine()))))
            if found:
                return HostProgram((str(found[0]),), (found[0].parent,))
    if package.needs_node:
        return _node_program(real, package)
    if (path.parent / "python").exists() and (path.parent.parent / "pyvenv.cfg").is_file():
        return _venv_program(path)
    return HostProgram((str(real),), (real.parent,))


def _node_program(script: Path, package: Package) -> HostProgram:
    """A program in JavaScript: its `node_modules`, and the newest Node.js among that folder's own and the PATH's."""
    modules = next((parent for parent in script.parents if parent.name == "node_modules"), script.parent)
    own = modules / "node" / "bin" / "node"
    node = own.resolve() if own.exists() else Path(shutil.which("node") or "")
    if not node.is_file():
        raise UserError(f"{package.title} needs Node.js 22, and there is no node on the PATH: install it")
    folders = [modules] if node.is_relative_to(modules) else [modules, node.parent]
    return HostProgram((str(node), str(script)), tuple(folders))


def _venv_program(path: Path) -> HostProgram:
    """A program of a virtual environment: that folder, and the Python that it was made of."""
    folder = path.parent.parent
    python = (path.parent / "python").resolve()
    return HostProgram((str(path.parent / "python"), str(path)), (folder, python.parent.parent))


def named_file(variable: str) -> Path | None:
    """The file that an environment variable names; None when it is not set."""
    named = os.environ.get(variable)
    if not named:
        return None
    path = Path(named).expanduser()
    if not path.is_file():
        raise UserError(f"{variable}={named}: there is no such file")
    return path


async def provide(sb: Sandbox, package: Package, folder: str) -> list[str]:
    """How the program is started in the sandbox, into whose `folder` it is brought if need be; or `CliMissing`."""
    tarball, named = package.tarball(), bool(os.environ.get(package.path_variable))
    if not named and tarball is not None:
        return await _from_tarball(sb, package, tarball, folder)
    if not named:
        code, out, _ = await sb.exec(f"command -v {shlex.quote(package.program)}")
        if code == 0 and out.strip():
            return [package.program]
    program = await asyncio.to_thread(package.on_this_machine)
    if program is None:
        raise CliMissing(package.missing())
    return list(program.argv) if await _is_visible(sb, program) else await _copied(sb, program, folder)


async def _is_visible(sb: Sandbox, program: HostProgram) -> bool:
    tests = " && ".join(f"test -r {shlex.quote(path)}" for path in program.argv)
    code, _, _ = await sb.exec(tests)
    return code == 0


async def _copied(sb: Sandbox, program: HostProgram, folder: str) -> list[str]:
    """Bring the program's folders into the sandbox, as one archive."""
    root = f"{folder}/packages"
    with tempfile.TemporaryDirectory() as scratch:
        archive = Path(scratch) / "package.tar"
        await asyncio.to_thread(_pack, program.folders, archive)
        await _unpack(sb, archive, root, strip=0)
    return [f"{root}{path}" for path in program.argv]


def _pack(folders: Sequence[Path], archive: Path) -> None:
    with tarfile.open(archive, "w") as tar:
        for folder in folders:
            tar.add(folder, arcname=str(folder).lstrip("/"))


async def _from_tarball(sb: Sandbox, package: Package, tarball: Path, folder: str) -> list[str]:
    """A package of npm: one with the native binary is unpacked, any other installed by the sandbox's npm."""
    native = await asyncio.to_thread(_native_member, tarball, package.program)
    if native is None:
        await install_node22(sb)
        await install_npm_cli(sb, tarball, package.program)
        return [package.program]
    root = f"{folder}/{package.program}"
    await _unpack(sb, tarball, root, strip=0)
    return [f"{root}/{native}"]


def _native_member(tarball: Path, program: str) -> str | None:
    with tarfile.open(tarball) as tar:
        for member in tar:
            if (
                member.isfile()
                and member.name.rpartition("/")[2] in (program, f"{program}.exe")
                and member.size > 1 << 20
            ):
                return member.name
    return None


async def _unpack(sb: Sandbox, tarball: Path, root: str, strip: int) -> None:
    where, archive = shlex.quote(root), shlex.quote(f"{root}.archive")
    await sb.exec(f"mkdir -p {where}", check=True)
    await sb.write_file(f"{root}.archive", tarball)
    command = f"tar -xf {archive} -C {where} --strip-components={strip} && rm {archive}"
    await sb.exec(command, timeout=INSTALL_TIMEOUT_S, check=True)


async def install_node22(sb: Sandbox, tarball: Path | None = None) -> None:
    """Node.js 22 in the sandbox: the one it has, or the one in `SLIME_AGENT_NODE_TARBALL`, under /usr/local."""
    code, out, _ = await sb.exec("node --version")
    major = out.strip().lstrip("v").partition(".")[0]
    if code == 0 and major.isdigit() and int(major) >= 22:
        return
    tarball = tarball or named_file(NODE_TARBALL)
    if tarball is None:
        has = f"has Node.js {out.strip()}" if code == 0 else "has no Node.js"
        raise CliMissing(f"the sandbox {has}, and 22 is needed: set {NODE_TARBALL} to a node-v22 archive of nodejs.org")
    await _unpack(sb, tarball, "/usr/local", strip=1)


async def install_npm_cli(sb: Sandbox, tarball: Path, program: str) -> None:
    """`npm install -g` of a tarball in the sandbox, which must hold all that the program needs: there is no network."""
    where = f"/tmp/{program}.tgz"
    await sb.write_file(where, tarball)
    command = f"npm install -g --offline --no-audit --no-fund {shlex.quote(where)} && {shlex.quote(program)} --version"
    code, out, err = await sb.exec(command, timeout=INSTALL_TIMEOUT_S)
    if code != 0:
        said = " ".join((err or out)[-300:].split())
        raise CliMissing(
            f"{tarball.name} gives no {program} that starts ({said}): name the package with the native binary, such as "
            f"the one for linux-{_ARCHITECTURES.get(platform.machine(), 'x64')}"
        )
