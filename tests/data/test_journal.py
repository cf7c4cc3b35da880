from __future__ import annotations

import asyncio
import copy
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.config import Config
from slime.data.buffer import Journal, run_identity
from slime.data.buffer.codec import Codec
from slime.data.buffer.rows import RowCodec
from slime.data.counters import PrefixCacheInfo, SpecInfo
from slime.data.sample import Sample
from slime.errors import RunFailed, UserError
from tests.data.journal_samples import finish, finished, open_journal, prompts
from tests.rows import examples


def rows(journal: Journal, query: str, *values: Any) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(journal.path)) as connection:
        return connection.execute(query, values).fetchall()


def states(journal: Journal) -> list[str]:
    return [row[0] for row in rows(journal, "SELECT state FROM groups ORDER BY id")]


# values

texts = st.text(st.characters(exclude_categories=()), max_size=20)  # includes lone surrogates and NUL
numbers = st.floats(allow_nan=False) | st.floats(width=32, allow_nan=False) | st.integers()
arrays = st.builds(
    lambda kind, shape, fill: np.full(shape, fill).astype(kind),
    st.sampled_from(["int32", "float32", "bool", "<u2", "float64"]),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.integers(0, 5),
)
plain = st.recursive(
    st.none() | st.booleans() | numbers | texts | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=8,
)
token_ids = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40)
log_probs = st.lists(st.floats(allow_nan=False), max_size=40) | st.lists(
    st.floats(width=32, allow_nan=False), max_size=40
)
samples = st.builds(
    Sample,
    group_index=st.none() | st.integers(0, 2**40),
    index=st.none() | st.integers(0, 2**40),
    rollout_id=st.none() | st.integers(0, 9),
    prompt=texts
    | st.integers(0, 9)
    | st.dictionaries(texts, st.integers(0, 9), max_size=2)
    | st.lists(st.fixed_dictionaries({"role": texts, "content": texts}), max_size=2),
    tokens=token_ids | st.lists(st.integers(-(2**80), 2**80), min_size=14, max_size=20),
    response=texts,
    response_length=st.integers(0, 50),
    label=plain,
    reward=st.none() | st.floats(allow_nan=False) | st.integers() | st.dictionaries(texts, numbers, max_size=2),
    loss_mask=st.none() | st.lists(st.integers(0, 1), max_size=40),
    weight_versions=st.lists(texts, max_size=3),
    rollout_log_probs=st.none() | log_probs,
    rollout_top_p_token_ids=st.none() | token_ids,
    rollout_routed_experts=st.none() | arrays,
    teacher_log_probs=st.none() | log_probs,
    remove_sample=st.booleans(),
    status=st.sampled_from(Sample.Status),
    failure=st.none() | texts,
    metadata=st.dictionaries(texts, plain, max_size=3),
    train_metadata=st.none() | st.dictionaries(texts, plain, max_size=2),
    session_id=st.none() | texts,
    non_generation_time=st.floats(0, 10),
    spec_info=st.builds(SpecInfo, st.integers(0, 5), st.integers(0, 5)),
    prefix_cache_info=st.builds(PrefixCacheInfo, st.integers(0, 5), st.integers(0, 5)),
)


