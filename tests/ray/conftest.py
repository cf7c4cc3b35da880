"""A Ray cluster of four nodes on this machine: one for the driver, one for two trainers, two for one engine each."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from ray.cluster_utils import Cluster

STORE_BYTES = 80 * 2**20
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_metrics_collection": "0", "RAY_DEDUP_LOGS": "0"}


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    os.environ.update(QUIET)
    os.environ["SLIME_NODE_CACHE"] = str(tmp_path_factory.mktemp("node-cache"))
    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
        cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()
