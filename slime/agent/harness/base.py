"""Runs an agent program in a sandbox: installs, configures and starts it, waits for its end, and collects its diff.

Invariants: a harness holds settings, and its state for a sandbox is dropped with the sandbox, so one harness serves all
samples concurrently. The program gets the prompt as a file on its standard input, or as one item of its arguments, and
never as a part of a shell's text.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from slime.agent.harness.packages import (
    DIFF_BYTES,
    INSTALL_TIMEOUT_S,
    KEPT_BYTES,
    HarnessResult,
    HostProgram,
    Outcome,
    Package,
    provide_program,
)
from slime.agent.sandbox import EXIT_TIME_BUDGET_EXCEEDED, Sandbox, ensure_agent_user, exec_and_wait
from slime.agent.sandbox.protocol import ExtendedSandbox
from slime.errors import UserError

READ_BYTES = 262144
"""Bytes at the end of a program's output that are searched for its result."""
VERSION_TIMEOUT_S = 60
AGENT_USER = "agent"
"""The user that runs agents; several agents refuse to run as root."""


@dataclass(frozen=True)
class HarnessContext:
    """The agent's working folder and session; `adapter_url` is the endpoint's URL inside the sandbox, without /v1."""

    workdir: str
    session_id: str
    adapter_url: str
    model_label: str = "slime-actor"

    @property
    def base_url(self) -> str:
        """The base URL for Anthropic's clients."""
        return self.adapter_url.rstrip("/")

    @property
    def openai_url(self) -> str:
        """The base URL for OpenAI's clients."""
        return f"{self.base_url}/v1"


