"""Tasks for a coding agent, as rows of a file: a repository, what is wrong with it, and the tests that judge the work.

python tasks.py TASKS.jsonl PROMPTS.jsonl      rows of this kind (README.md) as a prompt file for `--prompt-data`
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.errors import UserError

KNOWN = (
    "instance_id", "problem_statement", "files", "repo", "image", "workdir", "setup_command", "test_files",
    "test_patch", "test_command", "FAIL_TO_PASS", "PASS_TO_PASS",
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """One row. `files` (path: text) or `folder` (of this machine) or `image` is what the agent finds."""

    instance_id: str
    problem_statement: str
    test_command: str
    files: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    image: str | None = None
    workdir: str | None = None
    setup_command: str | None = None
    test_files: Mapping[str, str] = field(default_factory=dict)
    """Written over the agent's before it is judged: tests that were edited do not count."""
    test_patch: str | None = None


def task_of(row: Mapping[str, Any], where: str) -> Task:
    """The task of a row, checked; `where` is for the message."""
    for key in ("instance_id", "problem_statement", "test_command"):
        if not isinstance(row.get(key), str) or not row[key]:
            raise UserError(f"{where}: {key} must be a text, not {row.get(key)!r}: see examples/coding_agent/README.md")
    for key in ("files", "test_files"):
        if not _is_texts(row.get(key, {})):
            raise UserError(f"{where}: {key} must be an object of texts by their path, below the repository")
    folder, image = row.get("repo"), row.get("image")
    if not (row.get("files") or image or (folder and Path(folder).is_dir())):
        raise UserError(
            f"{where}: there is nothing to work on: give files, an image, or a repo that is a folder (not {folder!r})"
        )
    return Task(
        instance_id=row["instance_id"],
        problem_statement=row["problem_statement"],
        test_command=_with_tests(row, where),
        files=row.get("files", {}),
        folder=Path(folder) if folder and not image and not row.get("files") else None,
        image=image,
        workdir=row.get("workdir"),
        setup_command=row.get("setup_command"),
        test_files=row.get("test_files", {}),
        test_patch=row.get("test_patch"),
    )


def _is_texts(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    paths_stay = all(not Path(path).is_absolute() and ".." not in Path(path).parts for path in value)
    return paths_stay and all(isinstance(text, str) for text in value.values())


def _with_tests(row: Mapping[str, Any], where: str) -> str:
    """The command with SWE-bench's lists of tests, which may be JSON texts, in the place of their names."""
    command: str = row["test_command"]
    for key in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        given = row.get(key, [])
        try:
            names = json.loads(given) if isinstance(given, str) else given
            command = command.replace(f"{{{key}}}", shlex.join(names))
        except (TypeError, ValueError) as error:
            raise UserError(f"{where}: {key} must be a list of tests ({error})") from error
    return command


def read_tasks(path: Path) -> Iterator[tuple[dict[str, Any], Task]]:
    """The rows of a file, and what they mean."""
    if not path.is_file():
        raise UserError(f"there is no file {path} of tasks: make one with repositories.py, or see README.md")
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where}: not valid JSON ({error})") from error
        if not isinstance(row, dict):
            raise UserError(f"{where}: a task is an object, not {type(row).__name__}")
        yield row, task_of(row, where)


def write_prompts(tasks: Iterator[dict[str, Any]], path: Path) -> Path:
    """Tasks as a prompt file: the problem is the prompt, the row its metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for row in tasks:
            known = {key: row[key] for key in KNOWN if key in row}
            file.write(json.dumps({"prompt": row["problem_statement"], "metadata": known}) + "\n")
    return path


if __name__ == "__main__":
    try:
        write_prompts((row for row, _ in read_tasks(Path(sys.argv[1]))), Path(sys.argv[2]))
    except UserError as error:
        sys.exit(f"error: {error}")
