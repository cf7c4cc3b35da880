"""Runs the code blocks of the README, the pages and the tutorial, in a fresh copy of the repository for each page.

The blocks of a page run in its order, in a copy of the tracked files with a short quickstart in `outputs/quickstart`, so
a block may use the files of an earlier one, and those of the tutorial the files of its first page. `<!-- not run: REASON -->`
in the line before a block leaves it out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "docs/tutorial")  # tests/test_docs_zh.py compares the blocks of docs/zh with these
PAGES = [ROOT / "README.md"]
PAGES += [page for folder in FOLDERS for page in sorted((ROOT / folder).glob("*.md"))]
PAGES = [page for page in PAGES if page.is_file() and page.name not in ("flags.md", "migration.md")]
DATA = {"json": json.loads, "yaml": yaml.safe_load, "toml": tomllib.loads}
NOT_RUN = re.compile(r"<!-- not run: .+ -->")
LIMIT_S = 1800
SHORT = "--steps 3 --warmup-steps 60"
"""A quickstart of seconds, which leaves the same files."""


class Block(NamedTuple):
    language: str
    text: str
    line: int
    is_run: bool


def blocks(page: Path) -> list[Block]:
    """Returns the fenced blocks of a page, those in lists and tabs included."""
    found: list[Block] = []
    lines = page.read_text().splitlines()
    number = 0
    while number < len(lines):
        fence = re.match(r"^( *)```(\w+)", lines[number])
        if fence is None:
            number += 1
            continue
        indent, start = fence[1], number
        number += 1
        body: list[str] = []
        while lines[number].strip() != "```":
            body.append(lines[number].removeprefix(indent))
            number += 1
        before = next((line for line in reversed(lines[:start]) if line.strip()), "")
        found.append(Block(fence[2], "\n".join(body) + "\n", start + 1, NOT_RUN.search(before) is None))
        number += 1
    return found


def pages_with(*languages: str) -> pytest.MarkDecorator:
    pages = [page for page in PAGES if any(block.language in languages and block.is_run for block in blocks(page))]
    return pytest.mark.parametrize("page", pages, ids=[str(page.relative_to(ROOT)) for page in pages])


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tracked files with a short quickstart in it."""
    place = tmp_path_factory.mktemp("pages") / "slime"
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)
    command = [sys.executable, "-m", "slime.cli", "quickstart", *SHORT.split()]
    subprocess.run(command, cwd=place, check=True, capture_output=True)
    (place / ".venv").symlink_to(Path(sys.executable).parents[1])
    for name in ("pyproject.toml", "constraints.txt"):
        os.utime(place / name, (1, 1))  # `make` finds everything installed
    return place


@pytest.fixture
def here(checkout: Path, tmp_path: Path) -> Path:
    shutil.copytree(checkout, tmp_path / "slime", symlinks=True)
    return tmp_path / "slime"


def environment(place: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "SLIME"))}
    programs = f"{Path(sys.executable).parent}:{kept['PATH']}"
    if not os.environ.get("SLIME_LONG"):
        kept["ARGS"] = SHORT  # of `make quickstart`
    return kept | {"PATH": programs, "PYTHONPATH": str(place), "COLUMNS": "120", "PAGER": "cat"}


FIRST = ROOT / "docs/tutorial/1-your-task.md"
"""The other pages of the tutorial use the files that this one writes."""


def runs(page: Path) -> bool:
    return any(block.is_run and block.language in ("bash", "python") for block in blocks(page))


@pytest.mark.docs
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    "page", [page for page in reversed(PAGES) if runs(page)], ids=lambda page: str(page.relative_to(ROOT))
)  # the tutorial, which takes longest, first
def test_blocks_run(page: Path, here: Path) -> None:
    """One shell for a page, as a reader has; a Python block is a program of its own."""
    script = ["set -e"]
    if page.parent == FIRST.parent and page != FIRST:
        files = [block for block in blocks(FIRST) if block.language == "bash" and "slime train" not in block.text]
        script += [block.text for block in files]
    for block in blocks(page):
        text = block.text
        if block.language == "python":
            file = here / f"{page.stem}_{block.line}.py"
            file.write_text(text)
            text = f"python {file.name}"
        if block.is_run and block.language in ("bash", "python"):
            script.append(f"echo '== {page.name}:{block.line}' >&2\n{text}")
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)], cwd=here, env=environment(here), capture_output=True, text=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pages_with(*DATA)
def test_data_blocks_of_a_page_parse(page: Path) -> None:
    for block in blocks(page):
        if block.language in DATA and block.is_run:
            try:
                DATA[block.language](block.text)
            except Exception as error:
                raise AssertionError(f"{page.name}:{block.line}: {error}") from error


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_python_blocks_of_a_page_compile(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            compile(block.text, f"{page.name}:{block.line}", "exec")


@pytest.mark.docs
def test_site_builds_without_broken_links(checkout: Path) -> None:
    done = subprocess.run([sys.executable, "tools/build_site.py"], cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    page = checkout / "build/site/docs/tutorial/1-your-task.html"
    assert "Your own task" in page.read_text()
    for page in (checkout / "build/site").rglob("*.html"):
        loaded = re.findall(
            r"""(?:src|href)=["']?(https?://[^"' >]+)["'>][^>]*(?:script|stylesheet)|unpkg""", page.read_text()
        )
        assert not loaded, f"{page} loads {loaded}"