class BaseHarness:
    """One agent program, headless, without telemetry and updates, with few retries: the session's answers are final.

    `context_tokens` and `max_output_tokens` are passed to the program, which otherwise assumes the limits of a model
    that it knows. `compaction` lets it shorten its own history, which adds a sample to the session.
    """

    name: ClassVar[str] = "agent"
    package: ClassVar[Package | None] = None
    prompt_on_stdin: ClassVar[bool] = True

    def __init__(
        self,
        *,
        context_tokens: int | None = None,
        max_output_tokens: int | None = None,
        compaction: bool = False,
        retries: int = 3,
        extra_args: Sequence[str] = (),
        extra_env: Mapping[str, str] | None = None,
    ) -> None:
        self.context_tokens = context_tokens
        self.max_output_tokens = max_output_tokens
        self.compaction = compaction
        self.retries = retries
        self._extra_args = tuple(extra_args)
        self._extra_env = dict(extra_env or {})
        self._places: WeakKeyDictionary[Sandbox, _AgentFolder] = WeakKeyDictionary()
        self._versions: dict[tuple[str, ...], str] = {}

    def arguments(self, ctx: HarnessContext, prompt: str) -> list[str]:
        """The arguments of the program, including the prompt unless `prompt_on_stdin`."""
        raise NotImplementedError

    def environment(self, ctx: HarnessContext) -> dict[str, str]:
        """Environment variables of the program, in addition to those of the sandbox."""
        return {}

    def files(self, ctx: HarnessContext) -> dict[str, str]:
        """Configuration files, by their paths in the program's home folder."""
        return {}

    def verdict(self, exit_code: int, stdout: str, stderr: str) -> tuple[Outcome, str]:
        """The outcome and its reason, from the exit code and the end of the output."""
        if exit_code == 0:
            return "finished", ""
        return "failed", " ".join((stderr.strip() or stdout.strip())[-500:].split())

    def version_command(self, argv: Sequence[str]) -> list[str]:
        """The command that prints the version of the program that `argv` starts."""
        return [*argv, "--version"]

    def host_program(self) -> HostProgram | None:
        """The program on this machine, whose `folders` local sandboxes mount read-only; None if there is none."""
        return self.package.on_this_machine() if self.package is not None else None

    async def install_cli(self, sb: Sandbox) -> None:
        """Install the program in the sandbox; raises `CliMissing`."""
        if self.package is not None:
            place = await self._place(sb)
            place.argv = await provide_program(sb, self.package, place.folder)

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Write the program's configuration into its own home folder."""
        place = await self._place(sb)
        for path, text in self.files(ctx).items():
            await sb.write_file(f"{place.home}/{path}", text, user=AGENT_USER)

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: int) -> int:
        """Run the program and return its exit code, or `EXIT_TIME_BUDGET_EXCEEDED` if it was killed after its time."""
        place = await self._place(sb)
        await sb.write_file(f"{place.folder}/prompt", prompt, user=AGENT_USER)
        environment = {**self.environment(ctx), **self._extra_env, **_extra_envs(self.package), "HOME": place.home}
        program = place.argv or ([self.package.program] if self.package else [])
        argv = [*program, *self.arguments(ctx, prompt), *self._extra_args, *_extra_args(self.package)]
        source = shlex.quote(f"{place.folder}/prompt") if self.prompt_on_stdin else "/dev/null"
        out, err = shlex.quote(f"{place.folder}/stdout"), shlex.quote(f"{place.folder}/stderr")
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
        start = f"exec {shlex.join(argv)} <{source} >{out} 2>{err}\n"
        script = f"{place.folder}/launch.sh"
        await sb.write_file(script, f"cd {shlex.quote(ctx.workdir)} || exit 126\n{exports}{start}", user=AGENT_USER)
        command = f"sh {shlex.quote(script)}"
        return await exec_and_wait(sb, cmd=command, time_budget_sec=time_budget_sec, tag=self.name, user=AGENT_USER)

    async def run(
        self,
        sb: Sandbox,
        *,
        workdir: str,
        session_id: str,
        adapter_url: str,
        time_budget_sec: int,
        prompt: str,
    ) -> int:
        """Install, configure and run the program; returns its exit code."""
        result = await self.work(
            sb, HarnessContext(workdir, session_id, adapter_url), prompt=prompt, time_budget_sec=time_budget_sec
        )
        return result.exit_code

    async def work(self, sb: Sandbox, ctx: HarnessContext, *, prompt: str, time_budget_sec: int) -> HarnessResult:
        """Install, configure and run the program; returns its result with output and diff."""
        await self.install_cli(sb)
        version = await self.version(sb)
        await self.write_config(sb, ctx)
        folder = shlex.quote(ctx.workdir)
        code, _, _ = await sb.exec(f"test -w {folder}", user=AGENT_USER)
        if code != 0:
            await sb.exec(f"chown -R {AGENT_USER} {folder}", user="root", timeout=INSTALL_TIMEOUT_S, check=True)
        code, head, _ = await sb.exec(f"{_git(ctx.workdir)} rev-parse --verify -q HEAD", user=AGENT_USER)
        base = head.strip() if code == 0 else None
        began = time.monotonic()
        exit_code = await self.launch_and_wait(sb, ctx, prompt, time_budget_sec)
        wall_s = time.monotonic() - began
        place = await self._place(sb)
        diff, diff_truncated = await _diff(sb, ctx.workdir, base, f"{place.folder}/index")
        stdout, stderr = await _file_tail(sb, f"{place.folder}/stdout"), await _file_tail(sb, f"{place.folder}/stderr")
        outcome: Outcome = "timeout"
        reason = f"not finished after {time_budget_sec} s"
        if exit_code != EXIT_TIME_BUDGET_EXCEEDED:
            outcome, reason = self.verdict(exit_code, stdout, stderr)
        return HarnessResult(
            harness=self.name,
            version=version,
            exit_code=exit_code,
            outcome=outcome,
            reason=reason,
            wall_s=round(wall_s, 3),
            stdout=stdout[-KEPT_BYTES:],
            stderr=stderr[-KEPT_BYTES:],
            diff=diff,
            diff_truncated=diff_truncated,
        )

    async def version(self, sb: Sandbox) -> str:
        """The program's version; queried once for each program, because some take seconds to print it."""
        if self.package is None:
            return ""
        place = await self._place(sb)
        argv = tuple(place.argv or [self.package.program])
        if argv not in self._versions:
            command = f"HOME={shlex.quote(place.home)} {shlex.join(self.version_command(argv))} </dev/null"
            code, out, _ = await sb.exec(command, user=AGENT_USER, timeout=VERSION_TIMEOUT_S)
            number = next((word for word in out.split() if word[:1].isdigit() and "." in word), out.strip()[:40])
            self._versions[argv] = number if code == 0 else ""
        return self._versions[argv]

    async def _place(self, sb: Sandbox) -> _AgentFolder:
        """The folder of the agent program's own files in this sandbox; created under the agent user's home folder."""
        if sb not in self._places:
            await ensure_agent_user(sb)
            make = 'mkdir -p "$HOME/.slime-agent/home" && printf %s "$HOME"'
            _, home, _ = await sb.exec(make, user=AGENT_USER, check=True)
            self._places[sb] = _AgentFolder(f"{home.strip()}/.slime-agent")
        return self._places[sb]


@dataclass
class _AgentFolder:
    """A folder in a sandbox for the program's home, prompt and output, and the program's command there."""

    folder: str
    argv: list[str] | None = None

    @property
    def home(self) -> str:
        return f"{self.folder}/home"


def _extra_args(package: Package | None) -> list[str]:
    return shlex.split(os.environ.get(f"SLIME_AGENT_{package.variable}_EXTRA_ARGS", "")) if package else []


def _extra_envs(package: Package | None) -> dict[str, str]:
    variable = f"SLIME_AGENT_{package.variable}_EXTRA_ENVS" if package else ""
    text = os.environ.get(variable, "")
    if not text:
        return {}
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise UserError(f"{variable} must be a JSON object of environment variables, not {text[:80]!r}: correct it")
    return {str(name): str(value) for name, value in given.items()}


async def _file_tail(sb: Sandbox, path: str) -> str:
    _, text, _ = await sb.exec(f"tail -c {READ_BYTES} {shlex.quote(path)}", user=AGENT_USER)
    return text


def _git(workdir: str) -> str:
    return f"git -C {shlex.quote(workdir)} -c safe.directory='*' -c core.fsmonitor=false"


