"""Agent programs in real sandboxes: their inputs, their recorded outputs, and their failures."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

from slime.agent.harness import (
    ClaudeCodeHarness,
    CliCrashed,
    CliMissing,
    CliTimedOut,
    CodexHarness,
    CommandHarness,
    HarnessContext,
    HarnessResult,
    MiniSweAgentHarness,
    OpenCodeHarness,
    QwenCodeHarness,
    make_harness,
    run_agent,
)
from slime.agent.sandbox import Snapshot, make_sandbox
from slime.errors import UserError

GIT = "git -c user.name=a -c user.email=a@b -c safe.directory=*"
URL, KEY = "http://127.0.0.1:9/s", "key-of-the-session"
PROMPT = "Fix it: $(touch pwned) `touch pwned` \"'; touch pwned # {key}\n{url} é"
CONTEXT = HarnessContext("/w", KEY, URL)
REPORT = """
import json, os, sys
with open("told.json", "w") as file:
    json.dump({"argv": sys.argv[1:], "env": dict(os.environ), "stdin": sys.stdin.read()}, file)
print("out"); print("err", file=sys.stderr)
"""
FAKE_CLAUDE = """#!/bin/sh
if [ "$1" = --version ]; then echo "2.1.325 (Claude Code)"; exit; fi
{ echo "$@"; env; cat; } > told.txt
echo '{"type": "assistant"}'
echo '{"type": "result", "subtype": "success", "is_error": false, "terminal_reason": "completed"}'
"""


def work(harness, tmp_path, *, prompt=PROMPT, seconds=240, visible=(), then=None):
    """Run a harness in a sandbox with the file a.txt; return its result and the result of `then(sandbox)`."""
    folder = tmp_path / "files"
    folder.mkdir(exist_ok=True)
    (folder / "a.txt").write_text("one\n")

    async def run():
        async with make_sandbox(files=Snapshot(folder), visible=visible) as sb:
            context = HarnessContext(sb.workdir, KEY, URL)
            result = await harness.work(sb, context, prompt=prompt, time_budget_sec=seconds)
            return result, (await then(sb) if then else None)

    return asyncio.run(run())


def python(code: str, *argv: str) -> CommandHarness:
    return CommandHarness([os.path.realpath(sys.executable), "-c", code, *argv])


def test_command_gets_the_endpoint_and_no_shell_reads_the_prompt(tmp_path):
    argv = ["{prompt}", "--base={openai_url}", "{key}/{model}", "{workdir}", "{}", "{unknown}"]

    async def told(sb):
        return json.loads(await sb.read_file("told.json")), await sb.exec("ls"), sb.workdir

    result, (seen, (_, names, _), workdir) = work(python(REPORT, *argv), tmp_path, then=told)
    assert seen["argv"] == [PROMPT, f"--base={URL}/v1", f"{KEY}/slime-actor", workdir, "{}", "{unknown}"]
    assert seen["stdin"] == PROMPT
    assert seen["env"]["OPENAI_BASE_URL"] == f"{URL}/v1"
    assert seen["env"]["ANTHROPIC_BASE_URL"] == URL
    assert {seen["env"][f"{who}_API_KEY"] for who in ("OPENAI", "ANTHROPIC")} == {KEY}
    assert names.split() == ["a.txt", "told.json"]
    assert (result.outcome, result.exit_code, result.stdout, result.stderr) == ("finished", 0, "out\n", "err\n")
    assert "+++ b/told.json" in result.diff
    assert result.to_metadata()["harness"] == "command"


def test_long_output_and_long_diff_are_truncated(tmp_path):
    code = "print('x' * 100_000 + 'the end'); open('a.txt', 'w').write('y' * {})"
    result, _ = work(python(code.format(100_000)), tmp_path)
    assert len(result.stdout) == 16384
    assert result.stdout.endswith("the end\n")
    assert f"+{'y' * 100_000}\n" in result.diff
    assert not result.diff_truncated
    for repository in (False, True):
        if repository:
            os.system(f"cd {tmp_path}/files && git init -q && git add . && {GIT} commit -qm first")
        result, _ = work(python(code.format(200_000)), tmp_path)
        assert result.diff.endswith("-one\n")
        assert result.to_metadata()["diff_truncated"] is True


def test_repository_diff_has_commits_and_new_files_and_keeps_the_index(tmp_path):
    code = f"""
