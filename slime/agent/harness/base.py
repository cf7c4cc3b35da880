"""An agent program at work in a sandbox: installed, configured, started, waited for, and asked what it did.

Invariant: a harness holds settings, and what it knows of a sandbox goes with the sandbox, so one serves all samples at
once. The prompt reaches the program as a file on its standard input, or as one item of its arguments, and never as a
part of a shell's text.
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
    provide,
)
from slime.agent.sandbox import EXIT_TIME_BUDGET_EXCEEDED, Sandbox, ensure_agent_user, exec_and_wait
from slime.agent.sandbox.protocol import ReachingSandbox
from slime.errors import UserError

READ_BYTES = 262144
"""Of the end of a program's output, to find in it what it says about its end."""
VERSION_TIMEOUT_S = 60
AGENT = "agent"
"""The user that agents work as; several refuse to be root."""


@dataclass(frozen=True)
class HarnessContext:
    """Where the agent works and whom it asks: `adapter_url` as it is reached from inside the sandbox, without /v1."""

    workdir: str
    session_id: str
    adapter_url: str
    model_label: str = "slime-actor"

    @property
    def base_url(self) -> str:
        """What Anthropic's clients call the base URL."""
        return self.adapter_url.rstrip("/")

    @property
    def openai_url(self) -> str:
        """What OpenAI's clients call the base URL."""
        return f"{self.base_url}/v1"


