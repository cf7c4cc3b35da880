"""Finds the packages of agent programs, provides them in sandboxes, and describes the result of a run.

Invariants: nothing is downloaded. A program is the one that its environment variable names, or a tarball, or the one in
the sandbox's image, or the one on the PATH of this machine; if there is none, an error says what to install. A program
that could not do its work raises `HarnessFailed` with a cause, and never gives a result that looks like a bad attempt;
its output is kept in both cases, cut to `KEPT_BYTES`.
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
from typing import Literal

from slime.agent.sandbox import Sandbox
from slime.errors import UserError
from slime.storage.json_types import JsonObject

KEPT_BYTES = 16384
"""Bytes kept at the end of stdout and of stderr."""
DIFF_BYTES = 131072
"""Bytes kept at the beginning of the diff, in whole lines."""
NOT_EXECUTABLE, NOT_FOUND = 126, 127

Outcome = Literal["finished", "failed", "timeout"]


class HarnessFailed(Exception):
    """The agent program did not start to work, or ended in a way that gives no evidence about the model."""


class CliMissing(HarnessFailed):
    """The agent program is not installed or cannot be started."""


class CliCrashed(HarnessFailed):
    """The agent program died, or ended before it requested a turn."""


class CliTimedOut(HarnessFailed):
    """The agent program ran out of time before it requested a turn."""


@dataclass(frozen=True)
class HarnessResult:
    """The result of one run of an agent program. `stdout` and `stderr` are the ends of its output.

    `reason` is the program's own message about its end. The outcome is `finished` if it ended by itself and reports
    success, `failed` if it or its exit code reports an error, including the end of the session, and `timeout` if its
    time was up.
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
    """The diff is incomplete: `git apply` may refuse it, and so may a verifier that uses it."""

    def to_metadata(self) -> JsonObject:
        """Plain values, for `sample.metadata["harness"]`."""
        return asdict(self)

    def check(self, turns: int) -> None:
        """Raise `HarnessFailed` unless this run is an attempt of the model: a crash or a run without turns is not.

        With `turns` in the session, a program that gave up or ran out of time has made an attempt, which can be judged.
        """
        what = f"{self.harness} {self.version}".strip()
        if self.exit_code in (NOT_EXECUTABLE, NOT_FOUND):
            raise CliMissing(f"{what} could not be started in the sandbox: {self._last_words()}")
        if self.outcome == "timeout":
            if not turns:
                raise CliTimedOut(f"{what} asked for no turn within {self.wall_s:.0f} s: {self._last_words()}")
        elif self.exit_code > 128 or (self.exit_code < 0 and self.outcome != "finished"):
            signal = self.exit_code - 128 if self.exit_code > 128 else -self.exit_code
            raise CliCrashed(f"{what} was ended by signal {signal}: {self._last_words()}")
        elif not turns:
            raise CliCrashed(
                f"{what} ended with exit code {self.exit_code} before its first turn: {self._last_words()}"
            )

    def _last_words(self) -> str:
        words = self.reason or self.stderr.strip() or self.stdout.strip() or "it printed nothing"
        return " ".join(words[-300:].split())


NODE_TARBALL = "SLIME_AGENT_NODE_TARBALL"
INSTALL_TIMEOUT_S = 600
_ARCHITECTURES = {"aarch64": "arm64", "arm64": "arm64", "x86_64": "x64", "AMD64": "x64"}