import subprocess
run = lambda command: subprocess.run(command, shell=True, check=True)
open("a.txt", "w").write("two\\n"); run("{GIT} commit -qam changed")
open("new.txt", "w").write("new\\n")
"""
    (tmp_path / "files").mkdir()
    os.system(f"cd {tmp_path}/files && echo one > a.txt && git init -q && git add . && {GIT} commit -qm first")

    async def status(sb):
        return (await sb.exec(f"{GIT} status --porcelain"))[1]

    result, said = work(python(code), tmp_path, then=status)
    assert "-one\n+two\n" in result.diff
    assert "+++ b/new.txt" in result.diff
    assert said == "?? new.txt\n"


def test_repository_diff_is_exact_for_any_file_encoding(tmp_path):
    files = tmp_path / "files"
    files.mkdir()
    changed = {
        "a.txt": (b"one\n", "one é\n".encode()),
        "latin 1.txt": (b"caf\xe9\nb\nc\n", b"caf\xe9s\nb\nc\n"),
        "größe.txt": (None, b"\xe9\n"),
        "gone.txt": (b"\xff\n", None),
        'we"ird\t.txt': (b"\xe4\n", b"\xe4\xe4\n"),
        "moved.txt": (b"\xe4\n" * 100, None),
        "there.txt": (None, b"\xe4\n" * 100 + b"more \xe4\n"),
    }
    for name, (old, _) in changed.items():
        if old is not None:
            (files / name).write_bytes(old)
    os.system(f"cd {files} && git init -q && git add . && {GIT} commit -qm first")
    shutil.copytree(files, tmp_path / "again")
    code = (
        "import os\nfor name, (_, new) in %r.items():\n"
        "    os.remove(name) if new is None else open(name, 'wb').write(new)\n"
    )
    result, _ = work(python(code % changed), tmp_path)
    assert not result.diff_truncated
    assert "-one\n+one é\n" in result.diff
    apply = ["git", "apply", "-"]
    done = subprocess.run(apply, input=result.diff.encode(), cwd=tmp_path / "again", capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {name: (tmp_path / "again" / name) for name in changed}
    assert {name: file.read_bytes() if file.exists() else None for name, file in found.items()} == {
        name: new for name, (_, new) in changed.items()
    }


def test_diff_of_undecodable_text_is_marked_as_truncated(tmp_path):
    files = tmp_path / "files"
    files.mkdir()
    (files / "odd.txt").write_bytes(b"caf\xe9\n")
    (files / ".gitattributes").write_text("*.txt diff\n")  # always treated as text
    os.system(f"cd {files} && echo one > a.txt && git init -q && git add . && {GIT} commit -qm first")
    result, _ = work(python("open('odd.txt', 'ab').write(b'\\xe9\\n')"), tmp_path)
    assert "+++ b/odd.txt" in result.diff
    assert result.diff_truncated


def test_hung_program_times_out_and_fails_only_without_turns(tmp_path):
    for seconds in (1, 10, 100):  # retry with more time if it had not begun
        result, _ = work(python("import time; print('began', flush=True); time.sleep(600)"), tmp_path, seconds=seconds)
        if result.stdout:
            break
    assert (result.outcome, result.exit_code, result.stdout) == ("timeout", -1, "began\n")
    with pytest.raises(CliTimedOut, match="asked for no turn"):
        result.check(turns=0)
    result.check(turns=2)


def test_crash_fails_the_check_with_the_signal_and_stderr(tmp_path):
    code = "import os, sys; print('bad luck', file=sys.stderr, flush=True); os.kill(os.getpid(), 11)"
    result, _ = work(python(code), tmp_path)
    assert result.outcome == "failed"
    with pytest.raises(CliCrashed, match="ended by signal 11: bad luck"):
        result.check(turns=3)


@pytest.mark.parametrize(
    ("exit_code", "turns", "failure"), [(1, 0, CliCrashed), (1, 1, None), (0, 0, CliCrashed), (127, 3, CliMissing)]
)
def test_exit_before_the_first_turn_counts_as_a_crash(exit_code, turns, failure):
    result = HarnessResult("codex", "0.1", exit_code, "finished" if exit_code == 0 else "failed", stderr="no config")
    if failure is None:
        result.check(turns)
        return
    with pytest.raises(failure, match=r"codex 0\.1 .*: no config"):
        result.check(turns)


def test_missing_programs_and_unknown_agents_are_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(CliMissing, match=r"^Claude Code is not installed: npm install -g .*SLIME_AGENT_CC_PATH"):
        work(ClaudeCodeHarness(), tmp_path)
    monkeypatch.setenv("SLIME_AGENT_CC_PATH", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"SLIME_AGENT_CC_PATH=.*none: there is no program claude"):
        ClaudeCodeHarness().host_program()
    with pytest.raises(UserError, match="there is no agent 'cursor': choose one of claude_code, codex, "):
        make_harness("cursor")


@pytest.fixture
def fake_claude(tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    path = folder / "claude"
    path.write_text(FAKE_CLAUDE)
    path.chmod(0o755)
    return path


async def read_report(sb):
    return await sb.read_file("told.txt")


@pytest.mark.parametrize("shown", [True, False])
def test_host_program_is_mounted_or_copied_into_the_sandbox(tmp_path, monkeypatch, fake_claude, shown):
    monkeypatch.setenv("SLIME_AGENT_CC_PATH", str(fake_claude.parent))
    monkeypatch.setenv("SLIME_AGENT_CC_EXTRA_ARGS", "--effort 'very low'")
    monkeypatch.setenv("SLIME_AGENT_CC_EXTRA_ENVS", '{"MORE": "a b", "CLAUDE_CODE_MAX_RETRIES": 7}')
    harness = ClaudeCodeHarness(context_tokens=32768, max_output_tokens=4096)
    visible = harness.host_program().folders if shown else ()
    result, told = work(harness, tmp_path, visible=visible, then=read_report)
    assert (result.version, result.outcome, result.reason) == ("2.1.325", "finished", "completed")
    assert told.splitlines()[0].endswith("--tools Bash,Edit,Read,Write --effort very low")
    environment = dict(line.split("=", 1) for line in told.splitlines() if "=" in line)
    wanted = {
        "ANTHROPIC_BASE_URL": URL,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "32768",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4096",
        "CLAUDE_CODE_MAX_RETRIES": "7",
        "DISABLE_AUTO_COMPACT": "1",
        "IS_SANDBOX": "1",
        "MORE": "a b",
    }
    assert {name: environment.get(name) for name in wanted} == wanted
    assert told.endswith(PROMPT)


def test_a_tarball_with_the_native_program_needs_no_npm(tmp_path, monkeypatch, fake_claude):
    fake_claude.write_text(FAKE_CLAUDE + "exit 0\n" + "#" * (1 << 20))
    tarball = tmp_path / "claude.tgz"
    with tarfile.open(tarball, "w:gz") as tar:
        tar.add(fake_claude, arcname="package/claude")
    monkeypatch.setenv("SLIME_AGENT_CC_TARBALL", str(tarball))
    result, told = work(ClaudeCodeHarness(), tmp_path, then=read_report)
    assert (result.version, result.outcome) == ("2.1.325", "finished")
    assert told.endswith(PROMPT)


def test_rejects_extra_envs_that_are_not_a_json_object(tmp_path, monkeypatch, fake_claude):
    monkeypatch.setenv("SLIME_AGENT_CC_PATH", str(fake_claude))
    monkeypatch.setenv("SLIME_AGENT_CC_EXTRA_ENVS", "A=1")
    with pytest.raises(UserError, match="SLIME_AGENT_CC_EXTRA_ENVS must be a JSON object"):
        work(ClaudeCodeHarness(), tmp_path)


def test_native_program_is_preferred_to_its_npm_wrapper(tmp_path, monkeypatch):
    modules = tmp_path / "node_modules"
    wrapper = modules / "@openai/codex/bin/codex.js"
    natives = [modules / f"@openai/codex-linux-{arch}/vendor/triple/bin/codex" for arch in ("arm64", "x64")]
    for path in (wrapper, *natives):
        path.parent.mkdir(parents=True)
        path.touch(0o755)
    (modules / ".bin").mkdir()
    (modules / ".bin/codex").symlink_to(wrapper)
    monkeypatch.setenv("PATH", str(modules / ".bin"))
    for machine, native in zip(("aarch64", "x86_64"), natives, strict=True):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        program = CodexHarness().host_program()
        assert program.argv == (str(native),)
        assert program.folders == (native.parent,)


def test_codex_is_configured_for_responses():
    harness = CodexHarness(context_tokens=32768, small_prompt=True, retries=2)
    files = harness.files(HarnessContext("/w", KEY, f"{URL}/", model_label='a "b"'))
    config = tomllib.loads(files[".codex/config.toml"])
    assert config["model"] == 'a "b"'
    assert config["model_context_window"] == 32768
    assert config["model_auto_compact_token_limit"] > 10**8
    assert config["analytics"] == {"enabled": False}
    assert config["model_providers"]["slime"] == {
        "name": "slime",
        "base_url": f"{URL}/v1",
        "env_key": "OPENAI_API_KEY",
        "wire_api": "responses",
        "request_max_retries": 2,
        "stream_max_retries": 2,
        "stream_idle_timeout_ms": 900_000,
    }
    assert config["model_instructions_file"] == "instructions.md"
    assert "model_auto_compact_token_limit" not in CodexHarness(compaction=True).files(CONTEXT)[".codex/config.toml"]


def test_chat_clients_are_configured_with_the_model_limits():
    settings = {"context_tokens": 9000, "max_output_tokens": 700}
    config = json.loads(OpenCodeHarness(**settings).files(CONTEXT)[".config/opencode/opencode.json"])
    assert config["provider"]["slime"]["models"]["slime-actor"]["limit"] == {"context": 9000, "output": 700}
    assert config["compaction"] == {"auto": False, "prune": False}
    generation = json.loads(QwenCodeHarness(**settings).files(CONTEXT)[".qwen/settings.json"])["model"]
    assert generation["generationConfig"]["timeout"] == 900_000
    assert generation["generationConfig"]["contextWindowSize"] == 9000
    arguments = MiniSweAgentHarness(**settings).arguments(CONTEXT, PROMPT)
    assert f"model.model_kwargs.api_base={URL}/v1" in arguments
    assert "model.model_kwargs.max_tokens=700" in arguments
    assert arguments[-2:] == ["-t", PROMPT]


@pytest.mark.parametrize(
    ("harness", "stdout", "verdict"),
    [
        (ClaudeCodeHarness, {"type": "result", "subtype": "success", "is_error": True, "terminal_reason": "prompt_too_long",
                             "result": "Prompt is too long"}, ("failed", "prompt_too_long: Prompt is too long")),
        (CodexHarness, {"type": "turn.failed", "error": {"message": "limit"}}, ("failed", "turn.failed: {'message': 'limit'}")),
        (CodexHarness, {"type": "turn.completed", "usage": {}}, ("finished", "turn.completed")),
    ],
)  # fmt: skip
def test_verdict_is_read_from_the_result_event(harness, stdout, verdict):
    stdout = {**stdout, "of the model": "\u2028\x85"}  # JSON may contain these unescaped
    text = json.dumps({"type": "other"}) + "\nno json\n" + json.dumps(stdout, ensure_ascii=False) + "\n"
    assert harness().verdict(0, text, "") == verdict


def test_upstream_run_call_returns_the_exit_code(tmp_path):
    async def run():
        async with make_sandbox() as sb:
            given = {
                "workdir": sb.workdir,
                "session_id": KEY,
                "adapter_url": URL,
                "time_budget_sec": 240,
                "prompt": "p",
            }
            code = await python("import sys; sys.exit(int(sys.stdin.read() == 'p') + 2)").run(sb, **given)
            result = await run_agent(python("print(open('/dev/stdin').read())"), sb, **given)
            return code, result.stdout

    assert asyncio.run(run()) == (3, "p\n")


def test_folders_of_programs_exist_on_this_machine(fake_claude, monkeypatch):
    monkeypatch.setenv("SLIME_AGENT_CC_PATH", str(fake_claude))
    program = ClaudeCodeHarness().host_program()
    assert program.argv == (str(fake_claude),)
    assert all(Path(folder).is_dir() for folder in program.folders)