class BaseHarness:
    """One agent program, headless, without telemetry and updates, with few retries: the session's answers are final.

    `context_tokens` and `max_output_tokens` are told to the program, which counts on the limits of a model it knows
    otherwise. `compaction` lets it shorten its own history, which makes another sample of the session.
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
        self._places: WeakKeyDictionary[Sandbox, _Place] = WeakKeyDictionary()
        self._versions: dict[tuple[str, ...], str] = {}

    # what a program is

    def arguments(self, ctx: HarnessContext, prompt: str) -> list[str]:
        """What the program is called with; the prompt among them unless `prompt_on_stdin`."""
        raise NotImplementedError

    def environment(self, ctx: HarnessContext) -> dict[str, str]:
        """What the program's environment has besides the sandbox's."""
        return {}

    def files(self, ctx: HarnessContext) -> dict[str, str]:
        """Configuration by its path under the program's home folder."""
        return {}

    def verdict(self, exit_code: int, stdout: str, stderr: str) -> tuple[Outcome, str]:
        """How it ended and what it says about that, by its exit code and the end of its output."""
        if exit_code == 0:
            return "finished", ""
        return "failed", " ".join((stderr.strip() or stdout.strip())[-500:].split())

    def version_command(self, argv: Sequence[str]) -> list[str]:
        """What prints the version of the program that is started by `argv`."""
        return [*argv, "--version"]

    # what is done with it

    def host_program(self) -> HostProgram | None:
        """The program of this machine that sandboxes here should be shown (`folders`, read-only); None without one."""
        return self.package.on_this_machine() if self.package is not None else None

    async def install_cli(self, sb: Sandbox) -> None:
        """Make the program available; raises `CliMissing`."""
        if self.package is not None:
            place = await self._place(sb)
            place.argv = await provide(sb, self.package, place.folder)

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Write its configuration into a home folder of its own."""
        place = await self._place(sb)
        for path, text in self.files(ctx).items():
            await sb.write_file(f"{place.home}/{path}", text, user=AGENT)

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: int) -> int:
        """Run the program to its end; its exit code, or `EXIT_TIME_BUDGET_EXCEEDED` when everything was killed."""
        place = await self._place(sb)
        await sb.write_file(f"{place.folder}/prompt", prompt, user=AGENT)
        script = f"{place.folder}/launch.sh"
        await sb.write_file(script, self._script(place, ctx, prompt), user=AGENT)
        command = f"sh {shlex.quote(script)}"
        return await exec_and_wait(sb, cmd=command, time_budget_sec=time_budget_sec, tag=self.name, user=AGENT)

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
        """Do all of it; the exit code."""
        result = await self.work(
            sb, HarnessContext(workdir, session_id, adapter_url), prompt=prompt, time_budget_sec=time_budget_sec
        )
        return result.exit_code

    async def work(self, sb: Sandbox, ctx: HarnessContext, *, prompt: str, time_budget_sec: int) -> HarnessResult:
        """Do all of it; how it went, with output and diff."""
        await self.install_cli(sb)
        version = await self.version(sb)
        await self.write_config(sb, ctx)
        await _hand_over(sb, ctx.workdir)
        base = await _git_head(sb, ctx.workdir)
        began = time.monotonic()
        exit_code = await self.launch_and_wait(sb, ctx, prompt, time_budget_sec)
        wall_s = time.monotonic() - began
        place = await self._place(sb)
        diff, diff_truncated = await _diff(sb, ctx.workdir, base, f"{place.folder}/index")
        stdout, stderr = await _end_of(sb, f"{place.folder}/stdout"), await _end_of(sb, f"{place.folder}/stderr")
        outcome: Outcome = "timeout"
        reason = f"not done after {time_budget_sec} s"
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
        """The program's version; asked once for each program, since some take seconds to say it."""
        if self.package is None:
            return ""
        place = await self._place(sb)
        argv = tuple(place.argv or [self.package.program])
        if argv not in self._versions:
            command = f"HOME={shlex.quote(place.home)} {shlex.join(self.version_command(argv))} </dev/null"
            code, out, _ = await sb.exec(command, user=AGENT, timeout=VERSION_TIMEOUT_S)
            self._versions[argv] = _version_in(out) if code == 0 else ""
        return self._versions[argv]

    async def _place(self, sb: Sandbox) -> _Place:
        """Where the agent program's own things are in this sandbox: under its home folder, apart from the task's."""
        if sb not in self._places:
            await ensure_agent_user(sb)
            make = 'mkdir -p "$HOME/.slime-agent/home" && printf %s "$HOME"'
            _, home, _ = await sb.exec(make, user=AGENT, check=True)
            self._places[sb] = _Place(f"{home.strip()}/.slime-agent")
        return self._places[sb]

    def _script(self, place: _Place, ctx: HarnessContext, prompt: str) -> str:
        environment = {**self.environment(ctx), **self._extra_env, **_extra_envs(self.package), "HOME": place.home}
        program = place.argv or ([self.package.program] if self.package else [])
        argv = [*program, *self.arguments(ctx, prompt), *self._extra_args, *_extra_args(self.package)]
        source = shlex.quote(f"{place.folder}/prompt") if self.prompt_on_stdin else "/dev/null"
        out, err = shlex.quote(f"{place.folder}/stdout"), shlex.quote(f"{place.folder}/stderr")
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
        return f"cd {shlex.quote(ctx.workdir)} || exit 126\n{exports}exec {shlex.join(argv)} <{source} >{out} 2>{err}\n"


@dataclass
class _Place:
    """A folder in a sandbox for the program's home, prompt and output; and how the program is started there."""

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


def _version_in(text: str) -> str:
    words = [word for word in text.split() if word[:1].isdigit() and "." in word]
    return words[0] if words else text.strip()[:40]


async def _end_of(sb: Sandbox, path: str) -> str:
    _, text, _ = await sb.exec(f"tail -c {READ_BYTES} {shlex.quote(path)}", user=AGENT)
    return text


async def _hand_over(sb: Sandbox, workdir: str) -> None:
    """The agent's user may write in the folder of the task."""
    folder = shlex.quote(workdir)
    code, _, _ = await sb.exec(f"test -w {folder}", user=AGENT)
    if code != 0:
        await sb.exec(f"chown -R {AGENT} {folder}", user="root", timeout=INSTALL_TIMEOUT_S, check=True)


def _git(workdir: str) -> str:
    return f"git -C {shlex.quote(workdir)} -c safe.directory='*' -c core.fsmonitor=false"


