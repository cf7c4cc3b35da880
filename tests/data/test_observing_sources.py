"""Data sources that learn from finished groups: each group is observed once, also after crashes."""

from __future__ import annotations

import threading
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.data.buffer import JournaledSource
from slime.data.custom_source import UserSource
from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from tests.data.journal_samples import finish, open_journal


class Numbers:
    """Hands out numbers and records the observed groups."""

    def __init__(self) -> None:
        self.next = 0
        self.seen: list[list[Any]] = []

    def get_samples(self, num_samples: int) -> list[Sample]:
        self.next += num_samples
        return [Sample(prompt=str(number)) for number in range(self.next - num_samples, self.next)]

    def observe_samples(self, rollout_id: int, groups: list[list[Sample]]) -> None:
        self.seen += [[rollout_id, group[0].prompt, *(sample.reward for sample in group)] for group in groups]


class Adaptive(Numbers):
    """Has `state_dict` and `load_state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next, self.seen = state["next"], state["seen"]


class Saving(Numbers):
    """Has only `save` and `load` at checkpoints, like upstream's sources."""

    def __init__(self, files: dict[int, tuple[int, list[Any]]]) -> None:
        super().__init__()
        self.files = files

    def save(self, rollout_id: int) -> None:
        self.files[rollout_id] = self.next, list(self.seen)

    def load(self, rollout_id: int | None = None) -> None:
        if rollout_id in self.files:
            self.next, seen = self.files[rollout_id]
            self.seen = list(seen)


@pytest.fixture
def args(tmp_path: Path) -> Namespace:
    run = str(tmp_path / "run")
    return Namespace(data_source_path="mine.py", n_samples_per_prompt=2, rollout_batch_size=2, save=run, load=run)


@pytest.fixture
def live(tmp_path: Path, args: Namespace) -> Callable[..., tuple[Any, JournaledSource]]:
    """Create a source as a new process does, resumed at `start`."""

    def begin(start: int, inner: Any = None) -> tuple[Any, JournaledSource]:
        inner = inner or Adaptive()
        source = JournaledSource(UserSource(inner, args), open_journal(tmp_path))
        source.resume(start)
        return inner, source

    return begin


def roll_out(source: JournaledSource, count: int, reward: float = 1.0) -> list[Any]:
    """Hand out and finish groups without assigning them to a batch."""
    groups = source.get_samples(count)
    for group in groups:
        for sample in group:
            if sample.reward is None:
                source.journal.produced(sample, finish(sample, reward))
    return groups


def states(source: JournaledSource) -> list[str]:
    with source.journal._database.reading() as connection:
        return [state for (state,) in connection.execute("SELECT state FROM groups ORDER BY id")]


def test_batch_and_dropped_groups_are_observed_together(live: Any) -> None:
    inner, source = live(0)
    kept, dropped = roll_out(source, 2)
    source.drop([dropped])
    assert (inner.seen, states(source)) == ([], ["finished", "finished"])
    source.assign(0, [kept], {})
    assert inner.seen == [[0, "0", 1.0, 1.0], [0, "1", 1.0, 1.0]]
    assert states(source) == ["assigned", "dropped"]
    source.assign(1, roll_out(source, 1, 0.0), {})
    assert inner.seen[2:] == [[1, "2", 0.0, 0.0]]


@pytest.mark.parametrize("observes", [True, False])
def test_drop_does_not_wait_for_a_busy_source(live: Any, observes: bool) -> None:
    class Unseeing(Numbers):
        observe_samples: Any = None

    inner, source = live(0, Numbers() if observes else Unseeing())
    (kept,), (dropped,) = roll_out(source, 1), roll_out(source, 1)
    asked, free = threading.Event(), threading.Event()

    def wait(num_samples: int) -> list[Sample]:
        asked.set()
        assert free.wait(120)
        return []

    inner.get_samples = wait
    busy = threading.Thread(target=source.get_samples, args=(1,), daemon=True)
    busy.start()
    assert asked.wait(120)
    drop = threading.Thread(target=source.drop, args=([dropped],), daemon=True)
    drop.start()
    drop.join(60.0)
    was_blocked = drop.is_alive()
    free.set()
    drop.join()
    busy.join()
    assert not was_blocked
    source.assign(0, [kept], {})
    assert states(source) == ["assigned", "dropped"]
    assert len(inner.seen) == 2 * observes


