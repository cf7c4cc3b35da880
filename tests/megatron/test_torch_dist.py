"""Converted torch_dist checkpoints load in Megatron's stock model, and what it saves converts back."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime.driver.convert import Conversion
from slime.models.safetensors_io import open_weights
from tests.megatron.ranks import RankGroup, model_parallel

TP, PP, EP = (
    {"tensor_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2},
    {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
)


def load_and_save_with_megatron(release: Path, target: Path, folder: Path, sizes: dict[str, int]) -> None:
    """Load a checkpoint into Megatron's stock model, sharded by `sizes`, and save it again."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies import common, filesystem_async  # noqa: F401 (to be prepared)
    from megatron.core.dist_checkpointing.strategies import torch as strategies  # noqa: F401
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from slime.config import Config
    from slime.models.families.family import family_of
    from slime.models.folder import read_text_config
    from slime.train.backends.megatron.config import transformer_config
    from slime.train.backends.megatron.layout import Layout

    facts = read_text_config(folder)
    fields = {**family_of(facts).fields(facts), "moe_grouped_gemm": False}
    with model_parallel(**sizes):
        layout = Layout(
            dist.get_world_size(),
            tensor=sizes.get("tensor_model_parallel_size", 1),
            pipeline=sizes.get("pipeline_model_parallel_size", 1),
            expert=sizes.get("expert_model_parallel_size", 1),
        )
        config = transformer_config(fields, Config(), layout, compute_dtype=torch.float32, device=torch.device("cpu"))
        spec = get_gpt_layer_local_spec(
            num_experts=fields.get("num_moe_experts"), qk_layernorm=fields["qk_layernorm"], normalization="RMSNorm"
        )
        if "num_moe_experts" in fields:  # names as in Transformer Engine's spec
            del spec.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
        model = GPTModel(
            config,
            spec,
            vocab_size=-(-fields["vocab_size"] // (128 * layout.tensor)) * 128 * layout.tensor,
            max_sequence_length=64,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=fields["share_embeddings_and_output_weights"],
            position_embedding_type="rope",
        )
        found: dict[str, Any] = dist_checkpointing.load(model.sharded_state_dict(), str(release))
        tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        lacking = model.load_state_dict(tensors, strict=False).missing_keys
        assert not [name for name in lacking if not name.endswith("_extra_state")]
        with allow_child_processes():
            dist_checkpointing.save(model.sharded_state_dict(), str(target))


@contextmanager
def allow_child_processes() -> Iterator[None]:
    """Allow Megatron's writer to start processes from a daemonic process; end the one that it keeps."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    config = vars(multiprocessing.current_process())["_config"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(config, "daemon", False)
        yield
    filesystem_async._results_queue = None  # drops the last reference, so its process exits
    gc.collect()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(("kind", "sizes"), [("qwen3", TP), ("qwen3", PP), ("qwen3_moe", EP)])
def test_megatron_loads_converted_weights_and_its_save_converts_back(
    kind: str,
    sizes: dict[str, int],
    model_folder: Callable[[str], Path],
    ranks: Callable[[int], RankGroup],
    tmp_path: Path,
) -> None:
    model, saved = model_folder(kind), tmp_path / "saved"
    release = Conversion(model, tmp_path / "release", "float32", format="torch_dist").run()
    saved.mkdir()
    ranks(2).run(load_and_save_with_megatron, release / "release", saved, model, sizes)
    back = open_weights(Conversion(saved, tmp_path / "back", "float32", model).run())
    before = open_weights(model)
    assert back.names == before.names
    assert all(torch.equal(back[name], before[name]) for name in before.names)
