"""Compares the pages in Chinese with their English sources: headings, code blocks, table rows and links."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHINESE = ROOT / "docs" / "zh"
PAGES = [ROOT / "README_zh.md", *sorted(CHINESE.rglob("*.md"))]
TRANSLATED = ("faq.md", "agents.md", "migration.md", "tutorial/README.md")
PAGES_BY_NAME = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
BLOCK = re.compile(r"(?:^(<!-- not run: [^\n]+ -->)\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def english(page: Path) -> Path:
    """Returns the English source of a Chinese page."""
    if page.parent == ROOT:
        return ROOT / "README.md"
    return ROOT / "docs" / page.relative_to(CHINESE)


def chinese(page: Path) -> Path:
    """Returns the Chinese page of an English one, or the page itself if it is not translated."""
    if page == ROOT / "README.md":
        return ROOT / "README_zh.md"
    place = page.relative_to(ROOT / "docs") if page.is_relative_to(ROOT / "docs") else None
    return CHINESE / place if place and (CHINESE / place).is_file() else page


def source(page: Path) -> str:
    """Returns the English text that a Chinese page translates. The generated tables of migration.md are left out."""
    text = english(page).read_text()
    if page.name == "migration.md":
        prose, tables = text.split("\n| | all |", 1)
        text = prose + "\n" + "\n".join(re.findall(r"^(?!\||###).*$", tables.partition("\n")[2], re.MULTILINE))
    return text


def blocks(text: str) -> list[tuple[str, str, str]]:
    """Returns the `not run` comment, language and text of each fenced block."""
    return BLOCK.findall(text)


def prose(text: str) -> str:
    return BLOCK.sub("", text)


def heading_levels(text: str) -> list[int]:
    return [len(marks) for marks in re.findall(r"^(#+) ", prose(text), re.MULTILINE)]


def table_rows(text: str) -> list[int]:
    """Returns the number of rows of each table."""
    return [table.count("\n|") + 1 for table in re.findall(r"^\|.*(?:\n\|.*)*", prose(text), re.MULTILINE)]


def links(page: Path, text: str) -> Iterator[tuple[Path, str]]:
    """Yields the file and the anchor of each relative link of the text, images included."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if not re.match(r"[a-z]+:|#", target):
            path, _, anchor = target.partition("#")
            yield (page.parent / path).resolve(), anchor


def test_every_page_in_the_list_is_translated() -> None:
    missing = [name for name in TRANSLATED if not (CHINESE / name).is_file()]
    lessons = {path.name for path in (ROOT / "docs" / "tutorial").glob("*.md")}
    missing += sorted(lessons - {path.name for path in (CHINESE / "tutorial").glob("*.md")})
    assert not missing


@PAGES_BY_NAME
def test_heading_levels_match(page: Path) -> None:
    assert heading_levels(page.read_text()) == heading_levels(source(page))


@PAGES_BY_NAME
def test_code_blocks_match(page: Path) -> None:
    assert blocks(page.read_text()) == blocks(source(page))


@PAGES_BY_NAME
def test_tables_have_as_many_rows(page: Path) -> None:
    assert table_rows(page.read_text()) == table_rows(source(page))


@PAGES_BY_NAME
def test_relative_links_resolve(page: Path) -> None:
    for file, _ in links(page, page.read_text()):
        assert file.exists(), f"{page.relative_to(ROOT)} links to {file}"


@PAGES_BY_NAME
def test_links_go_to_the_same_pages_in_chinese_where_they_exist(page: Path) -> None:
    pair = {page, english(page)}
    wanted = Counter((chinese(file), anchor) for file, anchor in links(english(page), source(page)) if file not in pair)
    found = Counter(link for link in links(page, page.read_text()) if link[0] not in pair)
    assert found == wanted


@PAGES_BY_NAME
def test_page_links_to_its_source_below_the_title(page: Path) -> None:
    title, empty, link = page.read_text().splitlines()[:3]
    assert title.startswith("# ")
    assert not empty
    target = re.fullmatch(r"\[English\]\((.+)\)", link)
    assert target is not None
    assert (page.parent / target[1]).resolve() == english(page)
