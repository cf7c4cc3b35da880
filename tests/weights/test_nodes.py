"""Weight updates from trainers on one node to engines with an API key on other nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slime.cluster.local import LocalCluster
from slime.cluster.node import Node, Slot, SlotPlacement
from slime.config import Config, derive
from slime.engine.fleet.processes import EngineFleet
from slime.engine.http.client import EngineClient
from slime.errors import UserError
from slime.train.trainer_group import TrainerGroup
from slime.weights import make_publisher
from slime.weights.broadcast import BroadcastPublisher, local_store_address
from slime.weights.transport import check_weights_folder
from tests.cluster.nodes import FarNode
from tests.other_node import OtherNode, listening
from tests.tiny_models import make_model_folder
from tests.train.tiny_training import make_samples, weight_checksums
from tests.weights.conftest import Loop
from tests.weights.real import checksums

KEY = "sesame"


class PortCountingNode(OtherNode):
    """A node that counts the ports it hands out."""

    given = 0

    def free_ports(self, count: int) -> list[int]:
        self.given += count
        return super().free_ports(count)


class PartlySharedCluster(LocalCluster):
    """A cluster whose node n2 does not share the folder `hidden`."""

    hidden = ""

    def nodes_without(self, folder: str, nodes: Sequence[Node] | None = None) -> list[str]:
        return ["n2"] if folder == self.hidden else []


@pytest.mark.parametrize("flags", [{"update_weight_transport": "disk"}, {"update_weight_mode": "delta"}])
def test_disk_versions_need_a_folder_shared_by_all_nodes(tmp_path: Path, flags: dict[str, Any]) -> None:
    config = Config(hf_checkpoint="unused", rollout_num_gpus=1)
    cluster = PartlySharedCluster(config, device="cpu")
    cluster.hidden = str(tmp_path / "weights")
    with pytest.raises(UserError, match=r"weights, which is not the same on the node n2: .*--update-weight-disk-dir"):
        check_weights_folder(config.replace(**flags), cluster, tmp_path)
    check_weights_folder(config.replace(**flags, update_weight_disk_dir=str(tmp_path)), cluster, tmp_path)
    check_weights_folder(config, cluster, tmp_path)


@pytest.mark.parametrize("first", [0, 1])
def test_rendezvous_address_is_reachable_by_local_and_remote_engines(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    here, elsewhere = "http://127.0.0.1:9", "http://192.0.2.7:9"
    seen = {here: "127.0.0.1", elsewhere: "192.0.2.1"}
    monkeypatch.setattr("slime.weights.broadcast.own_address", seen.__getitem__)
    monkeypatch.setattr("slime.weights.broadcast.free_port", lambda host: 5)
    urls = [here, elsewhere] if first == 0 else [elsewhere, here]
    assert local_store_address(urls) == ("192.0.2.1", 5)
    assert local_store_address([here]) == ("127.0.0.1", 5)


def test_weights_are_broadcast_from_one_node_to_others(tmp_path: Path, run_async: Loop) -> None:
    folder = make_model_folder(tmp_path / "model")
    batch = {"rollout_batch_size": 3, "n_samples_per_prompt": 3, "global_batch_size": 9, "num_rollout": 1}
    config = derive(Config(hf_checkpoint=str(folder), rollout_num_gpus=2, distributed_timeout_minutes=2, **batch))
    with listening() as listener:
        far = [FarNode("127.0.0.2"), FarNode("127.0.0.3")]
        near = PortCountingNode("trainers", listener)
        placement = SlotPlacement((Slot(near),), tuple(Slot(node) for node in far))
        fleet = EngineFleet(config, device="cpu", run_dir=tmp_path, model_path=folder, slots=placement.rollout, key=KEY)
        with fleet, TrainerGroup(config, device="cpu", run_dir=tmp_path, placement=placement) as trainers:
            trainers.start()
            clients = [EngineClient(url, api_key=KEY) for url in fleet.urls]
            publisher = make_publisher(
                config, device="cpu", run_dir=tmp_path, source=trainers, clients=clients, run_async=run_async,
                placement=placement,
            )  # fmt: skip
            assert isinstance(publisher, BroadcastPublisher)
            before = near.given
            publisher.publish(0)
            assert near.given == before + 1  # the rendezvous port is on the trainers' node
            trainers.train(0, make_samples(3, 3, seed=1))
            publisher.publish(1)
            expected = weight_checksums(trainers)
            for client in clients:
                found = checksums(client, run_async)
                assert {name: found.get(name) for name in expected} == expected
                run_async(client.aclose())
            publisher.close()
