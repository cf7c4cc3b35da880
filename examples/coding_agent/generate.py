"""`--custom-generate-function-path examples/coding_agent/generate.py`: an agent program works on a repository in a
sandbox, and the repository's tests are its reward.

Settings come from the environment, under upstream's names: SWE_AGENT (claude_code, codex, opencode, qwen_code,
mini_swe_agent, command), SWE_AGENT_COMMAND (for `command`: its arguments as a JSON list), SWE_AGENT_VISIBLE (folders of
this machine that the sandbox is shown), SWE_AGENT_SETTINGS (of the harness, a JSON object), SWE_AGENT_TIME_BUDGET_SEC,
SWE_EVAL_TIMEOUT_SEC, SWE_CONCURRENCY (agents at work at once), SWE_CC_PROMPT (a template with {problem_statement}).
The sandbox is `--sandbox`'s.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tasks import Task, task_of

from slime.agent.harness import BaseHarness, make_harness, run_agent
from slime.agent.remote_session import open_session
from slime.agent.sandbox import Snapshot, sandbox_from
from slime.data.sample import Sample
from slime.errors import UserError

PYTHON = os.path.realpath(sys.executable)
"""The interpreter that local sandboxes see; `{python}` in the commands of tasks."""


async def generate(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample]:
    """One attempt at the task in `sample.metadata`; its turns as samples, with the verdict of the tests as reward.

    A sandbox that does not start, a program that is missing, crashes or hangs fails this sample (`HarnessFailed`,
    `SandboxError`), and no other.
    """
    task = task_of(sample.metadata, f"sample {sample.index}")
    agent, budget = chosen_agent(args), int(os.environ.get("SWE_AGENT_TIME_BUDGET_SEC", "1800"))
    async with _seats(), open_session(args, sample, sampling_params) as session:
        async with _sandbox(args, task, agent) as sb:
            workdir = task.workdir or sb.workdir
            if task.setup_command:
                await sb.exec(_command(task.setup_command), timeout=_eval_timeout(), check=True)
            result = await run_agent(
                agent,
                sb,
                workdir=workdir,
                session_id=session.key,
                adapter_url=await sb.reach(session.url),
                time_budget_sec=budget,
                prompt=os.environ.get("SWE_CC_PROMPT", "{problem_statement}").format(
                    problem_statement=task.problem_statement
                ),
                model_label=session.model,
            )
            turns = sum(message.role == "assistant" for message in await session.turns())
            result.check(turns)
            reward = await judged(sb, task, workdir)
        return await session.finish(reward, {"instance_id": task.instance_id, "harness": result.to_metadata()})


async def judged(sb: Any, task: Task, workdir: str) -> float:
    """1 if the tests pass, as they were and not as the agent left them."""
    for path, text in task.test_files.items():
        await sb.write_file(f"{workdir}/{path}", text)
    if task.test_patch:
        await sb.write_file(f"{workdir}/.tests.patch", task.test_patch)
        await sb.exec(f"cd {shlex.quote(workdir)} && git apply .tests.patch", check=True)
    code, _, _ = await sb.exec(f"cd {shlex.quote(workdir)} && {_command(task.test_command)}", timeout=_eval_timeout())
    return float(code == 0)


def _command(text: str) -> str:
    return text.replace("{python}", shlex.quote(PYTHON))


def _eval_timeout() -> float:
    return float(os.environ.get("SWE_EVAL_TIMEOUT_SEC", "600"))


def chosen_agent(args: Any) -> BaseHarness:
    """The harness that the environment names; one serves all samples."""
    names = ("SWE_AGENT_COMMAND", "SWE_AGENT_SETTINGS")
    agent = _agent(os.environ.get("SWE_AGENT", "claude_code"), *(os.environ.get(name, "") for name in names))
    on_this_machine = args.sandbox in ("auto", "local", "subprocess")
    if agent.package is not None and on_this_machine and not agent.package.tarball() and not agent.host_program():
        raise UserError(agent.package.missing())
    return agent


@functools.cache
def _agent(name: str, command: str, settings: str) -> BaseHarness:
    arguments = _json("SWE_AGENT_COMMAND", command, list) or None
    return make_harness(name, command=arguments, **_json("SWE_AGENT_SETTINGS", settings, dict))


def _json(name: str, text: str, kind: type) -> Any:
    if not text:
        return kind()
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, kind):
        raise UserError(f"{name} must be a JSON {kind.__name__}, not {text[:80]!r}: correct it")
    return value


@functools.cache
def _seats() -> asyncio.Semaphore:
    return asyncio.Semaphore(int(os.environ.get("SWE_CONCURRENCY", "0")) or max(4, 2 * (os.cpu_count() or 1)))


def _sandbox(args: Any, task: Task, agent: BaseHarness) -> Any:
    """As `--sandbox` and its companions say; an image of the task's own, or the repository laid into it."""
    if task.image is not None:
        return sandbox_from(args, image=task.image)
    program = agent.host_program()
    more = [path for path in os.environ.get("SWE_AGENT_VISIBLE", "").split(os.pathsep) if path]
    visible = [*(program.folders if program else ()), *more]
    return sandbox_from(args, files=Snapshot(prepared(task, Path(args.output_dir))), visible=visible)


def prepared(task: Task, run_folder: Path) -> Path:
    """The folder that sandboxes of a task start from: the task's own, or one that is written once for all attempts."""
    if task.folder is not None:
        return task.folder
    content = json.dumps([task.instance_id, dict(task.files)], sort_keys=True).encode()
    folder = run_folder / "repositories" / hashlib.sha256(content).hexdigest()[:20]
    if not folder.is_dir():
        fresh = folder.with_name(f"{folder.name}.{os.getpid()}.new")
        for path, text in task.files.items():
            (fresh / path).parent.mkdir(parents=True, exist_ok=True)
            (fresh / path).write_text(text)
        fresh.rename(folder)
    return folder
