"""docs/migration.md matches the tables."""

from __future__ import annotations

from pathlib import Path

from tests.migration.page import page

PAGE = Path(__file__).parents[2] / "docs" / "migration.md"


def test_migration_page_matches_the_tables() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.migration.page > docs/migration.md"
