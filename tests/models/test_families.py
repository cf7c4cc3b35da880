"""Weight rules of every family: they cover each tensor of a folder exactly once, and round trips are exact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from slime.errors import UserError
from slime.models.families.family import FAMILIES, family_of
from slime.models.families.tp_sharding import (
    ColumnParallel,
    DeltaInput,
    GateUp,
    GroupedDeltaInput,
    InterleavedGateUp,
    Qkv,
    Replicated,
    RowParallel,
    SourceRegion,
    Vocab,
)
from slime.models.families.weight_map import (
    ParameterEntry,
    entries_by_name,
    rules_for_folder,
    with_vocab_divisor,
)
from slime.models.parsers.formats import REASONING_PARSERS, TOOL_CALL_PARSERS
from slime.models.safetensors_io import stored_tensors
from slime.models.tensor_sources import read_whole
from tests.family_models import BASE, FAMILY_MODELS, RENAMED, WINDOWED_MODELS, family_config, make_family_folder


@pytest.fixture(scope="module", params=FAMILY_MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family_folder(tmp_path_factory.mktemp(request.param), request.param)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: read_whole(stored) for name, stored in stored_tensors(folder.glob("*.safetensors")).items()}


def shares_of(
    entry: ParameterEntry, tensors: dict[str, Tensor], size: int
) -> Iterator[tuple[str, SourceRegion, Tensor]]:
    """Joins a parameter from the folder on each rank, splits it again and yields the parts of all ranks."""
    shapes = [tuple(tensors[name].shape) for name in entry.hf]
    for rank in range(size):
        shard = entry.form.shard(shapes, rank, size)
        parts = [tensors[entry.hf[share.source]][share.region] for share in shard.shares]
        local = shard.join(parts)
        assert tuple(local.shape) == shard.shape
        back = shard.split(local)
        assert len(back) == len(shard.shares)
        if not (shard.is_copy or entry.is_copy):
            yield from ((entry.hf[share.source], share, part) for share, part in zip(shard.shares, back, strict=True))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_tensor_is_covered_once_and_round_trips_exactly(folder: Path, size: int) -> None:
    config, tensors = family_config(folder), tensors_of(folder)
    family = family_of(config)
    entries = entries_by_name(family.rules(config))
    found = {name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}
    times = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for entry in entries.values():
        for name, share, part in shares_of(entry, tensors, size):
            found[name][share.region] = part
            times[name][share.region] += 1
    ignored = tuple(one.prefix for one in family.ignored(config))
    kept = [name for name in tensors if not name.startswith(ignored)]
    assert kept
    for name in kept:
        assert (times[name] == 1).all(), f"{name} is not covered exactly once"
        assert torch.equal(found[name], tensors[name]), name
    assert not [name for name in tensors if name not in kept and times[name].any()]


def test_fields_match_the_config_of_the_folder(folder: Path) -> None:
    config = family_config(folder)
    fields = family_of(config).fields(config)
    assert fields["num_layers"] == BASE["num_hidden_layers"]
    assert fields["hidden_size"] == BASE["hidden_size"]
    assert fields["vocab_size"] == BASE["vocab_size"]
    assert fields["num_attention_heads"] == BASE["num_attention_heads"]
    for name in ("moe_layer_freq", "linear_attention_freq"):
        if isinstance(fields.get(name), list):
            assert len(fields[name]) == fields["num_layers"]


def test_expert_entries_cover_every_routed_expert(folder: Path) -> None:
    config = family_config(folder)
    family = family_of(config)
    entries = entries_by_name(family.rules(config))
    assert {".mlp.experts." in name for name, entry in entries.items() if entry.is_expert} <= {True}
    count = family.fields(config).get("num_moe_experts") or 0
    numbers = {name.rsplit("weight", 1)[1] for name, entry in entries.items() if entry.is_expert and "weight" in name}
    assert numbers == {str(expert) for expert in range(count)}


def test_every_family_has_a_tiny_test_model() -> None:
    types = {RENAMED.get(case, model_type) for case, (model_type, _) in FAMILY_MODELS.items()}
    missing = [family.name for family in FAMILIES if not types & set(family.model_types)]
    assert missing == ["DeepSeek V3.2"]  # GLM-5 with other sizes


def test_formats_of_families_have_parsers() -> None:
    for family in FAMILIES:
        assert family.tool_format in (None, *TOOL_CALL_PARSERS), family.name
        assert family.reasoning_format in (None, *REASONING_PARSERS), family.name
        assert family.stop_tokens, family.name


def test_rules_adapt_to_multimodal_prefix_and_stacked_experts(tmp_path: Path) -> None:
    folder = make_family_folder(tmp_path, "qwen3_5_moe")
    config, tensors = family_config(folder), tensors_of(folder)
    other: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".mlp.experts." not in name:
            other[name.replace("model.", "model.language_model.", 1)] = tensor
    for layer in range(BASE["num_hidden_layers"]):
        here = f"model.layers.{layer}.mlp.experts."
        gates, ups, downs = (
            [tensors[f"{here}{expert}.{part}_proj.weight"] for expert in range(4)] for part in ("gate", "up", "down")
        )
        there = here.replace("model.", "model.language_model.", 1)
        other[f"{there}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])
        other[f"{there}down_proj"] = torch.stack(downs)
    rules = family_of(config).rules(config)
    plain, moved = entries_by_name(rules), entries_by_name(rules_for_folder(rules, other))
    assert entries_by_name(rules_for_folder(rules, tensors)) == plain
    assert plain.keys() == moved.keys()
    assert {name for entry in moved.values() for name in entry.hf} == set(other)
    for name, entry in moved.items():
        for rank in range(2):
            assert torch.equal(local_tensor(entry, other, rank, 2), local_tensor(plain[name], tensors, rank, 2)), name


def local_tensor(entry: ParameterEntry, tensors: dict[str, Tensor], rank: int, size: int) -> Tensor:
    shard = entry.form.shard([tuple(tensors[name].shape) for name in entry.hf], rank, size)
    return shard.join([tensors[entry.hf[share.source]][share.region] for share in shard.shares])


def test_delta_net_inputs_are_in_megatron_order() -> None:
    grouped = GroupedDeltaInput(key_heads=2, key_head=1)  # 2 key heads of 1 row, 2 value heads of 2 rows each
    qkvz = torch.tensor([[0.0], [10], [20], [21], [30], [31], [1], [11], [22], [23], [32], [33]])
    ba = torch.tensor([[40.0], [50], [41], [51]])
    whole = grouped.shard([(12, 1), (4, 1)], 0, 1).join([qkvz, ba])
    assert whole.flatten().tolist() == [0, 1, 10, 11, 20, 21, 22, 23, 30, 31, 32, 33, 40, 41, 50, 51]
    parts = [whole[:8], whole[8:12], whole[12:14], whole[14:]]
    shapes = [tuple(part.shape) for part in parts]
    for rank in range(2):
        mine, same = grouped.shard([(12, 1), (4, 1)], rank, 2), DeltaInput(key=2).shard(shapes, rank, 2)
        local = mine.join([(qkvz, ba)[share.source][share.region] for share in mine.shares])
        assert local.flatten().tolist() == [
            number for start in (0, 10, 20, 30, 40, 50) for number in _own(start, rank, 2 if start in (20, 30) else 1)
        ]
        assert torch.equal(same.join([parts[share.source][share.region] for share in same.shares]), local)


def _own(start: int, rank: int, count: int) -> range:
    return range(start + rank * count, start + (rank + 1) * count)


def test_interleaved_gate_and_up_rows_are_separated() -> None:
    rows = torch.arange(8.0)  # gate, up, gate, up ...
    second = InterleavedGateUp().shard([(8,)], 1, 2)
    assert second.join([rows[second.shares[0].region]]).tolist() == [4, 6, 5, 7]


def test_multi_token_prediction_layers_are_ignored_with_a_reason() -> None:
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "num_nextn_predict_layers": 1}
    (ignored,) = family_of(config).ignored(config)
    assert ignored.prefix == "model.layers.61."
    assert "training does not use" in ignored.why


def test_qkv_rows_are_in_megatron_group_order() -> None:
    q, k, v = torch.arange(8.0)[:, None], 100 + torch.arange(4.0)[:, None], 200 + torch.arange(4.0)[:, None]
    shapes = [(8, 1), (4, 1), (4, 1)]  # 4 heads of 2 rows in 2 groups
    whole = Qkv(2).shard(shapes, 0, 1).join([q, k, v])
    assert whole.flatten().tolist() == [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]
    second = Qkv(2).shard(shapes, 1, 2)
    assert [share.region[0] for share in second.shares] == [slice(4, 8), slice(2, 4), slice(2, 4)]


def test_more_ranks_than_groups_split_within_a_group() -> None:
    shapes = [(8, 1), (4, 1), (4, 1)]
    first, second = (Qkv(2).shard(shapes, rank, 4) for rank in (0, 1))
    assert [share.region[0] for share in first.shares] == [slice(0, 4), slice(0, 0), slice(0, 0)]
    assert [share.region[0] for share in second.shares] == [slice(0, 0), slice(0, 2), slice(0, 2)]
    local = second.join([torch.empty(0, 1), torch.ones(2, 1), torch.full((2, 1), 2.0)])
    assert local.flatten().tolist() == [1, 1, 2, 2]
    assert [part.shape[0] for part in second.split(local)] == [0, 2, 2]
    assert [part.shape[0] for part in first.split(torch.ones(4, 1))] == [4, 0, 0]


def test_gated_queries_come_before_their_gates_in_each_group() -> None:
    q = torch.arange(8.0)[:, None]  # heads of one row: query, gate, query, gate ...
    k, v = 100 + torch.arange(2.0)[:, None], 200 + torch.arange(2.0)[:, None]
    shard = Qkv(2, is_gated=True).shard([(8, 1), (2, 1), (2, 1)], 0, 1)
    local = shard.join([q, k, v])
    assert local.flatten().tolist() == [0, 2, 1, 3, 100, 200, 4, 6, 5, 7, 101, 201]
    assert all(torch.equal(back, part) for back, part in zip(shard.split(local), (q, k, v), strict=True))


def test_vocabulary_padding_is_zero_and_not_exported() -> None:
    rows = torch.ones(5, 3)
    shards = [Vocab(2).shard([(5, 3)], rank, 4) for rank in range(4)]  # 8 rows of 2
    locals_ = [shard.join([rows[shard.shares[0].region]]) for shard in shards]
    assert [local[:, 0].tolist() for local in locals_] == [[1, 1], [1, 1], [1, 0], [0, 0]]
    given = [shard.split(torch.full((2, 3), 7.0))[0] for shard in shards]
    assert [len(part) for part in given] == [2, 2, 1, 0]


def test_vocabulary_divisor_applies_to_embedding_and_head() -> None:
    config = {**BASE, "model_type": "qwen3"}
    entries = entries_by_name(with_vocab_divisor(family_of(config).rules(config), 1))
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert entries[name].form.shard([(250, 64)], 0, 2).shape == (125, 64)


def test_replicated_tensors_are_copies_on_all_but_the_first_rank() -> None:
    assert [Replicated().shard([(4,)], rank, 2).is_copy for rank in range(2)] == [False, True]
    assert not any(form.shard([(4, 4), (4, 4)], 1, 2).is_copy for form in (ColumnParallel(), RowParallel(), GateUp()))
    assert Replicated().shard([()], 0, 2).shape == ()


def test_rejects_rows_not_divisible_by_the_ranks() -> None:
    with pytest.raises(ValueError, match="6 rows cannot be shared evenly by 4"):
        ColumnParallel().shard([(6, 2)], 0, 4)


def test_tied_output_layer_is_a_copy_of_the_embedding() -> None:
    config = {**BASE, "model_type": "qwen2", "tie_word_embeddings": True}
    entries = entries_by_name(family_of(config).rules(config))
    assert entries["output_layer.weight"].hf == ("model.embed_tokens.weight",)
    assert entries["output_layer.weight"].is_copy
    assert family_of(config).fields(config)["share_embeddings_and_output_weights"] is True


def test_rope_fields_are_read_from_old_and_new_configs() -> None:
    old = {**BASE, "model_type": "llama", "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
    new = {**BASE, "model_type": "llama"} | {
        "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}
    }
    fields = family_of(old).fields(old)
    assert fields == family_of(new).fields(new)
    assert (fields["rotary_base"], fields["rope_scaling"], fields["rope_scaling_factor"]) == (5e5, True, 8.0)
    with pytest.raises(UserError, match="high_freq_factor 2"):
        family_of(old).fields({**old, "rope_scaling": {"rope_type": "llama3", "high_freq_factor": 2}})
    with pytest.raises(UserError, match="rope_type longrope"):
        family_of(old).fields({**old, "rope_scaling": {"rope_type": "longrope"}})


def test_unknown_model_type_error_lists_known_types() -> None:
    with pytest.raises(UserError, match=r"model_type mamba.*llama, mimo, minimax_m2, qwen2, qwen2_moe, qwen3"):
        family_of({"model_type": "mamba"})
    kinds = [model_type for family in FAMILIES for model_type in family.model_types]
    assert len(kinds) == len(set(kinds))


def test_rejects_a_config_without_hidden_size() -> None:
    config = {name: value for name, value in BASE.items() if name != "hidden_size"} | {"model_type": "qwen3"}
    with pytest.raises(UserError, match="no hidden_size"):
        family_of(config).fields(config)


@pytest.mark.parametrize("case", WINDOWED_MODELS)
def test_sliding_windows_are_read_with_and_without_layer_types(case: str) -> None:
    model_type, own = WINDOWED_MODELS[case]
    config = AutoConfig.for_model(model_type, **{**BASE, **own})
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    facts = config.to_dict()
    fields = family_of(facts).fields
    for given in (facts, {name: value for name, value in facts.items() if name != "layer_types"}):
        found = fields(given)
        assert found["window_size"] == (4, 0)
        assert found["window_attn_skip_freq"] == [int(kind == "sliding_attention") for kind in kinds]
    assert "window_size" not in fields({**facts, "use_sliding_window": False})
    assert fields({name: value for name, value in facts.items() if name != "sliding_window"})["window_size"] == (
        4095,
        0,
    )
