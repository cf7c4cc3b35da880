from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slime.config import Config
from slime.engine.http.client import EngineFailed
from slime.engine.http.pool import EnginePool
from slime.errors import RunFailed, UserError
from slime.weights import PublishResult, WeightPublisher, WeightVersionMismatch, choose_transport, make_publisher
from slime.weights.folder import FolderPublisher, VersionFolders, copy_model_assets
from slime.weights.ipc import SharedMemoryPublisher
from slime.weights.publisher import PublisherSettings
from slime.weights.transport import largest_export_bytes

BRACKETS = {
    "tensor": ["pause_generation", "update_weights_from_tensor", "continue_generation", "get_weight_version"],
    "disk": ["pause_generation", "update_weights_from_disk", "continue_generation", "get_weight_version"],
}


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "subfolder").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"old")
    (folder / "model.safetensors.index.json").write_text("{}")
    save_file({"w": torch.zeros(1000)}, folder / "model-00001-of-00001.safetensors")
    return folder


@pytest.fixture(params=["tensor", "disk"])
def publisher(
    request: pytest.FixtureRequest, tmp_path: Path, hf_folder: Path, engines: Any, source: Any, run_async: Any
) -> Any:
    clients = [engine.client for engine in engines]
    if request.param == "tensor":
        root = tmp_path / "shm"
        root.mkdir()
        made: WeightPublisher = in_memory(PublisherSettings(source, clients, run_async), root)
    else:
        settings = PublisherSettings(source, clients, run_async)
        made = FolderPublisher(settings, VersionFolders(tmp_path / "versions", hf_folder))
    yield request.param, made
    made.close()


def in_memory(settings: PublisherSettings, root: Path) -> FolderPublisher:
    """Return a publisher of weight files under `root`."""
    return FolderPublisher(settings, VersionFolders(root, root, in_memory=True), "tensors")


def files_left(tmp_path: Path) -> list[str]:
    roots = [tmp_path / "shm", tmp_path / "versions"]
    return sorted(
        str(path.relative_to(root)) for root in roots for path in root.rglob("*.safetensors") if path.is_file()
    )


