"""Decoder layers share one compilation and compute the same values as uncompiled layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slime.engine.embedded.model.cpu_layers import CompiledLayers, decoder_layers
from slime.engine.embedded.model.runner import ModelRunner
from tests.tiny_models import SMALL

pytestmark = pytest.mark.kernels


def make_runner(model_type: str, **own: Any) -> ModelRunner:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SMALL, **own})).bfloat16().eval()
    runner = ModelRunner(model, np.zeros((9, 64), np.int32))
    runner.allocate_kv(32)
    return runner


def decode_one_token(runner: ModelRunner, count: int, compiled: CompiledLayers | None) -> torch.Tensor:
    """Hidden states of one new token for each of `count` sequences, as the first step of a decoder computes them."""
    context = runner.context
    rows = list(range(count))
    context.window.forget()
    context.window.advance(rows, [1] * count, np.arange(9 * 64, dtype=np.int32).reshape(9, 64) // 64 + 1)
    context.slots = torch.arange(count) + 1
    context.attend = context.decode_cpu

    def run() -> torch.Tensor:
        return runner.hidden(torch.arange(count)[None] + 3, torch.zeros(1, count, dtype=torch.int64))

    with torch.inference_mode():
        return run() if compiled is None else compiled.run(run)


def test_one_compilation_serves_every_layer_and_batch() -> None:
    runner = make_runner("qwen3", num_hidden_layers=12)
    layers = decoder_layers(runner.body)
    assert len(layers) == 12
    wanted = {count: decode_one_token(runner, count, None) for count in (4, 7)}
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = CompiledLayers(runner.body, runner.context, backend="aot_eager")
    for count, plain in wanted.items():
        torch.testing.assert_close(decode_one_token(runner, count, compiled), plain, rtol=0.02, atol=0.02)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert not any("forward" in vars(layer) for layer in layers)


def test_uncompilable_model_runs_eagerly_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    runner = make_runner("qwen3")

    def refuses(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        raise NotImplementedError("no such op")

    plain = decode_one_token(runner, 3, None)
    compiled = CompiledLayers(runner.body, runner.context, backend=refuses)
    assert torch.equal(decode_one_token(runner, 3, compiled), plain)
    assert "cannot be compiled" in caplog.text
    caplog.clear()
    assert torch.equal(decode_one_token(runner, 3, compiled), plain)
    assert not caplog.text
