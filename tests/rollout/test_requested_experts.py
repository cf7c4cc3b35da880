"""Routed experts that the engine returns with the tokens for rollout routing replay."""

import base64
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from slime.data.buffer import JournaledSource
from slime.data.sample import Sample
from slime.engine.http.errors import EngineProtocolError
from slime.engine.http.protocol import GenerateResult
from slime.rollout.gate import as_evaluation
from slime.rollout.generate import generate
from slime.rollout.outcomes import leaves
from slime.rollout.sglang_rollout import generate_rollout
from tests.data.journal_samples import open_journal

LAYERS, TOPK, NUM_EXPERTS = 3, 2, 8


@pytest.fixture(scope="session")
def moe_folder(model_folder, tmp_path_factory):
    """A model folder whose first layer has no experts."""
    folder = tmp_path_factory.mktemp("routed") / "model"
    shutil.copytree(model_folder, folder)
    facts = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": LAYERS}
    facts |= {"num_experts": NUM_EXPERTS, "num_experts_per_tok": TOPK, "mlp_only_layers": [0]}
    (folder / "config.json").write_text(json.dumps(facts))
    return str(folder)


def expert_rows(ids, start=0):
    """Experts of each token but the last, computed from its id; the first layer has none."""
    experts = np.array([[[0, 0], [t % 7, 7], [7, t % 7]] for t in ids[:-1]], dtype=np.int32).reshape(-1, LAYERS, TOPK)
    return experts[start:]


def answer(engine, body, text, **more):
    """An answer in SGLang's format: rows from the requested start, without that start."""
    meta = {}
    if body.get("return_routed_experts"):
        ids = [*body["input_ids"], *engine.encode(text)[: body["sampling_params"]["max_new_tokens"]]]
        sent = expert_rows(ids, body.get("routed_experts_start_len", 0))
        meta["routed_experts"] = base64.b64encode(sent.tobytes()).decode()
    return {"text": text, "meta": meta, **more}


def test_routed_experts_are_requested_once_per_token(engine, make_runtime, moe_folder):
    texts = [("ab", "abort"), ("", "abort"), ("c</s>", "stop")]

    def respond(body):
        text, finish = texts.pop(0)
        return answer(engine, body, text, finish=finish)

    engine.respond = respond
    runtime = make_runtime([engine.url], hf_checkpoint=moe_folder, use_rollout_routing_replay=True)
    sample = runtime.run(generate(runtime, Sample(prompt="xy"), runtime.state.sampling_params), 20)
    assert [request["return_routed_experts"] for request in engine.requests] == [True] * 3
    assert [request.get("routed_experts_start_len") for request in engine.requests] == [None, 3, 3]
    assert sample.response == "abc"
    assert sample.rollout_routed_experts.dtype == np.uint8
    np.testing.assert_array_equal(sample.rollout_routed_experts, expert_rows(sample.tokens))
    texts.append(("z</s>", "stop"))
    with as_evaluation():
        evaluated = runtime.run(generate(runtime, Sample(prompt="xy"), runtime.state.sampling_params), 20)
    assert evaluated.rollout_routed_experts is None
    assert "return_routed_experts" not in engine.requests[-1]


def test_invalid_routed_experts_fail_only_their_sample(engine, make_runtime, prompts, moe_folder, tmp_path):
    def respond(body):
        said = answer(engine, body, "7</s>")
        first, sent = body["input_ids"][0], expert_rows([*body["input_ids"], *engine.encode("7</s>")])
        wrong = {"b": np.full_like(sent, NUM_EXPERTS), "c": np.zeros_like(sent), "d": sent[:1]}
        by_id = {engine.encode(letter)[0]: experts for letter, experts in wrong.items()}
        if first in by_id:
            said["meta"]["routed_experts"] = base64.b64encode(by_id[first].tobytes()).decode()
        return {"text": "7</s>"} if first == engine.encode("e")[0] else said

    engine.respond = respond
    runtime = make_runtime(
        [engine.url], hf_checkpoint=moe_folder, use_rollout_routing_replay=True, rollout_batch_size=5, rm_type="random"
    )
    runtime.journal = open_journal(tmp_path)
    source = JournaledSource(prompts(["a", "b", "c", "d", "e"], n=1), runtime.journal)
    samples = {sample.prompt: sample for sample in leaves(generate_rollout(runtime.args, 0, source).samples)}
    assert samples["a"].failure is None
    np.testing.assert_array_equal(samples["a"].rollout_routed_experts, expert_rows(samples["a"].tokens))
    for prompt, cause in {
        "b": "contains expert 8, but the model has 8 experts",
        "c": "only zeros for token 0 in layer 1",
        "d": "1 rows for 3 tokens, not 2",
        "e": "rollout_routed_experts is missing",
    }.items():
        assert cause in samples[prompt].failure, prompt
        assert samples[prompt].rollout_routed_experts is None
    runtime.journal.assign(0, [[sample] for sample in samples.values()], {})
    [[back], *_] = runtime.journal.batch(0)[0]
    np.testing.assert_array_equal(back.rollout_routed_experts, expert_rows(back.tokens))
    assert back.rollout_routed_experts.dtype == np.uint8


def test_undecodable_routed_experts_are_rejected(tmp_path: Path) -> None:
    meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [], "routed_experts": "AAA"}
    with pytest.raises(EngineProtocolError, match="routed_experts is not base64 of int32"):
        GenerateResult.from_json({"text": "", "meta_info": meta}, url="http://engine")
