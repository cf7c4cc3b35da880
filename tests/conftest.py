"""Shared test setup: one compute thread per process, seeds, warm starts (tests/warm), the order of the files, and
Hypothesis without deadlines."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.warm.popen import COLD, Starter, install

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: two workers share two cores
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
LONGEST_FIRST = (
    "learning/test_tool_use.py", "e2e", "migration", "train", "plugins", "weights", "engine_contract", "engine", "watchdog",
    "megatron/test_layouts.py", "megatron/test_whole_runs.py", "megatron/test_gradients.py",
)  # fmt: skip
"""Slow folders and files. They run first, so that the workers finish at about the same time."""
PROCESSES = (
    "e2e", "engine_contract", "learning", "warm", "agent/coding_agent/test_coding_agent.py",
    "agent/test_fuzz.py", "agent/sandbox/test_containment.py", "agent/sandbox/test_ordinary_user.py", "agent/sandbox/test_owner.py",
    "algorithms/test_vocab_parallel.py",
    "engine/test_elastic.py",
    "engine/test_fuzz.py", "engine/test_http.py", "engine/test_isolation.py", "engine/test_key.py",
    "engine/test_openai.py", "engine/test_control_sequences.py", "engine/test_supervisor.py", "plugins/test_examples_in_a_run.py",
    "rollout/test_partial_engine.py", "train/test_carryover.py", "train/test_context_parallel.py",
    "train/test_estimators.py", "train/test_trainer_group.py", "train/test_layouts.py", "train/test_sharding.py",
    "watchdog/test_trainers.py", "weights/test_every_transport.py", "weights/test_failures.py",
    "weights/test_real_engine.py",
)  # fmt: skip
"""Folders and files that start runs, engines or trainers. `make test-fast` skips them."""
RECOVERY = (
    "agent/sandbox/test_containment.py", "agent/test_fuzz.py", "data/test_journal_recovery.py", "e2e/test_agents.py",
    "e2e/test_crashes.py", "e2e/test_elastic_run.py", "e2e/test_endings.py", "e2e/test_fault_tolerance.py",
    "e2e/test_hangs.py", "e2e/test_journal_of_a_run.py", "e2e/test_live.py", "e2e/test_resume.py", "e2e/test_stages.py",
    "e2e/test_tasks.py", "engine/test_elastic.py", "engine/test_fuzz.py", "engine/test_isolation.py",
    "engine/test_control_sequences.py", "engine/test_supervisor.py", "train/test_killed_saves.py", "train/test_nodes.py",
    "watchdog/test_trainers.py",
)  # fmt: skip
"""Files that kill, stop, resume or attack processes (`make test-recovery`)."""
TABLE_WALKS = ("test_names.py", "test_flags.py", "test_page.py")
"""Files of `tests/migration` that start no run. The others run code written for upstream (`make test-migration`)."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cold", action="store_true", help="start every process from nothing, as a user's shell does")


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background sessions ignore it, and so would children
    if config.getoption("--cold"):
        os.environ[COLD] = "1"
    install(Starter())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips the import of deselected Megatron and Ray tests, which takes seconds."""
    return (
        True
        if any(
            f"not {name}" in config.option.markexpr and collection_path == Path(__file__).parent / name
            for name in ("megatron", "ray")
        )
        else None
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    rank = {name: number for number, name in enumerate(LONGEST_FIRST)}

    def place(item: pytest.Item) -> int:
        path = item.path.relative_to(here)
        return rank.get(path.parts[0], rank.get(path.as_posix(), len(rank)))

    items.sort(key=place)
    for item in items:
        path = item.path.relative_to(here)
        if path.parts[0] in PROCESSES or path.as_posix() in PROCESSES:
            item.add_marker("processes")
        if path.parts[0] == "migration" and path.name not in TABLE_WALKS:
            item.add_marker("processes")
            item.add_marker("migration")
        if path.as_posix() in RECOVERY:
            item.add_marker("processes")
            item.add_marker("recovery")
        if path.parts[0] == "megatron":
            item.add_marker("processes")
            item.add_marker("megatron")
        if path.parts[0] == "ray":
            item.add_marker("processes")
            item.add_marker("ray")
        if path.parts[0] == "agents_cli":
            item.add_marker("agents")
        if item.get_closest_marker("examples") is not None:
            item.add_marker("processes")


def pytest_collection_finish() -> None:
    """Freezes modules and tests, which live for the whole session: a garbage collection over them takes 0.5 s."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seeds the random number generators, so that a test and its fixtures do not depend on earlier tests."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _cold_start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("cold") is not None:
        monkeypatch.setenv(COLD, "1")


@pytest.fixture(autouse=True)
def _own_search_path() -> Iterator[None]:
    """Restores sys.path after each test, because runs inside a test add the user's folder."""
    before = list(sys.path)
    yield
    sys.path[:] = before
