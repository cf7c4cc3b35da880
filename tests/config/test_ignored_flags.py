"""Flags without effect are reported with a reason, and no other flags are reported."""

from __future__ import annotations

from typing import Any

import pytest

from slime.config import Config, parse_flags, resolve
from slime.config.config import FLAG_SPECS
from slime.config.ignored_flags import flags_unused_by_layers, flags_without_effect


def notes(*words: str) -> list[str]:
    return flags_without_effect(parse_flags(words))


def test_every_flag_without_effect_is_reported_with_its_reason() -> None:
    assert flags_without_effect(Config()) == []
    other: dict[str, Any] = {"bool": True, "int": 7, "float": 0.5, "str": "x", "strs": ["x", "y"]}
    for spec in FLAG_SPECS.values():
        if spec.info.no_effect is not None:
            value = next((choice for choice in spec.info.choices if choice != spec.default), other[spec.kind])
            (sentence,) = flags_without_effect(Config(**{spec.name: value}))
            assert sentence.startswith(spec.flag), sentence
            assert sentence.endswith(f"has no effect: {spec.info.no_effect}"), sentence


def test_flags_with_the_same_reason_share_a_sentence() -> None:
    assert notes("--record-memory-history", "--memory-snapshot-dir", "/tmp", "--http-proxy", "p") == [
        "--http-proxy p has no effect: engines are called directly, as in upstream",
        "--record-memory-history, --memory-snapshot-dir /tmp has no effect: memory is not recorded",
    ]


@pytest.mark.parametrize("words", ["--train-backend fsdp", "--no-offload-train", "--data-pad-size-multiplier 128"])
def test_flags_that_match_the_actual_behavior_are_not_reported(words: str) -> None:
    assert notes(*words.split()) == []


def test_buffer_flags_have_effect_only_with_a_custom_rollout_function() -> None:
    buffer = ("--rollout-buffer-url", "http://b:8889", "--rollout-task-type", "code")
    assert notes(*buffer) == [
        "--rollout-buffer-url http://b:8889, --rollout-task-type code has no effect: only a rollout function of your "
        "own reads it"
    ]
    assert notes(*buffer, "--rollout-function-path", "mine.generate_rollout") == []


def test_offload_sets_offload_rollout_and_offload_train(valid: dict[str, Any]) -> None:
    config = resolve(Config(**valid, offload=True))
    assert (config.offload_rollout, config.offload_train) == (True, True)
    assert flags_without_effect(config) == []
    config = resolve(Config(**valid))
    assert (config.offload_rollout, config.offload_train) == (False, False)


def test_kernel_flags_that_the_layers_lack_are_reported() -> None:
    words = (
        "--train-backend",
        "megatron",
        "--attention-backend",
        "flash",
        "--moe-permute-fusion",
        "--bucket-size",
        "9",
    )
    assert flags_unused_by_layers(parse_flags(words), "cpu") == [
        "layers are plain torch on a CPU, so these flags have no effect: --moe-permute-fusion, --attention-backend"
    ]
    assert flags_unused_by_layers(parse_flags((*words, "--transformer-impl", "transformer_engine")), "cuda") == []
    assert flags_unused_by_layers(parse_flags(words[2:]), "cpu") == [], "FSDP has a sentence of its own about them"


def test_ignored_megatron_flags_are_reported_by_class() -> None:
    used = ("--recompute-granularity", "full", "--bf16", "--hidden-dropout", "0")
    assert notes("--sequence-parallel", "--num-layers", "2", *used, "--moe-permute-fusion", "--swiglu") == [
        "Megatron flags without effect on the FSDP trainer: --sequence-parallel, --moe-permute-fusion"
        " (--train-backend megatron uses them; fsdp is the default here)",
        "the model is built from its config.json, with which these flags are only compared: --num-layers, --swiglu",
    ]
