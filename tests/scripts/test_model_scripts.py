"""scripts/models: every file gives flags that the parser accepts, with the sizes of the model it is named after."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from slime.config import Config
from slime.config.checks import check_shape_flags
from slime.config.parser import parse_flags
from slime.errors import UserError
from slime.models.catalog import published_model
from slime.models.models_cli import model_scripts

MODELS = Path(__file__).parents[2] / "scripts" / "models"
NAMES = sorted(file.stem for file in MODELS.glob("*.sh") if file.name != "lib.sh")

BILLIONS = {
    "deepseek-r1": 671, "deepseek-v3": 671, "deepseek-v3.1": 671,
    "glm-z1-9B": 9.4, "glm4-9B": 9.4, "glm4-32B": 32.6, "glm4.5-106B-A12B": 106.8,
    "glm4.5-355B-A32B": 352.8, "glm4.6-355B-A32B": 352.8, "glm4.7-355B-A32B": 352.8, "glm4.7-30B-A3B": 30,
    "glm5-744B-A40B": 744, "glm5.2-744B-A40B": 744,
    "gpt-oss-20B": 20.9, "gpt-oss-120B": 116.8,
    "kimi-k2": 1026, "kimi-k2-thinking": 1026, "moonlight": 15.96, "minimax-m2": 228.7, "mimo-7B-rl": 7.6,
    "llama3-8B": 8.03, "llama3-70B": 70.55, "llama3.1-8B-Instruct": 8.03, "llama3.1-70B-Instruct": 70.55,
    "llama3.2-3B-Instruct": 3.21, "llama3.2-3B-Instruct-amd": 3.21,
    "qwen2.5-0.5B": 0.494, "qwen2.5-1.5B": 1.54, "qwen2.5-3B": 3.09, "qwen2.5-7B": 7.62, "qwen2.5-14B": 14.77,
    "qwen2.5-32B": 32.76,
    "qwen3-0.6B": 0.596, "qwen3-1.7B": 1.72, "qwen3-4B": 4.02, "qwen3-4B-Instruct-2507": 4.02, "qwen3-8B": 8.19,
    "qwen3-14B": 14.77, "qwen3-32B": 32.76, "qwen3-30B-A3B": 30.53, "qwen3-235B-A22B": 235.1,
    "qwen3-next-80B-A3B": 79.67, "qwen3.5-0.8B": 0.75, "qwen3.5-4B": 4.2, "qwen3.5-9B": 9.0, "qwen3.5-27B": 26.9,
    "qwen3.5-35B-A3B": 34.7, "qwen3.5-35B-A3B-vl": 34.7,
}  # fmt: skip
"""Published parameter counts of the language models, in billions. A wrong width, depth or tie changes the count."""
CUTS = {"deepseek-v3-20layer": 20, "deepseek-v3-5layer": 5}

SAME_AS_TRANSFORMERS = {
    "deepseek-v3": "deepseek_v3", "glm4-9B": "glm4", "glm4.5-106B-A12B": "glm4_moe", "glm4.7-30B-A3B": "glm4_moe_lite",
    "glm5-744B-A40B": "glm_moe_dsa", "minimax-m2": "minimax_m2", "qwen3-next-80B-A3B": "qwen3_next",
    "qwen3.5-9B": "qwen3_5_text", "qwen3.5-35B-A3B": "qwen3_5_moe_text",
}  # fmt: skip
"""Models whose sizes are the defaults of their config class."""
HF_NAMES = {
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "num_attention_heads": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size", "num_query_groups": "num_key_value_heads", "vocab_size": "vocab_size",
    "moe_ffn_hidden_size": "moe_intermediate_size", "moe_router_topk": "num_experts_per_tok",
    "moe_router_topk_scaling_factor": "routed_scaling_factor", "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank", "qk_head_dim": "qk_nope_head_dim", "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim", "dsa_indexer_topk": "index_topk", "dsa_indexer_n_heads": "index_n_heads",
    "dsa_indexer_head_dim": "index_head_dim", "moe_router_num_groups": "n_group", "moe_router_group_topk": "topk_group",
    "linear_num_key_heads": "linear_num_key_heads", "linear_num_value_heads": "linear_num_value_heads",
    "linear_key_head_dim": "linear_key_head_dim", "linear_value_head_dim": "linear_value_head_dim",
    "linear_conv_kernel_dim": "linear_conv_kernel_dim",
}  # fmt: skip
FEED_FORWARD_OF_THE_MODEL = {"qwen3-next-80B-A3B": 5120}
"""intermediate_size of models whose config differs from the default of its class."""


def source(names: list[str], cwd: Path, **env: str) -> dict[str, list[str]]:
    """Returns MODEL_ARGS of each file, sourced by a strict bash in another folder, as a run script does."""
    program = """
        SCRIPT_DIR=/somewhere/else
        for name in "$@"; do (source "$MODELS/$name.sh"; printf '%s\\n' "$name" "${MODEL_ARGS[@]}" ""); done
    """
    done = subprocess.run(
        ["bash", "-euc", program, "bash", *names],
        cwd=cwd, env={"PATH": "/usr/bin:/bin", "MODELS": str(MODELS), **env}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    blocks = [block.splitlines() for block in done.stdout.removesuffix("\n\n").split("\n\n")]
    return {name: words for name, *words in blocks}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The parsed model flags of every file."""
    words = source(NAMES, tmp_path_factory.mktemp("elsewhere"))
    assert list(words) == NAMES
    return {name: parse_flags(found).carried for name, found in words.items()}