def test_crash_neither_loses_nor_repeats_observations(live: Any) -> None:
    _, source = live(0)
    kept, dropped = roll_out(source, 2)
    source.drop([dropped])
    source.journal.close()  # killed before the batch was complete

    inner, source = live(0)
    assert (inner.seen, inner.next) == ([], 2)
    kept, dropped = roll_out(source, 2)  # both are recovered unchanged
    assert [kept[0].reward, dropped[0].prompt] == [1.0, "1"]
    source.drop([dropped])
    source.assign(0, [kept], {})
    source.get_samples(1)
    source.journal.close()  # killed while training on the batch

    again, source = live(0)
    assert source.batch(0) is not None
    assert again.seen == inner.seen == [[0, "0", 1.0, 1.0], [0, "1", 1.0, 1.0]]
    assert source.get_samples(1)[0][0].prompt == "2"


def test_save_only_source_reobserves_rollouts_after_the_checkpoint(live: Any) -> None:
    files: dict[int, Any] = {}
    _, source = live(0, Saving(files))
    for rollout_id in range(3):
        source.assign(rollout_id, roll_out(source, 1, float(rollout_id)), {})
        if rollout_id == 0:
            source.save(0)
    source.journal.consumed(0)
    source.journal.close()

    inner, source = live(1, Saving(files))
    assert inner.seen == [[0, "0", 0.0, 0.0]]
    for rollout_id in (1, 2):
        assert source.batch(rollout_id) is not None
        assert source.batch(rollout_id) is not None  # requested twice, observed once
    assert inner.seen == [[0, "0", 0.0, 0.0], [1, "1", 1.0, 1.0], [2, "2", 2.0, 2.0]]


def test_observations_in_a_save_are_not_repeated(live: Any) -> None:
    """A rollout generated ahead was observed before the checkpoint of the previous rollout was saved."""
    files: dict[int, Any] = {}
    _, source = live(0, Saving(files))
    for rollout_id in range(2):
        source.assign(rollout_id, roll_out(source, 1), {})
    source.save(0)
    source.journal.consumed(0)
    source.journal.close()

    inner, source = live(1, Saving(files))
    assert source.batch(1) is not None
    assert [rollout_id for rollout_id, *_ in inner.seen] == [0, 1]


def test_state_resumes_from_the_checkpoint_in_another_folder(live: Any, tmp_path: Path, args: Namespace) -> None:
    inner, source = live(0)
    source.assign(0, roll_out(source, 2), {})
    source.save(0)
    assert (tmp_path / "run" / "rollout" / "data_state_0.json").is_file()
    source.journal.close()

    (tmp_path / "other").mkdir()
    elsewhere = JournaledSource(UserSource(Adaptive(), args), open_journal(tmp_path / "other"))
    elsewhere.resume(1)
    assert (elsewhere.source.source.seen, elsewhere.source.source.next) == (inner.seen, 2)
    assert elsewhere.get_samples(1)[0][0].group_index == 2


def test_rejects_a_damaged_state(live: Any, tmp_path: Path, args: Namespace) -> None:
    folder = tmp_path / "run" / "rollout"
    folder.mkdir(parents=True)
    (folder / "data_state_0.json").write_text('{"source": {}}')
    with pytest.raises(UserError, match=r"data_state_0.json: not a position of --data-source-path mine.py"):
        UserSource(Adaptive(), args).load(0)


def test_sources_without_observe_samples_are_not_affected(tmp_path: Path, args: Namespace) -> None:
    class Plain:
        def get_samples(self, num_samples: int) -> list[Sample]:
            return [Sample(prompt="p") for _ in range(num_samples)]

    source = JournaledSource(UserSource(Plain(), args), open_journal(tmp_path))
    source.resume(0)
    kept, dropped = roll_out(source, 2)
    source.drop([dropped])
    assert states(source) == ["finished", "dropped"]
    source.assign(0, [kept], {})
    assert "observed" not in source.source.position()


def test_observations_in_subclass_metadata_survive_a_crash(tmp_path: Path) -> None:
    class Counting(RolloutDataSourceWithBuffer):
        def observe_samples(self, rollout_id: int, groups: list[Any]) -> None:
            self.metadata["seen"] = self.metadata.get("seen", 0) + len(groups)

    def begin(start: int) -> JournaledSource:
        given = Namespace(rollout_global_dataset=False, n_samples_per_prompt=2, load=None, save=None)
        source = JournaledSource(Counting(given), open_journal(tmp_path))
        source.resume(start)
        return source

    source = begin(0)
    source.assign(0, roll_out(source, 3), {})
    source.journal.close()
    again = begin(0)
    assert again.batch(0) is not None
    assert again.metadata == {"seen": 3}
