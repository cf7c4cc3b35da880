"""Imports the example's modules, which import each other by their file names."""

import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "coding_agent"


@pytest.fixture(scope="session", autouse=True)
def _example_modules():
    sys.path.insert(0, str(EXAMPLE))
    import generate  # noqa: F401 (from here on they are found in sys.modules)
    import repositories  # noqa: F401
    import tasks  # noqa: F401
    import tiny  # noqa: F401
