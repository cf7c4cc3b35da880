"""A node with trainers disappears from under a run: the run goes on on another one, and nothing is done twice."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from ray.cluster_utils import Cluster

from tests.e2e.runs import TRAIN, TRAINER, records, started, wait_until
from tests.ray.conftest import STORE_BYTES
from tests.tiny_models import make_model_folder

ROLLOUTS, PROMPTS, SAMPLES = 4, 4, 2
GATED = """\
import os
import time


def token_sum(args, sample):
    if sample.index == 17:  # of the third rollout: two are trained on, and the first has a checkpoint
        open(os.path.join(args.output_dir, "reached"), "w").close()
        while not os.path.exists(os.path.join(args.output_dir, "go")):
            time.sleep(0.05)
    return sum(sample.tokens) % 7 / 7
"""


def raylets_with_trainers() -> set[int]:
    """The raylets below which trainers run."""
    found = set()
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if folder.name.isdigit() and TRAINER in (folder / "cmdline").read_text():
                variables = (folder / "environ").read_text().split("\0")
                found |= {int(v.partition("=")[2]) for v in variables if v.startswith("RAY_RAYLET_PID=")}
    return found


def test_a_run_whose_trainers_lose_their_node_goes_on_on_another(cluster: Cluster, tmp_path: Path) -> None:
    make_model_folder(tmp_path / "model")
    (tmp_path / "plugin.py").write_text(GATED)
    prompts = "".join(json.dumps({"input": f"what is {i}+{i}?"}) + "\n" for i in range(20))
    (tmp_path / "prompts.jsonl").write_text(prompts)
    cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)  # one of the two is left, as it was before
    command = [
        *TRAIN, "--hf-checkpoint", "model", "--prompt-data", "prompts.jsonl", "--custom-rm-path", "plugin.py:token_sum",
        "--num-rollout", str(ROLLOUTS), "--rollout-batch-size", str(PROMPTS), "--n-samples-per-prompt", str(SAMPLES),
        "--rollout-max-response-len", "8", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "2048",
        "--device", "cpu", "--dtype", "float32", "--save", "run", "--save-interval", "1",
        "--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "2", "--ray-address", cluster.address,
    ]  # fmt: skip
    with started(command, tmp_path) as life:
        reached = tmp_path / "run/reached"
        assert wait_until(lambda: reached.exists() or life.popen.poll() is not None, within_s=150)
        assert life.popen.poll() is None, life.finish().err
        below = raylets_with_trainers()
        nodes = [n for n in cluster.list_all_nodes() if n.all_processes["raylet"][0].process.pid in below]
        assert len(nodes) == 1
        cluster.remove_node(nodes[0], allow_graceful=False)
        (tmp_path / "run/go").touch()
        done = life.finish()
    assert done.code == 0, done.err
    assert "restart 1 of 3 without progress, from run: trainer-" in done.err
    assert "resuming from run at step 3" in done.out
    assert [record["step"] for record in records(tmp_path / "run", "rollout")] == list(range(ROLLOUTS))
    with closing(sqlite3.connect(tmp_path / "run/journal.sqlite")) as journal:
        consumed = journal.execute("SELECT consumed_by, COUNT(*) FROM groups GROUP BY 1 ORDER BY 1").fetchall()
    assert consumed == [(rollout_id, PROMPTS) for rollout_id in range(ROLLOUTS)]