async def _diff(sb: Sandbox, workdir: str, base: str | None, index: str) -> tuple[str, bool]:
    """The changes since `base`, including commits and new files, and True if they are incomplete.

    The repository's own index is not changed. Changes of files that are not UTF-8 are in git's binary format, which is
    text. Without a repository, the changes are those that the sandbox reports.
    """
    if base is not None:
        git = f"GIT_INDEX_FILE={shlex.quote(index)} {_git(workdir)} -c core.quotePath=true"
        diff = f"diff --cached --binary --src-prefix=a/ --dst-prefix=b/ {base}"
        raw, is_cut = await _bytes_of(sb, f"{git} read-tree {base} && {git} add -A && {git} {diff}")
        parts = re.split(rb"(?m)^(?=diff --git )", raw)
        odd = sorted({name for part in parts if not _is_utf8(part) for name in _changed_files(part)})
        if odd and len(raw) <= DIFF_BYTES:
            others = shlex.join([":/", *(f":(top,exclude,literal){name}" for name in odd)])
            theirs = shlex.join(f":(top,literal){name}" for name in odd)
            no_text = shlex.quote(f"{index}.attributes")
            binary = f"echo '* -diff' > {no_text} && {git} -c core.attributesFile={no_text} {diff}"
            raw, is_cut = await _bytes_of(sb, f"{git} {diff} -- {others} && {binary} -- {theirs}")
    elif isinstance(sb, ExtendedSandbox):
        changes = await sb.diff()
        raw, is_cut = changes.patch.encode(errors="replace"), changes.truncated
    else:
        return "", False
    if len(raw) > DIFF_BYTES:
        raw, is_cut = raw[: raw.rfind(b"\n", 0, DIFF_BYTES) + 1], True
    return raw.decode(errors="replace"), is_cut or not _is_utf8(raw)


async def _bytes_of(sb: Sandbox, command: str) -> tuple[bytes, bool]:
    """The output of a command as bytes, up to the size of a diff, and True if it is incomplete.

    The output is encoded in base64, because `exec` returns text only.
    """
    code, text, _ = await sb.exec(f"{{ {command}; }} | head -c {DIFF_BYTES + 1} | base64", user=AGENT_USER)
    whole = re.split(r"[^\w+/=\s]", text, maxsplit=1)[0]
    packed = "".join(whole.split())
    return base64.b64decode(packed[: len(packed) // 4 * 4]), code != 0 or len(whole) < len(text)


def _changed_files(part: bytes) -> list[str]:
    """The old and new name of the file that one part of a patch changes; names that are not UTF-8 are omitted."""
    lines = [line[4:].rstrip(b"\t") for line in part.split(b"\n") if line.startswith((b"--- ", b"+++ "))][:2]
    names = [
        line[1:-1].decode("unicode_escape").encode("latin-1") if line.startswith(b'"') else line
        for line in lines
        if line != b"/dev/null"
    ]
    return [name[2:].decode() for name in names if _is_utf8(name)]


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


class CommandHarness(BaseHarness):
    """Any program that takes a base URL, as a list of arguments that no shell parses.

    `{url}`, `{openai_url}`, `{key}`, `{model}`, `{workdir}` and `{prompt}` in the arguments are replaced. The
    environment has the same values under the names that clients of OpenAI and Anthropic read, and the prompt is on
    standard input too.
    """

    name = "command"

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **settings: Any) -> None:
        if isinstance(argv, str) or not argv:
            raise UserError(f"the command of an agent is a list of its arguments, not {argv!r}: split it")
        super().__init__(extra_env=env, **settings)
        self.argv = tuple(str(item) for item in argv)

    def arguments(self, ctx: HarnessContext, prompt: str) -> list[str]:
        values = {
            "{url}": ctx.base_url,
            "{openai_url}": ctx.openai_url,
            "{key}": ctx.session_id,
            "{model}": ctx.model_label,
            "{workdir}": ctx.workdir,
            "{prompt}": prompt,
        }
        return [_fill_placeholders(item, values) for item in self.argv]

    def environment(self, ctx: HarnessContext) -> dict[str, str]:
        return {
            "OPENAI_BASE_URL": ctx.openai_url,
            "OPENAI_API_BASE": ctx.openai_url,
            "OPENAI_API_KEY": ctx.session_id,
            "OPENAI_MODEL": ctx.model_label,
            "ANTHROPIC_BASE_URL": ctx.base_url,
            "ANTHROPIC_API_KEY": ctx.session_id,
            "ANTHROPIC_AUTH_TOKEN": ctx.session_id,
            "ANTHROPIC_MODEL": ctx.model_label,
        }


def _fill_placeholders(item: str, values: Mapping[str, str]) -> str:
    """Replace all names in one pass, so that names inside a prompt stay as they are."""
    parts, rest = [], item
    while rest:
        found = [(at, name) for name in values if (at := rest.find(name)) >= 0]
        if not found:
            break
        at, name = min(found)
        parts += [rest[:at], values[name]]
        rest = rest[at + len(name) :]
    return "".join([*parts, rest])
