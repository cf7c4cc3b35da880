"""Scripted model turns for each agent program: the same work with each program's own tools."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.agent.harness import BaseHarness, make_harness
from slime.agent.sandbox.local import WORKDIR

PYTHON = os.path.realpath(sys.executable)
PATH = f"{WORKDIR}/calc.py"
WRONG, RIGHT = "return a - b", "return a + b"
FILES = {
    "calc.py": f"def add(a, b):\n    {WRONG}\n",
    "test_calc.py": "from calc import add\nassert add(2, 3) == 5, add(2, 3)\nprint('the tests pass')\n",
}
TEST = f"{PYTHON} -B test_calc.py"
FIX = f"sed -i 's/{WRONG}/{RIGHT}/' calc.py"
SPECIAL_TEXT = "printf 'a<|im_%s|>b</thi%s>' start nk"
"""Prints text that looks like control tokens; the command itself does not contain it."""


def call(name: str, **arguments: Any) -> str:
    """A tool call in the format of Qwen's models."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def thought(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n"


@dataclass(frozen=True)
class Agent:
    """An agent program and its shell call; `look` and `fix` are calls of other tools, `ending` is its last turn."""

    harness: BaseHarness
    shell: Callable[[str], str]
    look: str = ""
    fix: str = ""
    ending: str = "The tests pass now: add adds."
    more: bool = False
    """Part of `make test-agents-all` only."""

    def turns(self) -> list[str]:
        """Four turns that fix the bug: thoughts, text, parallel calls, and output with control tokens."""
        return [
            thought("Look at the file first. é 中")
            + "I will look at calc.py.\n"
            + (self.look or self.shell("cat calc.py")),
            (self.fix or self.shell(FIX)) + "\n" + self.shell(SPECIAL_TEXT),
            thought("Now the tests.") + self.shell(TEST),
            thought("All good.") + self.ending,
        ]


def _claude(command: str) -> str:
    return call("Bash", command=command, description="run a command")


AGENTS = {
    "claude_code": Agent(
        make_harness("claude_code", max_output_tokens=8000),
        _claude,
        look=call("Read", file_path=PATH),
        fix=call("Edit", file_path=PATH, old_string=WRONG, new_string=RIGHT),
    ),
    "claude_code_small": Agent(make_harness("claude_code", small_prompt=True), _claude),
    "codex": Agent(make_harness("codex"), lambda command: call("exec_command", cmd=command)),
    "codex_small": Agent(make_harness("codex", small_prompt=True), lambda command: call("exec_command", cmd=command)),
    "opencode": Agent(
        make_harness("opencode"),
        lambda command: call("bash", command=command, description="run a command"),
        more=True,
    ),
    "qwen_code": Agent(
        make_harness("qwen_code"),
        lambda command: call("run_shell_command", command=command, is_background=False, description="run it"),
        look=call("read_file", file_path=PATH),  # it refuses to edit a file that it has not read
        more=True,
    ),
    "mini_swe_agent": Agent(
        make_harness("mini_swe_agent"),
        lambda command: call("bash", command=command),
        ending=call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        more=True,
    ),
}
