"""Fixtures of the rollout tests (scripted engine, runtimes), and a fixture that writes plugin files."""

import textwrap

import pytest

from tests.rollout.conftest import (  # noqa: F401 (fixtures)
    engine,
    make_engine,
    make_runtime,
    model_folder,
    prompts,
    tokenizer,
)


@pytest.fixture
def write(tmp_path):
    """`write(name, source)` writes a plugin file and returns its path."""

    def make(name, source):
        file = tmp_path / name
        file.write_text(textwrap.dedent(source))
        return str(file)

    return make
