"""Every Megatron flag has a class, and flags that change numerical results are never ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config, parse_args, resolve
from slime.config.checks import check_megatron_flags
from slime.config.ignored_flags import flags_without_effect
from slime.config.megatron_flags import (
    COMPARED_SHAPE_KEYS,
    MEGATRON_CLASSES,
    MEGATRON_FLAGS,
    NEUTRAL,
    NUMBERS,
    OTHERS,
    REFUSED_BY_MEGATRON,
    SHAPE,
    SPEED,
    SWITCH,
    TEXT,
    given_settings,
)  # fmt: skip
from slime.errors import UserError

OF_NUMBERS = [name for name, role in MEGATRON_CLASSES.items() if role == NUMBERS and name != "finetune"]


def test_every_megatron_flag_has_one_class() -> None:
    assert MEGATRON_CLASSES.keys() == MEGATRON_FLAGS.keys()
    assert set(MEGATRON_CLASSES.values()) == {SHAPE, NUMBERS, SPEED, OTHERS}
    assert NEUTRAL.keys() == {*OF_NUMBERS, "finetune"}
    shape = {name.replace("-", "_") for name, role in MEGATRON_CLASSES.items() if role == SHAPE}
    assert COMPARED_SHAPE_KEYS.keys() <= shape


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_flags_that_change_numbers_accept_only_neutral_values(name: str, valid_argv: list[str]) -> None:
    neutral, why = NEUTRAL[name]
    for value in neutral:
        config = parse_args([*valid_argv, f"--{name}", str(value)])
        assert config.carried[name.replace("-", "_")] == value
        assert flags_without_effect(config) == [], "what happens anyway needs no sentence"
    other = [] if MEGATRON_FLAGS[name] == SWITCH else ["sinkhorn" if MEGATRON_FLAGS[name] == TEXT else "0.25"]
    with pytest.raises(UserError) as caught:
        parse_args([*valid_argv, f"--{name}", *other])
    assert str(caught.value) == f"{' '.join([f'--{name}', *other])} is not supported: {why}"


def test_rejects_finetune_if_load_has_a_checkpoint(valid: dict[str, Any], tmp_path: Path) -> None:
    config = resolve(
        Config(**valid, load=str(tmp_path / "ckpt"), save=str(tmp_path / "ckpt"), carried={"finetune": True})
    )
    check_megatron_flags(config)
    (tmp_path / "ckpt" / "iter_0000003").mkdir(parents=True)
    (tmp_path / "ckpt" / "iter_0000003" / "meta.json").write_text("{}")
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(UserError, match="--finetune is not supported: --load resumes a run; to start fresh"):
        check_megatron_flags(config)


@pytest.mark.parametrize(
    ("facts", "flag", "sentence"),
    [
        ({"rope_theta": 1e6}, "--rotary-base 10000", "--rotary-base 10000 contradicts rope_theta 1000000.0 in"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "--rotary-base 10000", "contradicts rope_theta 1000000.0 in"),
        ({"rms_norm_eps": 1e-6}, "--norm-epsilon 1e-5", "--norm-epsilon 1e-05 contradicts rms_norm_eps 1e-06 in"),
        ({"partial_rotary_factor": 0.5}, "--rotary-percent 1.0", "contradicts partial_rotary_factor 0.5 in"),
        ({"rope_scaling": {"factor": 8.0}}, "--rope-scaling-factor 32", "contradicts factor 8.0 in"),
        ({}, "--kv-channels 128", "--kv-channels 128 contradicts head_dim 16 in"),
        ({}, "--untie-embeddings-and-output-weights", "contradicts tie_word_embeddings true in"),
        (
            {"routed_scaling_factor": 2.5},
            "--moe-router-topk-scaling-factor 1.8",
            "--moe-router-topk-scaling-factor 1.8 contradicts routed_scaling_factor 2.5",
        ),
    ],
)
def test_contradiction_with_config_json_shows_both_values(
    facts: dict[str, Any], flag: str, sentence: str, valid_argv: list[str], model_dir: Path
) -> None:
    file = model_dir / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **facts}))
    with pytest.raises(UserError) as caught:
        parse_args([*valid_argv, *flag.split()])
    assert sentence in str(caught.value)


def test_flags_that_match_config_json_are_accepted(valid_argv: list[str], model_dir: Path) -> None:
    file = model_dir / "config.json"
    facts = {"rope_theta": 1e6, "rms_norm_eps": 1e-6, "partial_rotary_factor": 0.5, "tie_word_embeddings": False}
    file.write_text(json.dumps({**json.loads(file.read_text()), **facts}))
    flags = "--rotary-base 1000000 --norm-epsilon 1e-6 --rotary-percent 0.5 --kv-channels 16 --num-query-groups 2"
    parse_args([*valid_argv, *flags.split(), "--untie-embeddings-and-output-weights", "--vocab-size", "256"])


def test_latent_attention_compares_only_its_own_head_sizes(valid_argv: list[str], model_dir: Path) -> None:
    """Latent attention has separate entries for head sizes; `head_dim` and `num_key_value_heads` do not apply."""
    file = model_dir / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "kv_lora_rank": 8, "qk_nope_head_dim": 12}))
    parse_args([*valid_argv, "--kv-channels", "128", "--num-query-groups", "4", "--qk-head-dim", "12"])
    with pytest.raises(UserError, match="--qk-head-dim 16 contradicts qk_nope_head_dim 12"):
        parse_args([*valid_argv, "--qk-head-dim", "16"])


def test_megatron_config_fields_are_flags_of_the_same_name(valid_argv: list[str]) -> None:
    flags = "--train-backend megatron --bucket-size 1000 --no-tp-comm-bulk-wgrad --apply-rope-fusion --no-rope-fusion"
    config = parse_args([*valid_argv, *flags.split(), "--cp-comm-type", "a2a", "--moe-router-dtype", "fp32"])
    assert given_settings(config.carried) == {
        "bucket_size": 1000,
        "tp_comm_bulk_wgrad": False,
        "apply_rope_fusion": False,
        "cp_comm_type": "a2a",
        "moe_router_dtype": "fp32",
    }
    assert flags_without_effect(config) == []
    assert flags_without_effect(parse_args([*valid_argv, "--bucket-size", "1000"])) == [
        "Megatron flags without effect on the FSDP trainer: --bucket-size (--train-backend megatron uses them; fsdp is "
        "the default here)"
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--bucket-size many", "--bucket-size must be a whole number, not 'many'"),
        (
            "--use-megatron-fsdp",
            "--use-megatron-fsdp is not supported: Megatron's own FSDP is not used: --train-backend fsdp",
        ),
        ("--no-fp8-wgrad", "--no-fp8-wgrad is not supported: training computes in float32 or bfloat16"),
        (
            "--spec my.module get_spec",
            "--spec my.module get_spec is not supported: slime has the layers of every family",
        ),
        ("--moe-router-dtype fp16", "--moe-router-dtype fp16 is none of fp32, fp64"),
        ("--cp-comm-type p2p ring", "--cp-comm-type ring is none of p2p, all_gather, a2a"),
        ("--attention-dropout 0.1", "--attention-dropout 0.1 is not supported: there is no dropout in training"),
    ],
)
def test_unsupported_megatron_flags_and_values_are_rejected(words: str, sentence: str, valid_argv: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse_args([*valid_argv, "--train-backend", "megatron", *words.split()])
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("flag", REFUSED_BY_MEGATRON)
def test_flags_that_only_fsdp_can_ignore_are_rejected_with_megatron(flag: str, valid_argv: list[str]) -> None:
    assert MEGATRON_CLASSES[flag] == OTHERS
    words = [f"--{flag}", *([] if MEGATRON_FLAGS[flag] == SWITCH else ["0.5"])]
    assert len(flags_without_effect(parse_args([*valid_argv, *words]))) == 1
    with pytest.raises(UserError, match=f"--{flag} is not supported: "):
        parse_args([*valid_argv, "--train-backend", "megatron", *words])


def test_log_interval_is_reported_without_effect_with_megatron(valid_argv: list[str]) -> None:
    config = parse_args(
        [*valid_argv, "--train-backend", "megatron", "--log-interval", "1", "--bf16", "--variable-seq-lengths"]
    )
    assert flags_without_effect(config) == [
        "slime handles files, logs, initial weights and log-probs itself, so these flags have no effect: --log-interval"
    ]


def test_bf16_sets_the_dtype_unless_dtype_is_given(valid_argv: list[str]) -> None:
    assert parse_args([*valid_argv, "--bf16"]).dtype == "bfloat16"
    assert parse_args([*valid_argv, "--bf16", "--dtype", "float32"]).dtype == "float32"
