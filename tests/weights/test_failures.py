"""Failed updates: an engine has the old weights, the new weights, or refuses to generate."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.cluster.ports import free_port
from slime.config import Config, derive
from slime.engine.fleet.processes import EngineFleet
from slime.engine.http.client import EngineClient, EngineFailed, EngineRejected
from slime.errors import RunFailed
from slime.models.delta.folder import INDEX_NAME, safetensors_entries
from slime.train.processes import TrainerDied
from slime.train.trainer_group import TrainerGroup
from slime.weights import make_publisher
from slime.weights.delta import DeltaPublisher
from slime.weights.folder import VersionFolders
from slime.weights.publisher import PublisherSettings
from slime.weights.transport import WeightsDiffer, check_checksums
from tests.tiny_models import make_model_folder
from tests.weights.conftest import Loop
from tests.weights.model_source import ModelSource
from tests.weights.real import checksums, log_probs

PROMPT = [5, 9, 3, 17, 4, 11]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "qwen3", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[EngineFleet]:
    config = Config(hf_checkpoint=str(folder), rollout_num_gpus=2, engine_max_total_tokens=1024, dtype="bfloat16")
    with EngineFleet(config, device="cpu", run_dir=tmp_path_factory.mktemp("run"), model_path=folder) as fleet:
        yield fleet


@pytest.fixture
def clients(fleet: EngineFleet, run_async: Loop) -> Iterator[list[EngineClient]]:
    made = [EngineClient(url, api_key=fleet.key) for url in fleet.urls]
    yield made
    for client in made:
        run_async(client.aclose())


@pytest.fixture
def source(folder: Path) -> ModelSource:
    return ModelSource(folder, torch.bfloat16)


def make_delta_publisher(
    source: ModelSource, clients: list[EngineClient], run_async: Loop, folder: Path, root: Path, **more: Any
) -> DeltaPublisher:
    settings, folders = PublisherSettings(source, clients, run_async), VersionFolders(root, folder, **more)
    return DeltaPublisher(settings, folders, encoding=source.encoding, checksum=source.checksum)


def assert_equal(source: ModelSource, clients: list[EngineClient], run_async: Loop, version: int) -> None:
    expected = source.weight_checksums()
    for client in clients:
        found = checksums(client, run_async)
        assert {name: found[name] for name in expected} == expected
        assert log_probs(client, run_async, PROMPT)[1] == str(version)


def test_joining_engine_gets_whole_weights_and_then_deltas(
    tmp_path: Path, folder: Path, source: ModelSource, clients: list[EngineClient], run_async: Loop
) -> None:
    there = clients[:1]
    publisher = make_delta_publisher(source, there, run_async, folder, tmp_path / "versions")
    publisher.publish(1)
    source.step(1)
    publisher.publish(2)
    assert publisher.bring(clients[1:], 2)
    there.append(clients[1])
    source.step(2)
    publisher.publish(3)
    assert source.exports == ["whole 1", "delta 2", "whole 2", "delta 3"]
    assert_equal(source, clients, run_async, 3)
    source.step(3)
    there.pop()
    publisher.publish(4)
    assert publisher.bring(clients[1:], 4, base=3)  # it missed one update: the delta is reused
    assert source.exports[4:] == ["delta 4"]
    assert publisher.bring(clients[1:], 4, base=2)  # it missed too many updates for the delta
    there.append(clients[1])
    assert_equal(source, clients, run_async, 4)
    source.step(4)
    assert publisher.bring(clients[1:], 5)  # the other engine has version 4, the trainers keep version 5
    publisher.publish(5)
    assert source.exports[4:] == ["delta 4", "whole 4", "whole 5", "whole 5"]
    assert_equal(source, clients, run_async, 5)


# damaged deltas


def break_blob(folder: Path) -> None:
    """Flip one byte of one blob: it may decompress, but not to the right bytes."""
    path = next(folder.glob("*.safetensors"))
    entry = safetensors_entries(path)[-1]
    data = bytearray(path.read_bytes())
    data[(entry.start + entry.end) // 2] ^= 0xFF
    path.write_bytes(data)


def break_checksum(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    entry = safetensors_entries(path)[-1]
    assert entry.checksum is not None
    path.write_bytes(path.read_bytes().replace(entry.checksum.encode(), b"0" * len(entry.checksum)))


def lose_file(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()


def change_base(folder: Path) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    index["metadata"]["base_version"] = "000007"
    (folder / INDEX_NAME).write_text(json.dumps(index))


def damage(how: Callable[[Path], None]) -> Callable[[Path], None]:
    """Return a post-write hook that applies `how` to deltas."""

    def on_written(folder: Path) -> None:
        if "delta_encoding" in (folder / INDEX_NAME).read_text():
            how(folder)

    return on_written


@pytest.mark.parametrize("how", [break_blob, break_checksum, lose_file, change_base], ids=lambda how: how.__name__)
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_rejected_delta_falls_back_to_whole_weights(
    tmp_path: Path,
    folder: Path,
    clients: list[EngineClient],
    run_async: Loop,
    how: Callable[[Path], None],
    encoding: str,
) -> None:
    source = ModelSource(folder, torch.bfloat16, encoding=encoding)
    publisher = make_delta_publisher(source, clients, run_async, folder, tmp_path, on_written=damage(how))
    publisher.publish(1)
    source.step(1)
    result = publisher.publish(2)
    assert (result.version, result.full_fallbacks) == (2, 2)
    assert source.exports == ["whole 1", "delta 2", "whole 2"]
    assert_equal(source, clients, run_async, 2)


def test_only_the_engine_that_missed_a_version_gets_whole_weights(
    tmp_path: Path, folder: Path, clients: list[EngineClient], run_async: Loop, source: ModelSource
) -> None:
    publisher = make_delta_publisher(source, clients, run_async, folder, tmp_path)
    publisher.publish(1)
    run_async(clients[1].update_weights_from_disk(folder, "default"))  # simulates a restart
    source.step(1)
    result = publisher.publish(2)
    assert result.full_fallbacks == 1
    assert_equal(source, clients, run_async, 2)
    source.step(2)
    assert publisher.publish(3).full_fallbacks == 0
    assert source.exports == ["whole 1", "delta 2", "whole 2", "delta 3"]
    assert_equal(source, clients, run_async, 3)


def test_rejected_delta_leaves_the_old_bytes(
    tmp_path: Path, folder: Path, clients: list[EngineClient], run_async: Loop, source: ModelSource
) -> None:
    """The engine rejects a damaged delta without a publisher that falls back to whole weights."""
    publisher = make_delta_publisher(source, clients[:1], run_async, folder, tmp_path, keep_files=True)
    publisher.publish(1)
    before = checksums(clients[0], run_async)
    source.step(1)
    staged = publisher._stage(2, whole=False)
    assert staged.folder is not None
    break_checksum(staged.folder)
    with pytest.raises(EngineRejected, match="has checksum") as refused:
        run_async(clients[0].update_weights_from_disk(staged.folder, 2))
    assert refused.value.status == 400
    assert checksums(clients[0], run_async) == before
    assert run_async(clients[0].get_weight_version()) == "1"
    with pytest.raises(EngineFailed, match=r"the weights are stale .*publish whole weights"):
        log_probs(clients[0], run_async, PROMPT)
    with pytest.raises(EngineRejected, match="needs whole weights") as conflict:
        run_async(clients[0].update_weights_from_disk(staged.folder, 2))
    assert conflict.value.status == 409
    run_async(clients[0].update_weights_from_disk(tmp_path / "weight_v000001", 1))
    assert log_probs(clients[0], run_async, PROMPT)[1] == "1"


# a full disk


@pytest.mark.parametrize("mode", ["whole", "delta"])
def test_full_disk_raises_and_engines_keep_their_weights(
    tmp_path: Path,
    folder: Path,
    clients: list[EngineClient],
    run_async: Loop,
    source: ModelSource,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    publisher = make_delta_publisher(source, clients, run_async, folder, tmp_path)
    publisher.publish(1)
    before = checksums(clients[0], run_async)
    source.step(1)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    module = "slime.train.weight_export.files" if mode == "whole" else "slime.models.delta.folder"
    if mode == "whole":
        publisher._base = None
    with monkeypatch.context() as patched:
        patched.setattr(f"{module}.save_file", full)
        with pytest.raises(RunFailed, match=r"cannot write version 2 .*GiB free there.*No space left on device"):
            publisher.publish(2)
    assert checksums(clients[0], run_async) == before
    assert log_probs(clients[0], run_async, PROMPT)[1] == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["weight_v000001"]
    publisher.publish(3)
    assert source.exports[-1] == "whole 3"
    assert_equal(source, clients, run_async, 3)


# a dying trainer


class DyingTrainers(TrainerGroup):
    """Kills rank 0 at the start of the call `fatal`, once that is set."""

    fatal = ""

    def call(self, verb: str, **params: object) -> list[Any]:
        if verb == self.fatal:
            for pid in self.processes.ranks[0].process.pids():
                with contextlib.suppress(ProcessLookupError):  # a process ends those below it when it is killed
                    os.kill(pid, signal.SIGKILL)
        return super().call(verb, **params)


@pytest.mark.parametrize(
    ("flags", "fatal"),
    [
        ({"update_weight_transport": "nccl"}, "broadcast_weights"),
        ({"update_weight_transport": "tensor"}, "export_weights"),
        ({"update_weight_mode": "delta"}, "export_delta"),
    ],
    ids=["broadcast", "tensor", "delta"],
)
def test_engines_keep_their_weights_when_a_trainer_dies(
    tmp_path: Path, folder: Path, clients: list[EngineClient], run_async: Loop, flags: dict[str, Any], fatal: str
) -> None:
    required = {"rollout_batch_size": 1, "num_rollout": 1, "dtype": "bfloat16", "distributed_timeout_minutes": 4}
    config = derive(Config(hf_checkpoint=str(folder), **required, **flags))
    with DyingTrainers(config, device="cpu", run_dir=tmp_path) as trainers:
        trainers.start()
        publisher = make_publisher(
            config, device="cpu", run_dir=tmp_path, source=trainers, clients=clients, run_async=run_async
        )
        publisher.publish(1)
        before = [checksums(client, run_async) for client in clients]
        trainers.fatal = fatal
        with pytest.raises(TrainerDied, match=f"trainer-0 ended during {fatal}"):
            publisher.publish(2)
        assert [checksums(client, run_async) for client in clients] == before
        assert [log_probs(client, run_async, PROMPT)[1] for client in clients] == ["1", "1"]
        publisher.close()


SENDER = """
import os, signal, sys
import torch, torch.distributed as dist
from slime.cluster.process_group import join_process_group
group = join_process_group(
    address="127.0.0.1", port=int(sys.argv[1]), rank=0, world_size=2, name="half", backend="gloo", timeout_s=240)
