"""Mixture-of-experts models: the routed experts of each token against transformers' routers."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer
from torch import nn
from transformers import AutoModelForCausalLM

from slime.engine.embedded.engine import EngineCore
from slime.engine.embedded.http.async_engine import EngineBridge
from slime.engine.embedded.http.requests import ModelFacts, parse_generate
from slime.engine.embedded.http.responses import answer, whole
from slime.engine.embedded.http.server import EngineServer
from slime.engine.embedded.scheduler import Sequence
from tests.engine.conftest import Waiter
from tests.engine.test_numbers import prompt, running_core
from tests.tiny_models import make_model_folder, make_tokenizer

LATE: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
LATE |= {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
FAMILIES: dict[str, tuple[dict[str, Any], int]] = {  # config overrides and experts per token
    "qwen3_moe": ({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, 2),
    "glm4_moe": (LATE, 3),
    "gpt_oss": ({"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}, 2),
    "mixtral": ({"num_local_experts": 300, "num_experts_per_tok": 2, "intermediate_size": 8}, 2),
}
LAYERS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("moe") / "model", "qwen3_moe", **FAMILIES["qwen3_moe"][0])


def routed(core: EngineCore, *bodies: dict[str, Any]) -> list[tuple[Sequence, dict[str, Any]]]:
    """Run the requests together; return each sequence with the `meta_info` of its answer."""
    facts = ModelFacts(
        make_tokenizer(), core.loaded.vocab_size, core.loaded.context_len, frozenset(), core.runner.experts.topk > 0
    )
    waiter, made = Waiter(), []
    for body in bodies:
        [request], _ = parse_generate({"return_routed_experts": True, **body}, facts)
        made += [(seq, request) for seq in request.sequences(facts, waiter.notify)]
    core.submit([seq for seq, _ in made])
    waiter.wait(len(made))
    answers = ((seq, answer(seq, whole(seq, ""), request, "")) for seq, request in made)
    return [(seq, orjson.loads(orjson.dumps(told["meta_info"]))) for seq, told in answers]


def rows_of(meta: dict[str, Any], topk: int, layers: int = LAYERS) -> np.ndarray:
    return np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).reshape(-1, layers, topk)


def reference_rows(folder: Path, tokens: list[int], topk: int) -> np.ndarray:
    """Experts chosen by transformers' routers; zero for layers without experts."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    rows = np.zeros((len(tokens), LAYERS, topk), np.int32)

    def note(layer: int, output: tuple[torch.Tensor, ...]) -> None:
        rows[:, layer] = output[2].numpy()

    for layer, block in enumerate(model.model.layers):
        for router in (m for m in block.modules() if type(m).__name__.lower().endswith("topkrouter")):
            assert isinstance(router, nn.Module)
            router.register_forward_hook(lambda _, given, output, layer=layer: note(layer, output))
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]))
    return rows


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(np.sort(found, -1), np.sort(expected, -1))


@pytest.mark.parametrize("family", FAMILIES)
def test_routed_experts_match_transformers(family: str, tmp_path: Path) -> None:
    overrides, topk = FAMILIES[family]
    folder = make_model_folder(tmp_path / family, family, **overrides)
    with running_core(folder, "--chunked-prefill-size", "16") as core:
        sent = [{"input_ids": prompt(i, n), "sampling_params": {"max_new_tokens": 9}} for i, n in enumerate((4, 21))]
        for seq, meta in routed(core, *sent):
            rows = rows_of(meta, topk)
            assert len(rows) == len(seq.tokens) - 1
            assert_same(rows, reference_rows(folder, seq.tokens[:-1], topk))
            assert rows[:, -1].any()