def parameters(shape: dict[str, Any]) -> int:
    """Counts the weights of the matrices. Biases and norms are negligible."""
    hidden, layers, vocab = shape["hidden_size"], shape["num_layers"], shape["vocab_size"]
    experts = layers_with_experts(shape)
    mixture = hidden * shape.get("num_experts", 0) + 3 * hidden * (
        shape.get("num_experts", 0) * shape.get("moe_ffn_hidden_size", 0)
        + shape.get("moe_shared_expert_intermediate_size", 0)
    )
    feed_forward = (layers - experts) * 3 * hidden * shape["ffn_hidden_size"] + experts * mixture
    attention = layers * full_attention(shape)
    if "linear_attention_freq" in shape:
        full = layers // int(shape["linear_attention_freq"])
        attention = full * full_attention(shape) + (layers - full) * linear_attention(shape)
    tables = 2 if "untie_embeddings_and_output_weights" in shape else 1
    return tables * vocab * hidden + attention + feed_forward


def layers_with_experts(shape: dict[str, Any]) -> int:
    return shape["moe_layer_freq"].count("1") if "moe_layer_freq" in shape else 0


def full_attention(shape: dict[str, Any]) -> int:
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    if "multi_latent_attention" not in shape:
        width = shape.get("kv_channels", hidden // heads)
        queries = 2 if "attention_output_gate" in shape else 1
        return hidden * width * ((1 + queries) * heads + 2 * shape["num_query_groups"])
    latent, rope, value = shape["kv_lora_rank"], shape["qk_pos_emb_head_dim"], shape["v_head_dim"]
    width, rank = shape["qk_head_dim"] + rope, shape.get("q_lora_rank")
    queries = hidden * heads * width if rank is None else rank * (hidden + heads * width)
    indexer = 0
    if "dsa_indexer_n_heads" in shape:
        n, size = shape["dsa_indexer_n_heads"], shape["dsa_indexer_head_dim"]
        indexer = rank * n * size + hidden * (size + n)
    keys = hidden * (latent + rope) + latent * heads * (shape["qk_head_dim"] + value)
    return queries + keys + heads * value * hidden + indexer


def linear_attention(shape: dict[str, Any]) -> int:
    keys = shape["linear_num_key_heads"] * shape["linear_key_head_dim"]
    values = shape["linear_num_value_heads"] * shape["linear_value_head_dim"]
    return shape["hidden_size"] * (2 * keys + 3 * values + 2 * shape["linear_num_value_heads"])


def test_model_scripts_match_the_generated_files() -> None:
    """`slime models --scripts scripts/models` regenerates them."""
    assert {file.name: file.read_text() for file in MODELS.glob("*.sh") if file.name != "lib.sh"} == model_scripts()


@pytest.mark.parametrize("name", NAMES)
def test_flags_agree_with_the_published_config(name: str, shapes: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """The flags pass the check against the published config.json, and a wrong number fails it."""
    published_model(name).write(tmp_path)
    config = Config(hf_checkpoint=str(tmp_path), carried=shapes[name])
    check_shape_flags(config)
    with pytest.raises(UserError, match="--hidden-size 63 contradicts hidden_size"):
        check_shape_flags(config.replace(carried={**shapes[name], "hidden_size": 63}))


def test_every_model_has_a_reference_size() -> None:
    assert sorted([*BILLIONS, *CUTS]) == NAMES


@pytest.mark.parametrize("name", BILLIONS)
def test_flags_give_the_published_parameter_count(name: str, shapes: dict[str, dict[str, Any]]) -> None:
    assert parameters(shapes[name]) / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_attention_and_expert_flags_are_consistent(name: str, shapes: dict[str, dict[str, Any]]) -> None:
    shape = shapes[name]
    heads, groups = shape["num_attention_heads"], shape.get("num_query_groups")
    assert ("group_query_attention" in shape) == (groups is not None) != ("multi_latent_attention" in shape)
    assert groups is None or heads % groups == 0
    assert "kv_channels" in shape or "multi_latent_attention" in shape
    assert ("num_experts" in shape) == ("moe_layer_freq" in shape)
    if "num_experts" in shape:
        assert shape["moe_layer_freq"].count(",") + 1 == shape["num_layers"]
        assert shape["moe_router_topk"] < shape["num_experts"]


@pytest.mark.parametrize("name", SAME_AS_TRANSFORMERS)
def test_flags_match_the_transformers_config_class(name: str, shapes: dict[str, dict[str, Any]]) -> None:
    shape, config = shapes[name], AutoConfig.for_model(SAME_AS_TRANSFORMERS[name]).to_dict()
    config["intermediate_size"] = FEED_FORWARD_OF_THE_MODEL.get(name, config.get("intermediate_size"))
    compared = {flag: hf for flag, hf in HF_NAMES.items() if flag in shape and config.get(hf) is not None}
    assert {flag: shape[flag] for flag in compared} == {flag: config[hf] for flag, hf in compared.items()}
    assert shape.get("num_experts") == (
        config.get("n_routed_experts") or config.get("num_experts") or config.get("num_local_experts")
    )
    if "first_k_dense_replace" in config:
        assert shape["num_layers"] - layers_with_experts(shape) == config["first_k_dense_replace"]


def test_truncated_models_differ_only_in_depth(shapes: dict[str, dict[str, Any]]) -> None:
    whole = shapes["deepseek-v3"]
    for name, layers in CUTS.items():
        freq = "[" + ",".join(["0"] * 3 + ["1"] * (layers - 3)) + "]"
        assert shapes[name] == {**whole, "num_layers": layers, "moe_layer_freq": freq}


def test_rotary_bases_of_model_variants(shapes: dict[str, dict[str, Any]]) -> None:
    bases = {name: shape["rotary_base"] for name, shape in shapes.items()}
    assert (bases["qwen3-4B"], bases["qwen3-4B-Instruct-2507"]) == (1_000_000, 5_000_000)
    assert (bases["glm5-744B-A40B"], bases["glm5.2-744B-A40B"]) == (1_000_000, 8_000_000)
    assert (bases["glm4-9B"], bases["llama3-8B"], bases["kimi-k2"]) == (10_000, 500_000, 50_000)
    thinking = shapes["kimi-k2-thinking"]
    assert (thinking["rotary_scaling_factor"], thinking["norm_epsilon"]) == (64, 1e-5)


def test_environment_overrides_sizes_and_model_folder(tmp_path: Path) -> None:
    env = {
        "MODEL_ARGS_NUM_LAYERS": "3", "MODEL_ARGS_DENSE_LAYERS": "1", "MODEL_ARGS_HIDDEN_SIZE": "64",
        "MODEL_ARGS_ROTARY_BASE": "12345", "MODEL_ARGS_NORM_EPSILON": "1e-5", "HF_CHECKPOINT": "/models/a tiny one",
    }  # fmt: skip
    found = source(["deepseek-v3", "qwen3-4B-Instruct-2507", "qwen3-4B"], tmp_path, **env)
    for words in found.values():
        config = parse_flags(words)
        shape = config.carried
        assert (shape["num_layers"], shape["hidden_size"], shape["rotary_base"]) == (3, 64, 12345)
        assert shape["norm_epsilon"] == 1e-5
        assert config.hf_checkpoint == "/models/a tiny one"
    assert parse_flags(found["deepseek-v3"]).carried["moe_layer_freq"] == "[0,1,1]"


def test_sourcing_one_script_does_not_affect_the_next(tmp_path: Path) -> None:
    """Variables that one file sets for another must not change the next sourced file."""
    program = f"""
        source {MODELS}/kimi-k2-thinking.sh; source {MODELS}/deepseek-v3-5layer.sh; source {MODELS}/qwen3-4B.sh
        echo "${{MODEL_ARGS[@]}}"; compgen -v MODEL_ARGS
    """
    done = subprocess.run(["bash", "-euc", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    words, *variables = done.stdout.splitlines()
    assert words.split() == source(["qwen3-4B"], tmp_path)["qwen3-4B"]
    assert variables == ["MODEL_ARGS"]