dist.broadcast(torch.full((64,), 0.5, dtype=torch.bfloat16), src=0, group=group)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_engine_with_missing_buckets_does_not_generate(
    tmp_path: Path, folder: Path, clients: list[EngineClient], run_async: Loop, source: ModelSource
) -> None:
    make_delta_publisher(source, clients, run_async, folder, tmp_path).publish(1)
    client, port = clients[0], free_port()
    announced = [{"name": "model.norm.weight", "dtype": "bfloat16", "shape": [64]}]
    sender = subprocess.Popen([sys.executable, "-c", SENDER, str(port)], stdin=subprocess.PIPE, text=True)
    meeting = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    run_async(client.init_weights_update_group(**meeting, group_name="half", backend="gloo"))
    run_async(client.pause())
    run_async(client.update_weights_from_distributed(announced, 2, group_name="half", bucket=(1, 2)))
    assert run_async(client.get_weight_version()) == "1"
    sender.communicate("die\n")
    assert sender.returncode == -signal.SIGKILL
    with pytest.raises(EngineFailed, match="bucket 2 of 2 did not arrive"):
        run_async(client.update_weights_from_distributed(announced, 2, group_name="half", bucket=(2, 2)))
    run_async(client.continue_())
    with pytest.raises(EngineFailed, match="only 1 of 2 buckets of version 2 arrived"):
        log_probs(client, run_async, PROMPT)
    run_async(client.destroy_weights_update_group("half"))
    run_async(client.update_weights_from_disk(tmp_path / "weight_v000001", 1))
    assert_equal(source, clients, run_async, 1)