def test_cached_prefix_tokens_return_their_experts(folder: Path) -> None:
    ids = prompt(5, 30)
    with running_core(folder) as core:
        [(first, _)] = routed(core, {"input_ids": ids, "return_routed_experts": False})
        again = {"input_ids": first.tokens[:-1] + prompt(6, 4), "sampling_params": {"max_new_tokens": 3}}
        [(seq, meta)] = routed(core, again)
        assert seq.cached_tokens == len(first.tokens) - 1
        [(_, late)] = routed(core, {**again, "routed_experts_start_len": 12})
    rows = rows_of(meta, 2)
    assert_same(rows, reference_rows(folder, seq.tokens[:-1], 2))
    assert late["routed_experts_start_len"] == 12
    prompt_rows = len(again["input_ids"])
    np.testing.assert_array_equal(rows_of(late, 2)[: prompt_rows - 12], rows[12:prompt_rows])


def test_retracted_sequences_keep_their_experts(folder: Path) -> None:
    with running_core(folder, "--max-total-tokens", "60", "--max-running-requests", "8") as core:
        sent = [{"input_ids": prompt(i, 8), "sampling_params": {"max_new_tokens": 20}} for i in range(8)]
        answers = routed(core, *sent)
        assert core.scheduler.retractions > 0
    for seq, meta in answers:
        assert_same(rows_of(meta, 2), reference_rows(folder, seq.tokens[:-1], 2))


def test_aborted_sequence_returns_experts_of_its_sampled_tokens(folder: Path) -> None:
    with running_core(folder) as core:
        facts = ModelFacts(make_tokenizer(), core.loaded.vocab_size, core.loaded.context_len, frozenset(), True)
        body = {"input_ids": prompt(2, 6), "sampling_params": {"max_new_tokens": 400}, "return_routed_experts": True}
        [request], _ = parse_generate({**body, "stream": True}, facts)
        waiter = Waiter()

        def notify(seq: Sequence) -> None:
            if len(seq.output_ids) == 5:
                core.call(lambda: core.pause("retract"))
                core.call(lambda: core.abort(seq.rid))
            waiter.notify(seq)

        [seq] = request.sequences(facts, notify)
        core.submit([seq])
        waiter.wait(1)
        [unborn], _ = parse_generate({**body, "rid": "unborn"}, facts)
        [late] = unborn.sequences(facts, waiter.notify)
        core.submit([late])
        core.call(lambda: core.abort("unborn")).result()
        waiter.wait(2)
    meta = answer(seq, whole(seq, ""), request, "")["meta_info"]
    assert len(seq.output_ids) >= 5
    assert meta["finish_reason"]["type"] == "abort"
    assert_same(rows_of(meta, 2), reference_rows(folder, seq.tokens[:-1], 2))
    assert "routed_experts" not in answer(late, whole(late, ""), unborn, "")["meta_info"]


def test_routed_experts_are_returned_over_http(folder: Path) -> None:
    body = {"input_ids": prompt(3, 7), "sampling_params": {"max_new_tokens": 4, "n": 2}}
    streamed = {**body, "sampling_params": {"max_new_tokens": 4}, "stream": True, "return_routed_experts": True}

    async def ask(core: EngineCore) -> tuple[Any, Any, Any, list[str]]:
        engine = EngineBridge(core)
        engine.facts = ModelFacts(make_tokenizer(), core.loaded.vocab_size, core.loaded.context_len, frozenset(), True)
        async with TestClient(TestServer(EngineServer(engine).app)) as client:
            whole = await (await client.post("/generate", json={**body, "return_routed_experts": True})).json()
            late = {**body, "return_routed_experts": True, "routed_experts_start_len": 7}
            refused = await (await client.post("/generate", json=late)).json()
            silent = await (await client.post("/generate", json=body)).json()
            events = (await (await client.post("/generate", json=streamed)).text()).split("\n\n")
        return whole, refused, silent, [event.removeprefix("data: ") for event in events if event]

    with running_core(folder) as core:
        whole, refused, silent, events = asyncio.run(ask(core))
    last = json.loads(events[-2])
    for one in (*whole, last):
        tokens = [*body["input_ids"], *one["output_ids"]]
        assert_same(rows_of(one["meta_info"], 2), reference_rows(folder, tokens[:-1], 2))
    assert "routed_experts" not in json.dumps(silent)
    assert refused["error"]["param"] == "routed_experts_start_len"
