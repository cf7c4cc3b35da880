"""Routed experts: read from engine responses, stored in narrow dtypes, and checked before training."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slime.data.routed_experts import RouterDimensions, decode_expert_ids
from slime.data.sample import Sample
from slime.data.validation import BadSample, Bounds, check_sample

MODEL = RouterDimensions(num_layers=3, moe_layers=(1, 2), num_experts=8, topk=2)
BOUNDS = Bounds(vocab_size=100, routed=MODEL)


def rows(count: int) -> np.ndarray:
    experts = np.tile(np.array([3, 7], dtype=np.uint8), (count, 3, 1))
    experts[:, 0] = 0  # a layer without experts
    return experts


def sample(experts: Any, **changes: Any) -> Sample:
    values = {"tokens": [1, 2, 3, 4, 5, 6], "response_length": 4, "rollout_log_probs": [-1.0] * 4}
    return Sample(**{**values, "status": Sample.Status.COMPLETED, "rollout_routed_experts": experts, **changes})


def refusal(experts: Any, **changes: Any) -> str:
    with pytest.raises(BadSample) as caught:
        check_sample(sample(experts, **changes), BOUNDS)
    return str(caught.value)


def test_rows_are_required_for_all_trained_tokens() -> None:
    check_sample(sample(rows(5)), BOUNDS)
    assert "must have 5 rows for 6 tokens, not 4" in refusal(rows(4))
    assert "must have 5 rows for 6 tokens, not 6" in refusal(rows(6))
    check_sample(sample(rows(3), loss_mask=[1, 1, 0, 0]), BOUNDS)  # the response ends with tool tokens
    assert "not 2" in refusal(rows(2), loss_mask=[1, 1, 0, 0])
    assert 'need "return_routed_experts": true' in refusal(None)
    for harmless in (
        {"loss_mask": [0] * 4},
        {"remove_sample": True},
        {"status": Sample.Status.ABORTED},
        {"status": Sample.Status.FAILED},
    ):
        check_sample(sample(None, **harmless), BOUNDS)
    check_sample(sample(None), Bounds(vocab_size=100))


def test_rejects_experts_that_the_model_cannot_choose() -> None:
    too_large, negative, unrecorded = rows(5), rows(5).astype(np.int32), rows(5)
    too_large[2, 1, 0], negative[0, 2, 1], unrecorded[3, 2] = 8, -1, 0
    assert refusal(too_large) == "rollout_routed_experts contains expert 8, but the model has 8 experts"
    assert refusal(negative) == "rollout_routed_experts has -1, which is not an expert id"
    assert "only zeros for token 3 in layer 2" in refusal(unrecorded)
    assert "has 2 x 2 entries per token, expected 3 layers x 2 experts" in refusal(rows(5)[:, 1:])
    assert "array of whole numbers" in refusal(rows(5).astype(np.float32))
    assert "array of whole numbers" in refusal(rows(5)[:, 1])
    assert "array of whole numbers" in refusal([[[1, 2]]])
    one_each = RouterDimensions(num_layers=1, moe_layers=(0,), num_experts=8, topk=1)
    check_sample(sample(np.zeros((5, 1, 1), np.uint8)), Bounds(routed=one_each))  # expert 0 is a valid choice


def test_expert_ids_use_the_narrowest_dtype() -> None:
    def wire(*ids: int) -> str:
        return base64.b64encode(np.array(ids, dtype="<i4").tobytes()).decode()

    for ids, kind in (((0, 255), np.uint8), ((0, 256), np.int16), ((-1, 3), np.int16), ((0, 70000), np.int32)):
        found = decode_expert_ids(wire(*ids))
        assert (found.dtype, found.tolist()) == (kind, list(ids))
    assert decode_expert_ids([[3, 4]]).tolist() == [3, 4]
    for broken in ("no base64!", base64.b64encode(b"abc").decode()):
        with pytest.raises(ValueError, match=r"base64|buffer size"):
            decode_expert_ids(broken)
    args = SimpleNamespace(num_layers=1, moe_router_topk=2)
    grown = Sample(tokens=[1, 2])
    grown.append_response_tokens(args, tokens=[3], log_probs=[-1.0], meta_info={"routed_experts": wire(1, 2, 3, 4)})
    tail = {"routed_experts": wire(300, 5), "routed_experts_start_len": 2}
    grown.append_response_tokens(args, tokens=[4], log_probs=[-1.0], meta_info=tail)
    assert grown.rollout_routed_experts is not None
    assert grown.rollout_routed_experts.tolist() == [[[1, 2]], [[3, 4]], [[300, 5]]]
    assert grown.rollout_routed_experts.dtype == np.int16


@pytest.mark.parametrize(
    ("facts", "layers"),
    [
        ({"num_experts": 8}, (0, 1, 2, 3)),
        ({"num_local_experts": 8, "decoder_sparse_step": 2}, (1, 3)),
        ({"n_routed_experts": 8, "first_k_dense_replace": 1}, (1, 2, 3)),
        ({"n_routed_experts": 8, "first_k_dense_replace": 1, "moe_layer_freq": 2}, (2,)),
        ({"n_routed_experts": 8, "moe_layer_freq": [0, 1, 0, 1]}, (1, 3)),
        ({"n_routed_experts": 8, "mlp_layer_types": ["dense", "sparse", "sparse", "dense"]}, (1, 2)),
        ({"num_experts": 8, "mlp_only_layers": [2]}, (0, 1, 3)),
    ],
)
def test_moe_layers_are_read_from_the_model_config(facts, layers, tmp_path: Path) -> None:
    text = {"num_hidden_layers": 4, "num_experts_per_tok": 2, **facts}
    for model in (text, {"model_type": "vl", "text_config": text}):
        (tmp_path / "config.json").write_text(json.dumps(model))
        assert RouterDimensions.of(tmp_path) == RouterDimensions(4, layers, 8, 2)
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 4}))
    assert RouterDimensions.of(tmp_path) is None
