"""Fixtures: one engine of each kind for the whole suite, and two models to serve."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine_contract.engines import ENGINES, SGLANG_PYTHON, Engine
from tests.tiny_models import make_model_folder

collect_ignore_glob = [] if SGLANG_PYTHON else ["test_sglang_*.py"]
"""Tests of SGLang alone are collected by `make test-sglang` only."""
CONTEXT = 2048


@pytest.fixture(scope="session")
def first_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("contract") / "first", max_position_embeddings=CONTEXT)


@pytest.fixture(scope="session")
def second_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("contract") / "second", seed=1, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="session", params=ENGINES)
def running(
    request: pytest.FixtureRequest, first_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    engine = Engine(request.param, first_model, tmp_path_factory.mktemp(request.param))
    yield engine
    engine.fleet.check()
    engine.fleet.stop()


@pytest.fixture
def engine(running: Engine, first_model: Path) -> Iterator[Engine]:
    """The engine with the first model's weights under the version "first"."""
    running.load(first_model, "first")
    yield running
    running.settle()