async def _git_head(sb: Sandbox, workdir: str) -> str | None:
    code, out, _ = await sb.exec(f"{_git(workdir)} rev-parse --verify -q HEAD", user=AGENT)
    return out.strip() if code == 0 else None


async def _diff(sb: Sandbox, workdir: str, base: str | None, index: str) -> tuple[str, bool]:
    """What has changed since `base`, committed or not, new files too; the repository's own index stays as it is. And
    whether it is not all of that.

    Where there is no repository, what the sandbox itself says.
    """
    if base is not None:
        raw, is_cut = await _git_diff(sb, workdir, base, index)
    elif isinstance(sb, ReachingSandbox):
        changes = await sb.diff()
        raw, is_cut = changes.patch.encode(errors="replace"), changes.truncated
    else:
        return "", False
    if len(raw) > DIFF_BYTES:
        raw, is_cut = raw[: raw.rfind(b"\n", 0, DIFF_BYTES) + 1], True
    return raw.decode(errors="replace"), is_cut or not _is_utf8(raw)


async def _git_diff(sb: Sandbox, workdir: str, base: str, index: str) -> tuple[bytes, bool]:
    """The patch as git makes it, and whether it is not all of that.

    Changes of files that are not UTF-8 are in git's binary form, which is text.
    """
    git = f"GIT_INDEX_FILE={shlex.quote(index)} {_git(workdir)} -c core.quotePath=true"
    diff = f"diff --cached --binary --src-prefix=a/ --dst-prefix=b/ {base}"
    raw, is_cut = await _bytes_of(sb, f"{git} read-tree {base} && {git} add -A && {git} {diff}")
    parts = re.split(rb"(?m)^(?=diff --git )", raw)
    odd = sorted({name for part in parts if not _is_utf8(part) for name in _names(part)})
    if not odd or len(raw) > DIFF_BYTES:
        return raw, is_cut
    others = shlex.join([":/", *(f":(top,exclude,literal){name}" for name in odd)])
    theirs = shlex.join(f":(top,literal){name}" for name in odd)
    no_text = shlex.quote(f"{index}.attributes")
    binary = f"echo '* -diff' > {no_text} && {git} -c core.attributesFile={no_text} {diff}"
    return await _bytes_of(sb, f"{git} {diff} -- {others} && {binary} -- {theirs}")


async def _bytes_of(sb: Sandbox, command: str) -> tuple[bytes, bool]:
    """What a command writes, up to the size of a diff, and whether that is not all of it: `exec` gives text only."""
    code, text, _ = await sb.exec(f"{{ {command}; }} | head -c {DIFF_BYTES + 1} | base64", user=AGENT)
    whole = re.split(r"[^\w+/=\s]", text, maxsplit=1)[0]
    packed = "".join(whole.split())
    return base64.b64decode(packed[: len(packed) // 4 * 4]), code != 0 or len(whole) < len(text)


def _names(part: bytes) -> list[str]:
    """The old and the new name of the file that one part of a patch changes, those that are UTF-8."""
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


# Any program that takes a base URL.


class CommandHarness(BaseHarness):
    """A command with its arguments, one by one, which no shell reads.

    `{url}`, `{openai_url}`, `{key}`, `{model}`, `{workdir}` and `{prompt}` in them are replaced. The same stand in the
    environment under the names that clients of OpenAI and Anthropic look for, and the prompt is on standard input too.
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
        return [_filled(item, values) for item in self.argv]

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


def _filled(item: str, values: Mapping[str, str]) -> str:
    """With the names replaced in one go: what a prompt contains is not looked at again."""
    parts, rest = [], item
    while rest:
        found = [(at, name) for name in values if (at := rest.find(name)) >= 0]
        if not found:
            break
        at, name = min(found)
        parts += [rest[:at], values[name]]
        rest = rest[at + len(name) :]
    return "".join([*parts, rest])
