"""The scripted engine and the runtimes of the rollout tests, and plugin files written on the spot."""

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
    """`write(name, source)`: a plugin file; returns its path."""

    def make(name, source):
        file = tmp_path / name
        file.write_text(textwrap.dedent(source))
        return str(file)

    return make