def test_every_engine_receives_the_version_and_its_values(tmp_path: Path, publisher: Any, engines: Any) -> None:
    transport, made = publisher
    for version in (0, 1, 2):
        result = made.publish(version)
        for engine in engines:
            assert engine.version == str(version)
            assert set(engine.tensors) == {"layer.0.weight", "layer.1.weight"}
            for bucket in range(2):
                expected = torch.full((4, 8), float(version * 10 + bucket))
                assert torch.equal(engine.tensors[f"layer.{bucket}.weight"], expected)
            assert engine.calls == BRACKETS[transport]
            engine.calls.clear()
        assert result.version == version
        assert result.bytes > 2 * 4 * 8 * 4
        assert 0 < result.paused_seconds < result.seconds
        assert result.metrics()["perf/update_weights_time"] == result.seconds
    kept = [] if transport == "tensor" else [f"weight_v000002/model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert files_left(tmp_path) == kept


def test_update_goes_to_the_engines_present_at_its_start(
    tmp_path: Path, engines: Any, source: Any, run_async: Any
) -> None:
    pool = EnginePool([engines[0].client.base_url])
    (tmp_path / "shm").mkdir()
    made = in_memory(PublisherSettings(source, pool.roster, run_async), tmp_path / "shm")
    made.publish(1)
    assert [engine.version for engine in engines] == ["1", "default"]

    async def change() -> None:
        pool.add(engines[1].client.base_url)
        pool.leave(engines[0].client.base_url)

    run_async(change())
    made.publish(2)
    assert [engine.version for engine in engines] == ["1", "2"]
    made.close()
    run_async(pool.aclose())


def test_rejoining_engine_gets_files_instead_of_shared_memory(
    tmp_path: Path, engines: Any, source: Any, run_async: Any
) -> None:
    (tmp_path / "shm").mkdir()
    clients = [engine.client for engine in engines]
    settings = PublisherSettings(source, clients, run_async)
    files = in_memory(settings, tmp_path / "shm")
    made = SharedMemoryPublisher(settings, through_files=lambda: files, largest_bytes=1)
    assert made.bring(clients[1:], 4, base=3)
    assert [engine.version for engine in engines] == ["default", "4"]
    assert made.staged_in == files.staged_in
    made.close()


def test_version_mismatch_after_an_update_raises(publisher: Any, engines: Any) -> None:
    engines[1].stuck_version = "6"
    with pytest.raises(WeightVersionMismatch, match="version 6 after version 7") as caught:
        publisher[1].publish(7)
    assert caught.value.url == engines[1].client.base_url


def test_engines_continue_after_a_failed_update(tmp_path: Path, publisher: Any, engines: Any) -> None:
    transport, made = publisher
    made.publish(1)
    engines[0].calls.clear()
    engines[1].fail_on = BRACKETS[transport][1]
    with pytest.raises(EngineFailed, match="no luck"):
        made.publish(2)
    assert engines[0].calls == BRACKETS[transport][:3]
    assert engines[1].calls[-1] == "continue_generation"
    if transport == "disk":
        assert (tmp_path / "versions" / "weight_v000001" / "config.json").exists()
    engines[1].fail_on = None
    made.publish(3)
    assert [engine.version for engine in engines] == ["3", "3"]


def test_failed_export_leaves_no_files_and_calls_no_engine(
    tmp_path: Path, publisher: Any, engines: Any, source: Any
) -> None:
    source.fail = True
    with pytest.raises(RunFailed, match="cannot write version 1 of the weights: no space left"):
        publisher[1].publish(1)
    assert files_left(tmp_path) == []
    assert [engine.calls for engine in engines] == [[], []]


def test_model_assets_are_copied_without_old_weights(tmp_path: Path, hf_folder: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    copy_model_assets(hf_folder, target)
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "tokenizer.json"]


DELTA = {"update_weight_mode": "delta"}
ELSEWHERE = {"rollout_external_engine_addrs": ["127.0.0.1:30000", "10.0.0.7:30000"]}


@pytest.mark.parametrize(
    ("flags", "kind", "expected", "reason"),
    [
        ({}, "embedded", "tensor", "one machine, weights on cpu pass through files in shared memory"),
        ({}, "sglang", "tensor", "a model folder in shared memory"),
        ({"update_weight_transport": "nccl"}, "embedded", "nccl", "asked for"),
        ({"update_weight_transport": "disk"}, "embedded", "disk", "asked for"),
        ({"update_weight_transport": "tensor"}, "embedded", "tensor", "asked for"),
        ({"actor_num_nodes": 2}, "embedded", "tensor", "one machine"),
        (ELSEWHERE, "sglang", "nccl", r"other machines \(10.0.0.7:30000\)"),
        (DELTA, "embedded", "disk", r"changed bytes \(sparse\), each engine applies"),
        (DELTA, "sglang", "disk", "a model folder next to the engines"),
    ],
)
def test_choice_of_transport(flags: dict[str, Any], kind: Any, expected: str, reason: str) -> None:
    name, why = choose_transport(Config(hf_checkpoint="x", **flags), "cpu", kind)
    assert name == expected
    assert re.search(reason, why)


@pytest.mark.parametrize(
    ("flags", "kind", "device", "expected"),
    [
        ({}, "embedded", "cpu", ("nccl", "trainers and engines are on several nodes (n1, n2, n3 and 1 more)")),
        ({"colocate": True}, "sglang", "cuda", ("nccl", "trainers and engines are on several nodes (n1, n2, n3 and 1 more)")),
        ({"update_weight_transport": "nccl", "colocate": True}, "embedded", "cuda", ("nccl", "asked for")),
        ({"update_weight_transport": "disk"}, "sglang", "cuda", ("disk", "asked for")),
        ({"update_weight_transport": "tensor"}, "embedded", "cpu", "tensor passes weights through the memory of one machine, and n1"),
        (DELTA, "sglang", "cpu", "n1, n2, n3 and 1 more does not have the driver's: use --update-weight-mode full"),
        (DELTA | {"update_weight_local_checkpoint_dir": "/nfs"}, "sglang", "cpu",
            ("disk", "only changed bytes (sparse), they are applied to a model folder next to the engines, which load it")),
    ],
)  # fmt: skip
def test_choice_of_transport_over_several_nodes(flags: Any, kind: Any, device: str, expected: Any) -> None:
    config, nodes = Config(hf_checkpoint="x", **flags), ["n1", "n2", "n3", "n4"]
    if isinstance(expected, str):
        with pytest.raises(UserError, match=re.escape(expected)):
            choose_transport(config, device, kind, nodes=nodes)
    else:
        assert choose_transport(config, device, kind, nodes=nodes) == expected


@pytest.mark.parametrize(
    ("flags", "device", "sentence"),
    [
        (DELTA | {"update_weight_transport": "nccl"}, "cpu", "delta travels through files"),
        ({"update_weight_transport": "nccl", "colocate": True}, "cuda", "one GPU"),
        ({"custom_update_weight_post_write_path": "m.f"}, "cpu", "add --update-weight-transport disk"),
    ],
)
def test_contradictory_flags_are_rejected(flags: dict[str, Any], device: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        choose_transport(Config(hf_checkpoint="x", **flags), device)


@pytest.mark.parametrize(("mode", "flushes"), [("abort", True), ("in_place", False), ("retract", False)])
def test_cache_is_flushed_only_if_requests_are_aborted(publisher: Any, engines: Any, mode: Any, flushes: bool) -> None:
    made = publisher[1]
    made._settings = replace(made._settings, pause_mode=mode)
    made.publish(1)
    pause, update = engines[0].bodies[:2]
    assert pause == {"mode": mode}
    assert update["flush_cache"] is flushes


def test_sglang_version_is_read_from_model_info(publisher: Any, engines: Any) -> None:
    for engine in engines:
        engine.is_sglang = True
    assert publisher[1].publish(4).version == 4
    engines[0].stuck_version = "3"
    with pytest.raises(WeightVersionMismatch, match="version 3 after version 5"):
        publisher[1].publish(5)


def test_sglang_loads_a_model_folder_in_shared_memory(
    tmp_path: Path, hf_folder: Path, engines: Any, source: Any, run_async: Any
) -> None:
    clients = [engine.client for engine in engines]
    folders = VersionFolders(tmp_path, hf_folder, in_memory=True)
    made = FolderPublisher(PublisherSettings(source, clients, run_async), folders)
    made.publish(3)
    assert engines[1].calls == BRACKETS["disk"]
    assert torch.equal(engines[1].tensors["layer.1.weight"], torch.full((4, 8), 31.0))
    assert [path.name for path in made.staged_in.iterdir()] == ["owner.lock"]
    made.close()


HOOK = """
def on_written(args, version_dir, rollout_engines):
    with open(args.hf_checkpoint + "/seen", "a") as log:
        log.write(f"{version_dir} {len(rollout_engines)}\\n")
"""


def test_post_write_hook_receives_each_complete_version(
    tmp_path: Path, hf_folder: Path, engines: Any, source: Any, run_async: Any
) -> None:
    (tmp_path / "hook.py").write_text(HOOK)
    config = Config(
        hf_checkpoint=str(hf_folder),
        update_weight_transport="disk",
        update_weight_disk_dir=str(tmp_path / "versions"),
        update_weight_disk_keep_files=True,
        custom_update_weight_post_write_path=f"{tmp_path}/hook.py:on_written",
    )
    clients = [engine.client for engine in engines]
    made = make_publisher(config, device="cpu", run_dir=tmp_path, source=source, clients=clients, run_async=run_async)
    made.publish(1)
    made.publish(2)
    folders = [tmp_path / "versions" / f"weight_v{version:06d}" for version in (1, 2)]
    assert (hf_folder / "seen").read_text().splitlines() == [f"{folder} 2" for folder in folders]
    assert all((folder / "config.json").exists() for folder in folders)


def test_density_is_logged_only_for_deltas() -> None:
    whole = PublishResult(1, 2.0, 0.5, 100, 1.5).metrics()
    assert whole == {
        "perf/update_weights_time": 2.0,
        "perf/update_weights_paused_time": 0.5,
        "perf/update_weights_write_time": 1.5,
        "perf/update_weights_wire_bytes": 100,
    }
    delta = PublishResult(1, 2.0, 0.5, 100, 1.5, 0.01, 2).metrics()
    assert delta.items() > whole.items()
    assert delta["perf/update_weights_density"] == 0.01
    assert delta["perf/update_weights_full_fallbacks"] == 2


@pytest.mark.parametrize("transport", ["auto", "disk"])
def test_make_publisher_follows_the_transport_flag(
    tmp_path: Path, hf_folder: Path, engines: Any, source: Any, run_async: Any, transport: str
) -> None:
    config = Config(hf_checkpoint=str(hf_folder), update_weight_transport=transport)
    clients = [engine.client for engine in engines]
    made = make_publisher(config, device="cpu", run_dir=tmp_path, source=source, clients=clients, run_async=run_async)
    assert made.publish(5).version == 5
    assert engines[0].calls == BRACKETS["tensor" if transport == "auto" else "disk"]
    assert (tmp_path / "weights" / "weight_v000005").exists() == (transport == "disk")
    made.close()
    made.close()


def test_largest_export_bytes_is_estimated_from_the_checkpoint(hf_folder: Path) -> None:
    assert largest_export_bytes(hf_folder) >= 2 * 4000
