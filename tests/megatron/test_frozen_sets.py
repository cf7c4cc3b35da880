"""Frozen weight sets sharded by Megatron give the same scores as with FSDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from slime.config import Config
from slime.config.initial_weights import InitialWeights
from slime.train.backend import Rates
from slime.train.samples.batch import flatten_samples, make_train_batch
from slime.train.samples.micro_batch import LossOutcome, MicroBatch, StepShare, make_micro_batch
from slime.train.timers import RankProgress
from slime.train.topology import Ranks
from slime.train.trainer import make_builder
from tests.megatron.ranks import RankGroup
from tests.train.in_process import config_for, one_rank
from tests.train.tiny_training import make_samples

Folder = Callable[[str], Path]
SETS = ("teacher", "kept", "first", "second", "policy")


def push(micro: MicroBatch, log_probs: Tensor, entropy: Tensor) -> LossOutcome:
    """Loss that raises the log-probs of the samples and the entropy."""
    return LossOutcome(-(log_probs * micro.mask).mean() - 0.1 * entropy.mean())


def score_sets(ranks: Ranks, config: Config, teacher: Path) -> dict[str, list[list[float]]]:
    """Log-probs and entropies under a teacher of another shape, an average, two host snapshots, and the policy."""
    builder = make_builder(config, ranks, compute_dtype=torch.float32, progress=RankProgress())
    backend = builder.policy(config, InitialWeights())
    batch = make_train_batch(config, flatten_samples(make_samples(2, 3, seed=1)))
    multiple = builder.topology.context.size
    positions = ([0, 1], [2, 3, 4], [5])
    micros = [make_micro_batch(batch, p, StepShare(6), 6, torch.device("cpu"), multiple=multiple) for p in positions]

    def update() -> None:
        backend.forward_backward(micros, push, entropy=True)
        backend.clip_gradients()
        backend.update(Rates(0.3, 0.0))  # proportional to the gradient, because adam_eps is 1

    backend.frozen.load("teacher", InitialWeights(hf_folder=teacher, flag="--opd-teacher-load"))
    backend.frozen.snapshot("kept")
    backend.frozen.snapshot("first", on_host=True)
    update()
    backend.frozen.snapshot("kept", decay=0.25)
    backend.frozen.snapshot("second", on_host=True)
    backend.frozen.snapshot("dropped", on_host=True)
    backend.frozen.forget("dropped")
    update()
    assert [name in backend.frozen for name in (*SETS[:4], "dropped")] == [True] * 4 + [False]
    found: dict[str, list[list[float]]] = {}
    for name in SETS:
        scores = backend.forward(micros, weights=name, entropy=True)
        assert all(score.entropy is not None for score in scores)
        found[name] = [torch.stack([score.values, score.entropy]).tolist() for score in scores]  # type: ignore[list-item]
    return found


def score_by_megatron(folder: Path, teacher: Path, out: Path, flags: dict[str, Any]) -> dict[str, list[list[float]]]:
    from megatron.core import parallel_state

    assert dist.group.WORLD is not None
    ranks = Ranks.of(dist.group.WORLD, torch.device("cpu"))
    config = config_for(
        folder, out, train_backend="megatron", actor_num_gpus_per_node=ranks.size, adam_eps=1.0, **flags
    )
    try:
        return score_sets(ranks, config, teacher)
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        (2, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}),
        (2, {"context_parallel_size": 2}),
    ],
    ids=str,
)
def test_weight_sets_give_the_same_scores_as_fsdp(
    processes: int, flags: dict[str, Any], ranks: Callable[[int], RankGroup], model_folder: Folder, tmp_path: Path
) -> None:
    folder, teacher = model_folder("qwen3"), model_folder("llama")
    expected = score_sets(one_rank(), config_for(folder, tmp_path, adam_eps=1.0), teacher)
    for found in ranks(processes).run(score_by_megatron, folder, teacher, tmp_path, flags):
        for name in SETS:
            for scores, wanted in zip(found[name], expected[name], strict=True):
                torch.testing.assert_close(torch.tensor(scores), torch.tensor(wanted), rtol=0, atol=2e-5)
    distinct = [torch.tensor(expected[name][0]) for name in SETS]
    assert all(not torch.allclose(one, other, atol=1e-3) for i, one in enumerate(distinct) for other in distinct[:i])