def types(value: Any) -> Any:
    """Nested types of a value, because `==` does not distinguish 1, 1.0 and True."""
    if isinstance(value, dict):
        return {key: types(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [types(item) for item in value]
    return type(value), getattr(value, "dtype", None)


@settings(max_examples=examples(100), deadline=None)
@given(sample=samples, extra=plain, is_compact=st.booleans())
def test_sample_round_trip_is_exact(sample: Sample, extra: Any, is_compact: bool) -> None:
    sample.kept_by_a_plugin = extra  # type: ignore[attr-defined]
    codec = RowCodec()
    content = codec.content(sample)
    assert codec.content(copy.deepcopy(sample)) == content
    if is_compact:
        sample.compact()
        assert codec.content(sample) == content  # the same numbers, packed
    back = codec.sample(7, codec.columns(sample))
    assert back.journal_id == 7
    back.journal_id = None
    assert back == sample
    assert types(back.to_dict()) == types(sample.to_dict())


@settings(max_examples=examples(100), deadline=None)
@given(array=arrays, key=st.tuples(st.integers(), texts))
def test_nested_arrays_keep_dtype_and_shape(array: np.ndarray, key: tuple[int, str]) -> None:
    codec = Codec()
    scalar = array.dtype.type(1)
    back = codec.unpack(codec.pack({key: [array, (array, scalar)], b"k": scalar}, "x"))
    for found in (back[key][0], back[key][1][0]):
        assert (found.dtype, found.shape, found.tolist()) == (array.dtype, array.shape, array.tolist())
        found.fill(0)  # decoded arrays are writable
    assert back[b"k"] == scalar
    assert types(back[key][1][1]) == types(scalar)


@settings(max_examples=examples(15), deadline=None)
@given(data=st.data())
def test_batch_with_fan_outs_round_trip_is_exact(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    group = st.lists(samples | st.lists(samples, min_size=1, max_size=3), min_size=1, max_size=3)
    groups = data.draw(st.lists(group, max_size=3))
    metrics = data.draw(st.dictionaries(st.text("ab/", max_size=4), st.floats(allow_nan=False) | st.none()))
    journal = open_journal(tmp_path_factory.mktemp("journal"))
    try:
        journal.hand_out(groups, {"offset": 1})
        journal.assign(0, groups, metrics)
        assert journal.batch(0) == (groups, metrics)
    finally:
        journal.close()


def test_number_lists_are_packed_compactly() -> None:
    codec = Codec()
    exact = [float(np.float32(-0.1 * number)) for number in range(2000)]
    rng = np.random.default_rng(0)
    noise = rng.normal(size=2000).astype(np.float32).astype(float).tolist()
    assert len(codec.pack(noise, "x")) < 2000 * 4 + 50
    assert codec.unpack(codec.pack(noise, "x")) == noise
    wide = rng.normal(size=2000).tolist()
    assert 2000 * 7 < len(codec.pack(wide, "x")) < 2000 * 8 + 50
    assert codec.unpack(codec.pack(wide, "x")) == wide
    assert codec.unpack(codec.pack(exact, "x")) == exact
    assert len(codec.pack([1] * 2000, "x")) < 100
    assert len(codec.pack(rng.integers(0, 150000, 2000).tolist(), "x")) < 2000 * 4 + 50


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"tools": [object()]}, "sample 5.metadata.tools: a object"),
        ({"seen": {1, 2}}, "sample 5.metadata.seen: a set"),
        ({"x": np.array([object()])}, "sample 5.metadata.x: an array of object"),
        ({frozenset(): 1}, "sample 5.metadata: a key of type frozenset"),
    ],
)
def test_unsupported_value_is_named_and_nothing_is_recorded(tmp_path: Path, value: dict[Any, Any], named: str) -> None:
    journal = open_journal(tmp_path)
    with pytest.raises(UserError, match=named):
        journal.hand_out([[Sample(index=5, metadata=value)]], {"offset": 1})
    assert rows(journal, "SELECT * FROM samples") == []
    assert rows(journal, "SELECT * FROM meta") == []
    with pytest.raises(UserError, match=r"metrics of rollout 3\.best"):
        journal.assign(3, [], {"best": object()})


