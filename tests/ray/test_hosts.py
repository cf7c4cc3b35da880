"""A run over hosts without shared files: the model, the user functions and slime are sent to the hosts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.runs import TRAIN, records, run
from tests.ray.hosts import PORT, ray_hosts, why_impossible
from tests.ray.test_whole_run import flags, place

__all__ = ["place"]
LOSS = """\
from slime.backends.megatron_utils.loss import policy_loss_function


def own_loss(args, batch, logits, sum_of_sample_mean):
    return policy_loss_function(args, batch, logits, sum_of_sample_mean)
"""


@pytest.mark.timeout(2700)
def test_hosts_without_shared_files_receive_model_and_code(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = why_impossible()
    if why is not None:
        pytest.skip(f"NOT TESTED HERE: hosts without a common network or file system: {why}")
    monkeypatch.chdir(place)
    (place / "losses.py").write_text(LOSS)
    with ray_hosts([0, 2, 1, 1], tmp_path) as hosts:
        head = hosts[0]
        code = f"import ray; ray.init('{head.address}:{PORT}', log_to_driver=False); print(len(ray.nodes()))"
        assert run(head.command([TRAIN[0], "-c", code]), place).out.strip() == "4"
        words = flags(place)
        own = ["--loss-type", "custom_loss", "--custom-loss-function-path", "losses.own_loss", "--num-rollout", "2"]
        address = f"{head.address}:{PORT}"
        done = run(head.command([*TRAIN, *words, *own, "--ray-address", address, "--output-dir", "far"]), place)
        assert done.code == 0, done.err + done.out
        log = (place / "far" / "logs" / "driver.log").read_text()
        assert log.count("has no slime or a different one: sending this one") == 3
        assert log.count(f"{place / 'model'} as /tmp/slime-node-cache/model-") == 3
        assert [record["rollout_id"] for record in records(place / "far", "train")] == [0, 1]
        refused = run(
            head.command([*TRAIN, *words, "--save", "saved", "--ray-address", address, "--output-dir", "no"]), place
        )
        assert refused.code == 2
        assert "--save saved is not the same folder on the node host-2, whose trainers write there" in refused.err
    assert os.path.exists(place / "far")
