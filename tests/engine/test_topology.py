"""`--sglang-config`: models, server groups and rejected configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from slime.config import Config
from slime.engine.sglang.topology import ServerGroup, read_topology
from slime.errors import UserError


def config_for(tmp_path: Path, content: Any, **flags: Any) -> Config:
    path = tmp_path / "sglang.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return Config(hf_checkpoint="/models/actor", **{"rollout_num_gpus": 4, "sglang_config": str(path), **flags})


def group(num_gpus: int, worker_type: str = "regular", **more: Any) -> dict[str, Any]:
    return {"worker_type": worker_type, "num_gpus": num_gpus, **more}


def test_default_topology_is_one_group_of_all_gpus() -> None:
    [model] = read_topology(Config(hf_checkpoint="/m", rollout_num_gpus=4, rollout_num_gpus_per_engine=2))
    assert (model.name, model.model_path, model.update_weights, model.num_engines) == ("default", "/m", True, 2)
    assert model.groups == (ServerGroup("regular", 4, 2, 0),)


def test_prefill_num_servers_splits_engines_into_prefill_and_decode() -> None:
    config = Config(hf_checkpoint="/m", rollout_num_gpus=6, rollout_num_gpus_per_engine=2, prefill_num_servers=1)
    [model] = read_topology(config)
    assert model.groups == (ServerGroup("prefill", 2, 2, 0), ServerGroup("decode", 4, 2, 2))
    assert model.is_disaggregated
    with pytest.raises(UserError, match="--prefill-num-servers 3 leaves no engine to decode: there are 3"):
        read_topology(config.replace(prefill_num_servers=3))


def test_reads_models_groups_overrides_and_placeholders(tmp_path: Path) -> None:
    models = [
        {"name": "judge", "model_path": "/models/judge", "num_gpus_per_engine": 2, "server_groups": [group(4)]},
        {
            "name": "actor",
            "engine_groups": [
                group(1, overrides={"mem_fraction_static": 0.5}),
                group(1, "placeholder"),
                group(2, num_gpus_per_engine=2),
            ],
        },
    ]
    trained, frozen = read_topology(config_for(tmp_path, {"sglang": models}, rollout_num_gpus=8))
    assert (trained.name, trained.model_path, trained.update_weights) == ("actor", "/models/actor", True)
    assert trained.groups == (
        ServerGroup("regular", 1, 1, 4, {"mem-fraction-static": 0.5}),
        ServerGroup("placeholder", 1, 1, 5),
        ServerGroup("regular", 2, 2, 6),
    )
    assert [g.num_engines for g in trained.groups] == [1, 0, 1]
    assert (frozen.name, frozen.update_weights, frozen.num_engines) == ("judge", False, 2)
    assert frozen.groups == (ServerGroup("regular", 4, 2, 0),)


def test_only_the_first_model_of_the_checkpoint_is_updated(tmp_path: Path) -> None:
    models = [{"name": name, "server_groups": [group(2)]} for name in ("a", "b")]
    first, second = read_topology(config_for(tmp_path, {"sglang": models}))
    assert (first.name, first.update_weights, second.name, second.update_weights) == ("a", True, "b", False)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("sglang: [", "is not YAML"),
        ([], "the file needs the key sglang"),
        ({"sglang": [], "x": 1}, "the file needs the key sglang"),
        ({"sglang": [{"server_groups": [group(4)]}]}, "model 1 needs a name of letters"),
        ({"sglang": [{"name": "a"}]}, "model a needs server_groups"),
        ({"sglang": [{"name": "a", "server_group": []}]}, "unknown key server_group: did you mean server_groups?"),
        ({"sglang": [{"name": "a", "server_groups": [group(4, "prefil")]}]}, "worker_type must be one of regular"),
        ({"sglang": [{"name": "a", "server_groups": [group(4, "encoder")]}]}, "encoder servers are for images"),
        ({"sglang": [{"name": "a", "server_groups": [group(0)]}]}, "num_gpus must be a whole number of at least 1"),
        ({"sglang": [{"name": "a", "server_groups": [group(3)]}]}, "use 3 GPUs in all, but --rollout-num-gpus is 4"),
        ({"sglang": [{"name": "a", "server_groups": [group(4, num_gpus_per_engine=3)]}]}, "not a multiple"),
        ({"sglang": [{"name": "a", "server_groups": [group(4, "decode")]}]}, "use regular alone, or prefill with decode"),
        ({"sglang": [{"name": "a", "server_groups": [group(4, "placeholder")]}]}, "placeholders only"),
        ({"sglang": [{"name": "a", "server_groups": [group(2)]}] * 2}, "two models of the name 'a'"),
        ({"sglang": [{"name": "a", "update_weights": False, "server_groups": [group(4)]}]}, "no model with update_weights"),
        ({"sglang": [{"name": "a", "update_weights": "no", "server_groups": [group(4)]}]}, "must be true or false"),
        ({"sglang": [{"name": "a", "server_groups": [group(4, gpus=1)]}]}, "unknown key gpus"),
    ],
)  # fmt: skip
def test_rejects_invalid_config_naming_the_file(tmp_path: Path, content: Any, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        read_topology(config_for(tmp_path, content))
    assert sentence in str(caught.value)
    assert "sglang.yaml" in str(caught.value)


def test_rejects_conflicting_flags_and_a_missing_config_file(tmp_path: Path) -> None:
    content = {"sglang": [{"name": "a", "server_groups": [group(4)]}]}
    with pytest.raises(UserError, match="--sglang-config and --prefill-num-servers both define servers"):
        read_topology(config_for(tmp_path, content, prefill_num_servers=1))
    with pytest.raises(UserError, match=r"missing\.yaml cannot be read"):
        read_topology(config_for(tmp_path, content, sglang_config=str(tmp_path / "missing.yaml")))