def test_nan_and_dict_rewards_are_recorded(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite", {}, keep=False, reward_key="score")
    group = [Sample(index=0, reward=float("nan")), Sample(index=1, reward={"score": 2, "form": 0.5}), Sample(reward=3)]
    journal.assign(0, [group], {"loss": float("inf")})
    batch = journal.batch(0)
    assert batch is not None
    back = batch[0][0]
    assert np.isnan(back[0].reward)
    assert back[1].reward == {"score": 2, "form": 0.5}
    assert back[2].reward == 3
    assert type(back[2].reward) is int
    assert batch[1] == {"loss": float("inf")}
    assert rows(journal, "SELECT reward FROM samples ORDER BY id") == [(None,), (2.0,), (3.0,)]


# group states


def test_group_states_from_hand_out_to_consumption(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    group = prompts(0)
    journal.hand_out([group], {"offset": 1})
    assert states(journal) == ["pending"]
    assert rows(journal, "SELECT value FROM meta WHERE key = 'position'") == [('{"offset": 1}',)]
    asyncio.run(journal.record_progress(finish(group[0], None, tokens=2)))
    assert states(journal) == ["partial"]
    assert rows(journal, "SELECT response_length, status FROM samples") == [(2, "aborted"), (0, "pending")]
    journal.produced(group[0], finish(group[0], 0.25, tokens=1))
    assert states(journal) == ["partial"]
    journal.produced(group[1], finish(group[1], 1.0))
    assert states(journal) == ["finished"]
    assert rows(journal, "SELECT reward FROM finished") == [(0.25,), (1.0,)]
    journal.put_back([group])
    assert states(journal) == ["finished"]
    journal.hand_out([group], {"offset": 1})
    assert states(journal) == ["pending"]
    journal.put_back([group])
    journal.assign(4, [group], {})
    assert rows(journal, "SELECT state, rollout_id, position, consumed_by FROM groups") == [("assigned", 4, 0, None)]
    journal.consumed(4)
    assert rows(journal, "SELECT state, rollout_id, position, consumed_by FROM groups") == [("consumed", 4, 0, 4)]
    assert rows(journal, "SELECT state FROM rollouts") == [("consumed",)]
    assert journal.batch(4) is None
    assert rows(journal, "SELECT COUNT(*) FROM samples") == [(2,)]


def test_late_results_do_not_change_an_assigned_group(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    group = finished(journal, 0)
    late = copy.deepcopy(group[0])
    journal.assign(0, [group], {})
    late.reward = 99.0
    journal.produced(late, late)
    asyncio.run(journal.record_progress(late))
    journal.consumed(0)
    journal.drop([group])
    assert rows(journal, "SELECT reward FROM samples") == [(1.0,), (1.0,)]
    assert states(journal) == ["consumed"]
    with pytest.raises(ValueError, match="rollout 0 has been trained on"):
        journal.assign(0, [group], {})
    with pytest.raises(ValueError, match="rollout 7 was consumed, but no batch"):
        journal.consumed(7)


def test_samples_never_handed_out_are_recorded_with_their_batch(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    stray = finish(Sample(index=3))
    journal.produced(stray, stray)
    asyncio.run(journal.record_progress(stray))
    journal.drop([[stray]])
    assert rows(journal, "SELECT * FROM samples") == []
    journal.assign(0, [[stray]], {})
    assert journal.batch(0) == ([[stray]], {})
    journal.put_back([prompts(1)])
    assert states(journal) == ["assigned", "pending"]


def test_fan_out_replaces_its_sample_and_can_be_undone(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    group = prompts(0)
    journal.hand_out([group], None)
    snapshot = copy.deepcopy(group)
    first = group[0].journal_id
    leaves = [finish(copy.deepcopy(group[0]), reward) for reward in (0.1, 0.2, 0.3)]
    journal.produced(group[0], leaves)
    kept = rows(journal, "SELECT member, leaf, reward FROM samples ORDER BY member, leaf")
    assert kept == [(0, 0, 0.1), (0, 1, 0.2), (0, 2, 0.3), (1, None, None)]
    assert leaves[0].journal_id == first
    assert len({leaf.journal_id for leaf in leaves}) == 3
    ids = [leaf.journal_id for leaf in leaves]
    journal.produced(snapshot[0], leaves[:2])  # recorded again with one leaf fewer
    assert [leaf.journal_id for leaf in leaves[:2]] == ids[:2]
    assert rows(journal, "SELECT COUNT(*) FROM samples") == [(3,)]
    journal.put_back([snapshot])  # the prompts as dispatched
    assert rows(journal, "SELECT id, member, leaf, status FROM samples ORDER BY id") == [
        (sample.journal_id, place, None, "pending") for place, sample in enumerate(snapshot)
    ]
    assert states(journal) == ["pending"]


def test_batch_keeps_the_groups_as_the_rollout_function_returns_them(tmp_path: Path) -> None:
    """Covers omitted members, merged and split groups, duplicated and changed samples, and bare samples."""
    journal = open_journal(tmp_path)
    a, b, c, d = (finished(journal, number) for number in range(4))
    a[0].reward = 5.0
    twin = copy.deepcopy(d[1])
    batch = [[a[0]], [b[0], c[0]], [c[1]], d[0], [twin, d[1]]]
    journal.assign(0, batch, {"rollout/x": 0.1})
    assert journal.batch(0) == (batch, {"rollout/x": 0.1})
    assert len(rows(journal, "SELECT id FROM samples")) == 7  # without the second members of a and b
    assert set(states(journal)) == {"assigned"}
    again = [[b[0]]]
    journal.assign(0, again, {})
    assert journal.batch(0) == (again, {})
    assert sorted(states(journal)) == ["assigned", "dropped", "dropped", "dropped", "dropped"]


def test_consumed_samples_handed_out_again_get_new_ids(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    group = finished(journal, 0)
    journal.assign(0, [group], {})
    journal.consumed(0)
    again = copy.deepcopy(group)
    journal.hand_out([again], None)
    assert {sample.journal_id for sample in again}.isdisjoint(sample.journal_id for sample in group)
    journal.assign(1, [again], {})
    assert rows(journal, "SELECT rollout_id, state FROM groups ORDER BY id") == [(0, "consumed"), (1, "assigned")]


def test_ids_of_another_journal_are_ignored(tmp_path: Path) -> None:
    other = open_journal(tmp_path / "other")
    group = finished(other, 0)
    journal = open_journal(tmp_path / "this")
    mine = prompts(0)
    journal.hand_out([mine, group], None)
    assert {s.journal_id for s in mine}.isdisjoint(s.journal_id for s in group)
    assert rows(journal, "SELECT COUNT(*) FROM samples") == [(4,)]


def test_threads_share_one_journal(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)

    def work(first: int) -> None:
        for number in range(first, first + 20):
            journal.put_back([finished(journal, number)])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(0, 80, 20)))
    assert states(journal) == ["finished"] * 80
    assert sorted(rows(journal, "SELECT sample_index FROM samples")) == [(index,) for index in range(160)]
    whole = [
        group
        for group in journal.recover(0).groups
        if {sample.group_index for sample in group} == {group[0].group_index}
    ]
    assert len(whole) == 80


# file size


def run_rollouts(journal: Journal, count: int, tokens: int = 200) -> list[int]:
    sizes = []
    for rollout in range(count):
        groups = [prompts(8 * rollout + number, 4) for number in range(8)]
        journal.hand_out(groups, {"offset": 8 * (rollout + 1)})
        for sample in (sample for group in groups for sample in group):
            journal.produced(sample, finish(sample, tokens=tokens))
        journal.drop(groups[:2])
        journal.assign(rollout, groups[2:], {})
        journal.consumed(rollout)
        journal.checkpointed(rollout)
        sizes.append(sum(file.stat().st_size for file in journal.path.parent.iterdir()))
    return sizes


def test_pruning_bounds_the_file_size(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    sizes = run_rollouts(journal, 50)
    assert rows(journal, "SELECT COUNT(*) FROM samples") == [(0,)]
    assert rows(journal, "SELECT COUNT(*) FROM groups") == [(0,)]
    assert rows(journal, "SELECT value FROM meta WHERE key = 'horizon'") == [("50",)]
    assert max(sizes[5:]) <= 1.25 * max(sizes[:5])


def test_large_file_shrinks_after_pruning(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    rng = np.random.default_rng(0)
    noise = [Sample(index=number, metadata={"bytes": rng.bytes(1_000_000)}) for number in range(40)]
    journal.assign(0, [noise], {})
    journal.consumed(0)
    journal.checkpointed(0)
    journal.close()
    assert journal.path.stat().st_size < 15_000_000


def test_checkpoint_may_complete_after_later_rollouts_were_consumed(tmp_path: Path) -> None:
    """As with --async-save: a restart replays the rollouts after the checkpoint."""
    journal = open_journal(tmp_path)
    for rollout in range(3):
        journal.assign(rollout, [finished(journal, rollout)], {})
        journal.consumed(rollout)
    journal.checkpointed(0)
    assert rows(journal, "SELECT rollout_id, state FROM rollouts ORDER BY 1") == [(1, "consumed"), (2, "consumed")]
    assert journal.recover(1).batches == [1, 2]


def test_keep_disables_pruning(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, keep=True)
    run_rollouts(journal, 3)
    assert rows(journal, "SELECT state, COUNT(*) FROM trajectories GROUP BY state") == [
        ("consumed", 3 * 6 * 4),
        ("dropped", 3 * 2 * 4),
    ]
    assert rows(journal, "SELECT rollout_id, state FROM rollouts") == [(n, "consumed") for n in range(3)]


def test_recording_queries_scan_no_table(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    traced: list[str] = []
    with journal._database.reading() as connection:
        connection.set_trace_callback(traced.append)
    group = finished(journal, 0)
    journal.hand_out([group], None)
    asyncio.run(journal.record_progress(group[0]))
    journal.put_back([group])
    journal.assign(0, [group], {})
    journal.consumed(0)
    journal.batch(0)
    journal.drop([group])
    with journal._database.reading() as connection:
        connection.set_trace_callback(None)
        for query in {query for query in traced if query.lstrip().startswith(("SELECT", "UPDATE", "DELETE"))}:
            plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {query}")]
            assert not any(step.startswith("SCAN") for step in plan), (query, plan)


# files that are not the journal of this run


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.endswith("-shm")}


def assert_rejected(folder: Path, match: str, **identity: str) -> None:
    before = contents(folder)
    with pytest.raises(UserError, match=match):
        open_journal(folder, **identity)
    assert contents(folder) == before


@pytest.fixture
def written(tmp_path: Path) -> Path:
    journal = open_journal(tmp_path)
    for number in range(200):
        finished(journal, number)
    journal.close()
    assert [file.name for file in tmp_path.iterdir()] == ["journal.sqlite"]
    return tmp_path


def test_rejects_the_journal_of_another_run(written: Path) -> None:
    assert_rejected(
        written, r"another run, it differs in model \(tiny there, huge here\): choose another", model="huge"
    )
    assert_rejected(written, r"differs in seed \(none there, 5 here\)", seed="5")


def test_journal_of_another_run_without_samples_is_replaced(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    group = finished(journal, 0)
    journal.assign(0, [group], {})
    journal.consumed(0)
    journal.checkpointed(0)  # prunes the only group
    journal.close()
    other = open_journal(tmp_path, model="huge")
    assert other.recover(0).fresh
    other.close()
    open_journal(tmp_path, model="huge").close()


def test_rejects_another_runs_journal_with_a_write_ahead_log(tmp_path: Path) -> None:
    """A killed process leaves a journal with a write-ahead log."""
    journal = open_journal(tmp_path)
    finished(journal, 0)
    assert (tmp_path / "journal.sqlite-wal").stat().st_size
    assert_rejected(tmp_path, "differs in model", model="huge")
    killed = tmp_path / "killed"
    killed.mkdir()
    for name, content in [(f.name, f.read_bytes()) for f in tmp_path.glob("journal*") if "-shm" not in f.name]:
        (killed / name).write_bytes(content)
    assert_rejected(killed, "differs in model", model="huge")
    assert sorted(file.name for file in killed.iterdir()) == ["journal.sqlite", "journal.sqlite-wal"]
    again = open_journal(killed)
    assert len(again.recover(0).groups) == 1


def test_rejects_a_newer_format(written: Path) -> None:
    with sqlite3.connect(written / "journal.sqlite") as connection:
        connection.execute("PRAGMA user_version=5")
    connection.close()
    assert_rejected(written, "has format 5, but this version supports formats up to 4")


@pytest.mark.parametrize("content", [b"", b"no database", b"SQLite format 3\0" + b"\1" * 5000], ids=len)
def test_rejects_a_file_that_is_not_a_database(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "journal.sqlite").write_bytes(content)
    assert_rejected(tmp_path, "not a (readable )?journal")


def test_rejects_a_foreign_sqlite_database(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "journal.sqlite")
    connection.execute("CREATE TABLE identity (name, value)")
    connection.close()
    assert_rejected(tmp_path, "is an SQLite database, but not a journal of slime")


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.99])
def test_rejects_a_truncated_file(written: Path, share: float) -> None:
    path = written / "journal.sqlite"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    assert_rejected(written, "not a readable journal")


def test_run_identity_changes_with_data_model_and_sampling_flags(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"12345")
    data = tmp_path / "sums.jsonl"
    data.write_text('{"input": "1"}\n')
    config = Config(hf_checkpoint=str(model), prompt_data=f"{data}@[1:3]", rollout_batch_size=1)
    facts = run_identity(config)
    assert facts["prompt data"] == "sums.jsonl rows 1:3, 15 bytes"
    assert facts["model"].endswith(", 5 bytes of weights")
    moved = model.rename(tmp_path / "moved")
    assert run_identity(config.replace(hf_checkpoint=str(moved))) == facts

    def changed(**changes: Any) -> set[str]:
        other = run_identity(config.replace(hf_checkpoint=str(moved)).replace(**changes))
        return {name for name in facts if other[name] != facts[name]}

    assert changed(n_samples_per_prompt=9) == {"samples per prompt"}
    assert changed(rollout_seed=9) == {"rollout seed"}
    assert changed(prompt_data=str(data)) == {"prompt data"}
    assert changed(custom_generate_function_path="a.b") == {"generate function"}
    assert changed(output_dir="elsewhere", lr=1.0) == set()
    (moved / "model.safetensors").write_bytes(b"123456")
    assert changed() == {"model"}
    (moved / "tokenizer.json").write_text("{ }")
    assert changed() == {"model", "tokenizer"}


# a full disk

FILL = """
import sys
from pathlib import Path
from slime.errors import RunFailed
from tests.data.journal_samples import finished, open_journal
import numpy as np
from slime.data.sample import Sample

def fill(folder):
    journal = open_journal(folder)
    rng = np.random.default_rng(0)
    for number in range(10000):
        group = [Sample(index=number, group_index=number, metadata={"bytes": rng.bytes(20000)})]
        try:
            journal.hand_out([group], {"offset": number + 1})
        except RunFailed as failure:
            assert group[0].journal_id is None
            print(number)
            print(failure)
            return
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a small disk here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(program: str, folder: Path) -> tuple[int, str]:
    """Run a process that writes until a write fails; return its number of recorded groups and its error message."""
    done = subprocess.run(
        [sys.executable, "-c", f"{FILL}\n{program}\nfill(Path({str(folder)!r}))"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=True,
    )
    count, message = done.stdout.splitlines()
    return int(count), message


def test_full_disk_stops_the_run_and_keeps_recorded_groups(small_disk: Path) -> None:
    count, message = fill("", small_disk)
    assert count > 20
    assert "everything recorded so far is intact: make room on that disk" in message
    assert "full" in message
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    assert_intact(small_disk, count)


def test_file_size_limit_stops_the_run_and_keeps_recorded_groups(tmp_path: Path) -> None:
    soft, hard = 2_000_000, resource.RLIM_INFINITY
    count, message = fill(f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({soft}, {hard}))", tmp_path)
    assert count > 20
    assert "the journal cannot be written (disk I/O error); everything recorded so far is intact" in message
    assert_intact(tmp_path, count)


def assert_intact(folder: Path, count: int) -> None:
    journal = open_journal(folder)
    recovered = journal.recover(0)
    assert [group[0].index for group in recovered.groups] == list(range(count))
    assert recovered.position == {"offset": count}
    rng = np.random.default_rng(0)
    assert all(group[0].metadata == {"bytes": rng.bytes(20000)} for group in recovered.groups)
    assert rows(journal, "PRAGMA integrity_check") == [("ok",)]
    finished(journal, count)
    journal.close()


def test_a_failed_transaction_is_rolled_back(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    finished(journal, 0)
    with journal._database.reading() as connection:
        connection.execute("PRAGMA max_page_count=30")
    large = [Sample(index=1, metadata={"bytes": np.random.default_rng(0).bytes(500_000)})]
    with pytest.raises(RunFailed, match=r"journal.sqlite: the journal cannot be written \(database or disk is full\)"):
        journal.hand_out([prompts(1), large], {"offset": 2})
    assert states(journal) == ["finished"]
    journal.hand_out([prompts(1)], {"offset": 2})
    assert states(journal) == ["finished", "pending"]


def test_opening_an_existing_journal_writes_nothing(tmp_path: Path) -> None:
    open_journal(tmp_path).close()
    path = tmp_path / "journal.sqlite"
    before = path.read_bytes()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # another writer: a write at the start would wait for it
        open_journal(tmp_path).close()
        other.execute("ROLLBACK")
    assert path.read_bytes() == before