@pytest.mark.parametrize(
    ("announced", "reason"),
    [
        ({"name": "model.norm.weight", "dtype": "bfloat16", "shape": [65]}, r"shape \(65,\)"),
        ({"name": "lm_tail.weight", "dtype": "bfloat16", "shape": [64]}, "does not have"),
        ({"name": "model.norm.weight", "dtype": "float7", "shape": [64]}, "float7"),
        ({"name": "model.norm.weight", "dtype": "bfloat16", "shape": [64]}, "not in a group 'nobody'"),
    ],
)
def test_invalid_bucket_announcement_is_rejected(
    clients: list[EngineClient], run_async: Loop, announced: dict[str, Any], reason: str
) -> None:
    with pytest.raises(EngineRejected, match=reason):
        run_async(clients[0].update_weights_from_distributed([announced], 9, group_name="nobody"))


# checksum check


def test_checksum_check_finds_a_changed_tensor(
    tmp_path: Path, folder: Path, clients: list[EngineClient], run_async: Loop, source: ModelSource
) -> None:
    make_delta_publisher(source, clients, run_async, folder, tmp_path).publish(1)
    settings = PublisherSettings(source, clients, run_async, timeout_s=240)
    check_checksums(settings, 1)
    with torch.no_grad():
        source.model.model.norm.weight[3] += 1
    with pytest.raises(WeightsDiffer, match=r"in 1 of 24 tensors after version 1: model\.norm\.weight"):
        check_checksums(settings, 1)