@dataclass(frozen=True)
class Package:
    """An agent program: its command, its title for messages, and the name in its environment variables."""

    program: str
    title: str
    variable: str
    install: str
    natives: tuple[str, ...] = ()
    """Glob patterns of the native binary, from any parent folder of the program; `{arch}` is arm64 or x64."""
    needs_node: bool = False

    @property
    def path_variable(self) -> str:
        return f"SLIME_AGENT_{self.variable}_PATH"

    @property
    def tarball_variable(self) -> str:
        return f"SLIME_AGENT_{self.variable}_TARBALL"

    def tarball(self) -> Path | None:
        """The tarball that the environment variable names; None if it is not set."""
        return named_file(self.tarball_variable)

    def on_this_machine(self) -> HostProgram | None:
        """The program that the environment variable names, or the first one on the PATH; None if there is none."""
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
        path = path.absolute()
        real, machine = path.resolve(), platform.machine()
        for pattern in self.natives:
            for parent in real.parents:
                binaries = sorted(parent.glob(pattern.format(arch=_ARCHITECTURES.get(machine, machine))))
                if binaries:
                    return HostProgram((str(binaries[0]),), (binaries[0].parent,))
        if self.needs_node:
            return _node_program(real, self)
        folder, python = path.parent.parent, path.parent / "python"
        if python.exists() and (folder / "pyvenv.cfg").is_file():  # the folder and the Python of a virtual environment
            return HostProgram((str(python), str(path)), (folder, python.resolve().parent.parent))
        return HostProgram((str(real),), (real.parent,))

    def missing(self) -> str:
        """The error message for a program that is not installed."""
        return (
            f"{self.title} is not installed: {self.install}, or name the program with {self.path_variable} "
            f"or a package with {self.tarball_variable}"
        )


@dataclass(frozen=True)
class HostProgram:
    """A program on this machine: its command, and the folders that it needs, by their paths on this machine."""

    argv: tuple[str, ...]
    folders: tuple[Path, ...]


def _node_program(script: Path, package: Package) -> HostProgram:
    """A JavaScript program: its `node_modules`, and the Node.js in that folder if there is one, else on the PATH."""
    modules = next((parent for parent in script.parents if parent.name == "node_modules"), script.parent)
    own = modules / "node" / "bin" / "node"
    node = own.resolve() if own.exists() else Path(shutil.which("node") or "")
    if not node.is_file():
        raise UserError(f"{package.title} needs Node.js 22, and there is no node on the PATH: install it")
    folders = [modules] if node.is_relative_to(modules) else [modules, node.parent]
    return HostProgram((str(node), str(script)), tuple(folders))


def named_file(variable: str) -> Path | None:
    """The file that an environment variable names; None if it is not set."""
    named = os.environ.get(variable)
    if not named:
        return None
    path = Path(named).expanduser()
    if not path.is_file():
        raise UserError(f"{variable}={named}: there is no such file")
    return path


async def provide_program(sb: Sandbox, package: Package, folder: str) -> list[str]:
    """Provide the program in the sandbox, copied to `folder` if needed; returns its command. Raises `CliMissing`."""
    tarball, named = package.tarball(), bool(os.environ.get(package.path_variable))
    if not named and tarball is not None:
        native = await asyncio.to_thread(_native_member, tarball, package.program)
        if native is None:
            await install_node22(sb)
            await install_npm_cli(sb, tarball, package.program)
            return [package.program]
        root = f"{folder}/{package.program}"
        await _unpack(sb, tarball, root, strip=0)
        return [f"{root}/{native}"]
    if not named:
        code, out, _ = await sb.exec(f"command -v {shlex.quote(package.program)}")
        if code == 0 and out.strip():
            return [package.program]
    program = await asyncio.to_thread(package.on_this_machine)
    if program is None:
        raise CliMissing(package.missing())
    code, _, _ = await sb.exec(" && ".join(f"test -r {shlex.quote(path)}" for path in program.argv))
    if code == 0:
        return list(program.argv)
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


def _native_member(tarball: Path, program: str) -> str | None:
    """The native binary in an npm package; None if the sandbox's npm must install the package."""
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
    """Provide Node.js 22 in the sandbox: its own, or that of `SLIME_AGENT_NODE_TARBALL`, unpacked to /usr/local."""
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
    """Run `npm install -g` on a tarball in the sandbox; it must contain all dependencies: there is no network."""
    where = f"/tmp/{program}.tgz"
    await sb.write_file(where, tarball)
    command = f"npm install -g --offline --no-audit --no-fund {shlex.quote(where)} && {shlex.quote(program)} --version"
    code, out, err = await sb.exec(command, timeout=INSTALL_TIMEOUT_S)
    if code != 0:
        output = " ".join((err or out)[-300:].split())
        raise CliMissing(
            f"{tarball.name} has no {program} that starts ({output}): name the package with the native binary, such as "
            f"the one for linux-{_ARCHITECTURES.get(platform.machine(), 'x64')}"
        )
