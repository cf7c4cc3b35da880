"""Tests routing replay: routers reuse the experts chosen by the engine or by the first pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from slime.data.routed_experts import RouterDimensions
from slime.data.sample import Sample
from slime.data.validation import Bounds, check_sample
from slime.errors import UserError
from slime.train.backends.fsdp.attention import ATTENTION_NAME, register_packed_attention
from slime.train.backends.fsdp.backend import recompute_layers
from slime.train.backends.fsdp.packed_model import PolicyModel
from slime.train.backends.fsdp.routing_replay import SCORINGS
from slime.train.samples.batch import flatten_samples, make_train_batch
from slime.train.samples.carryover import prepend_carried
from slime.train.samples.dp_shards import open_share
from slime.train.samples.micro_batch import UNKNOWN, Routing, given_experts, mismatch
from slime.train.samples.packing import PackedRow, pack
from slime.train.topology import Ranks
from tests.engine.test_experts import routed
from tests.engine.test_numbers import prompt, running_core
from tests.peers import together
from tests.tiny_models import make_model_folder
from tests.train.in_process import InProcess, config_for
from tests.train.test_packed import LENGTHS, sequences
from tests.train.tiny_training import SIZES, make_samples

EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
GROUPED = {**ROUTED, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 3, "pad_token_id": 0}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "qwen2_moe": {**ROUTED, **EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 32},
    "mixtral": LOCAL,
    "gpt_oss": {**LOCAL, "head_dim": 16, "sliding_window": 6},
    "deepseek_v3": {**GROUPED, **LATENT, "num_key_value_heads": 4},
    "glm4_moe": {**GROUPED, "head_dim": 16},
    "glm4_moe_lite": {**GROUPED, **LATENT, "num_key_value_heads": 4},
    "minimax_m2": {**LOCAL, "head_dim": 16, "rotary_dim": 16},
}
RESPONSES = [response for _, response in LENGTHS]
TOKENS = sum(length for length, _ in LENGTHS)


def config_of(family: str) -> Any:
    return AutoConfig.for_model(family, **{**SIZES, "num_hidden_layers": 3, **FAMILIES[family]})


def build(family: str, attention: str = "eager") -> Any:
    torch.manual_seed(0)
    config = config_of(family)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("gate.weight", "router.weight")):
                tensor.normal_()  # choices that differ from token to token
            elif name.endswith("e_score_correction_bias"):
                tensor.uniform_(0, 0.3)
    return model


def packed_policy(family: str) -> PolicyModel:
    register_packed_attention()
    policy = PolicyModel(build(family, ATTENTION_NAME))
    policy.enable_routing_replay()
    assert policy.routers is not None
    policy.routers.check()
    return policy


def random_experts(layers: int, seed: int = 0) -> list[np.ndarray]:
    """Make rows like those of an engine: three distinct experts of eight for each token but the last."""
    generator = np.random.default_rng(seed)
    return [
        np.argsort(generator.random((length - 1, layers, 8)), axis=-1)[..., :3].astype(np.uint8)
        for length, _ in LENGTHS
    ]


def random_routing(layers: int = 3, seed: int = 0, num_tokens: int = TOKENS) -> Routing:
    return Routing(given_experts(random_experts(layers, seed), [length for length, _ in LENGTHS], num_tokens))


@contextmanager
def forced_routing(monkeypatch: pytest.MonkeyPatch, model: Any, experts: np.ndarray) -> Iterator[None]:
    """Replace only the choice of experts in the model's own code; this is the reference."""
    original, layers = torch.topk, RouterDimensions.from_config(model.config.to_dict()).moe_layers
    calls = iter(layers)

    def topk(scores: Tensor, k: int, *args: Any, **keywords: Any) -> Any:
        if (k, scores.shape[-1]) != (3, 8):
            return original(scores, k, *args, **keywords)
        own = original(scores, k, *args, **keywords)[1]
        rows = torch.from_numpy(experts[:, next(calls)].astype(np.int64))
        chosen = torch.cat([rows, own[len(rows) :]])
        return scores.gather(1, chosen), chosen

    with monkeypatch.context() as patch:
        patch.setattr(torch, "topk", topk)
        yield
    assert next(calls, None) is None


@pytest.mark.parametrize("family", list(FAMILIES))
def test_given_routing_matches_model_with_forced_experts(family, monkeypatch) -> None:
    policy, experts = packed_policy(family), random_experts(3)
    log_probs, _ = policy(pack(sequences(), RESPONSES), routing=random_routing())
    log_probs.sum().backward()
    single, expected = build(family), []
    for sequence, response, rows in zip(sequences(), RESPONSES, experts, strict=True):
        tokens = torch.from_numpy(sequence)[None]
        with forced_routing(monkeypatch, single, rows):
            logits = single(input_ids=tokens).logits[0, -response - 1 : -1]
        found = torch.log_softmax(logits, -1).gather(1, tokens[0, -response:, None])[:, 0]
        found.sum().backward()
        expected.append(found.detach())
    torch.testing.assert_close(log_probs.detach(), torch.cat(expected), rtol=0, atol=1e-5)
    for (name, own), other in zip(policy.model.named_parameters(), single.parameters(), strict=True):
        if other.grad is None:
            assert own.grad is None or not own.grad.any(), name
        else:
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("recompute", [False, True])
def test_recorded_routing_is_replayed_without_changing_results(family, recompute) -> None:
    row, found = pack(sequences(), RESPONSES), []
    for repeats in (False, True):
        policy = packed_policy(family)
        routing = Routing() if repeats else None
        if recompute:
            recompute_layers(policy.model)
        log_probs, _ = policy(row, routing=routing)
        log_probs.sum().backward()
        found.append([log_probs.detach(), *(p.grad for p in policy.parameters() if p.grad is not None)])
    for plain, repeated in zip(*found, strict=True):
        assert torch.equal(plain, repeated)
    routed = RouterDimensions.from_config(config_of(family).to_dict())
    assert tuple(routing.recorded) == routed.moe_layers == tuple(policy.routers.layers)
    assert all(experts.shape == (TOKENS, 3) for experts in routing.recorded.values())
    before = {layer: experts.clone() for layer, experts in routing.recorded.items()}
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith(("gate.weight", "router.weight")):
                parameter.copy_(-parameter)  # reverses the preferences of every router
    policy(row, routing=routing)
    compared, differing = mismatch([routing], torch.device("cpu")).tolist()
    repeats_in_backward = 3 * TOKENS * len(before) if recompute else 0
    assert compared == 3 * TOKENS * len(before) + repeats_in_backward
    assert differing > 0.5 * 3 * TOKENS * len(before)
    assert all(torch.equal(routing.recorded[layer], experts) for layer, experts in before.items())


def test_rejects_routing_replay_for_unsupported_models() -> None:
    assert set(FAMILIES) <= set(SCORINGS)
    register_packed_attention()
    config = AutoConfig.for_model("qwen3", **SIZES, head_dim=16)
    dense = PolicyModel(AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME))
    dense.enable_routing_replay()
    with pytest.raises(UserError, match="--use-routing-replay does not support the routers of Qwen3ForCausalLM"):
        dense.routers.check()


def test_rejects_router_with_unexpected_weights(monkeypatch) -> None:
    policy = packed_policy("qwen3_moe")
    monkeypatch.setattr(policy.routers, "_scoring", SCORINGS["gpt_oss"])
    policy.model.model.layers[1].mlp.gate.norm_topk_prob = False
    with pytest.raises(UserError, match="Qwen3MoeTopKRouter of this version of transformers weighs its experts"):
        policy(pack(sequences(), RESPONSES), routing=random_routing())


def test_given_experts_are_unknown_for_last_tokens_and_padding() -> None:
    rows = [np.arange(6).reshape(3, 1, 2), np.arange(2).reshape(1, 1, 2)]
    experts = given_experts(rows, [4, 3], num_tokens=8)
    assert experts[:, 0].tolist() == [[0, 1], [2, 3], [4, 5], [UNKNOWN] * 2, [0, 1], *([[UNKNOWN] * 2] * 3)]


def shared_row(size: int) -> PackedRow:
    return pack(sequences(), RESPONSES, multiple=size)


def compare_shared(ranks: Ranks) -> None:
    alone, shared = packed_policy("qwen3_moe"), packed_policy("qwen3_moe")
    shared.set_context_ranks(ranks)
    row = shared_row(ranks.size)
    for routing in (lambda: random_routing(num_tokens=row.num_tokens), Routing):
        first, second = routing(), routing()
        expected, got = alone(row, routing=first)[0], shared(row, routing=second)[0]
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
        for layer, experts in second.recorded.items():
            own = row.num_tokens // ranks.size
            assert torch.equal(experts, first.recorded[layer][own * ranks.rank : own * (ranks.rank + 1)])
        again = shared(row, routing=second)[0]
        assert torch.equal(again, got)


def test_context_parallel_ranks_replay_their_part_of_the_row(tmp_path: Path) -> None:
    together(2, compare_shared, folder=tmp_path)


# whole updates


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("routed") / "model"
    build("qwen3_moe").save_pretrained(path)
    return path


def routed_samples(make: Callable[[Sample], np.ndarray]) -> list[list[Sample]]:
    groups = make_samples(3, 3)
    for sample in flatten_samples(groups):
        sample.rollout_routed_experts = make(sample)
    return groups


def random_rows(sample: Sample) -> np.ndarray:
    generator = np.random.default_rng(sample.index)
    return np.argsort(generator.random((sample.total_length - 1, 3, 8)), axis=-1)[..., :3].astype(np.uint8)


def test_rollout_routing_replay_reproduces_engine_log_probs(moe_folder, tmp_path, monkeypatch) -> None:
    """The "engine" has the same weights and other experts: the trainer replays them in its passes, the reference does
    not."""
    engine, groups = build("qwen3_moe"), routed_samples(random_rows)
    for sample in flatten_samples(groups):
        tokens = torch.tensor([sample.tokens])
        with torch.no_grad(), forced_routing(monkeypatch, engine, sample.rollout_routed_experts):
            logits = engine(input_ids=tokens).logits[0, -sample.response_length - 1 : -1]
        log_p = torch.log_softmax(logits, -1).gather(1, tokens[0, -sample.response_length :, None])[:, 0]
        sample.rollout_log_probs = log_p.tolist()
    gaps, references = {}, {}
    for replays in (False, True):
        config = config_for(
            moe_folder, tmp_path, use_rollout_routing_replay=replays, use_kl_loss=True, num_steps_per_rollout=1
        )
        run = InProcess(config)
        answer = run.train(0, groups)
        [step] = answer["metrics"]
        gaps[replays] = step["train/train_rollout_logprob_abs_diff"]
        references[replays] = answer["rollout_metrics"]["rollout/ref_log_probs"]
        assert ("train/routing_mismatch" in step) is replays
    assert gaps[True] < 1e-6 < 1e-3 < gaps[False]
    assert references[True] == references[False]
    assert 0.3 < step["train/routing_mismatch"] < 1.0


def test_later_updates_replay_routing_of_the_first_pass(moe_folder, tmp_path) -> None:
    mismatches: dict[bool, list[float | None]] = {}
    for replays in (False, True):
        config = config_for(
            moe_folder,
            tmp_path,
            use_routing_replay=replays,
            num_steps_per_rollout=3,
            lr=3e-2,
            use_rollout_logprobs=True,
        )
        steps = InProcess(config).train(0, make_samples(3, 3))["metrics"]
        mismatches[replays] = [step.get("train/routing_mismatch") for step in steps]
    assert mismatches[False] == [None] * 3
    first, *later = mismatches[True]
    assert first == 0.0
    assert all(share > 0.0 for share in later if share is not None)
    assert None not in later


def test_critic_ignores_rollout_routing(moe_folder, tmp_path) -> None:
    found = []
    for replays in (False, True):
        config = config_for(
            moe_folder, tmp_path, use_rollout_routing_replay=replays, advantage_estimator="ppo", num_critic_only_steps=1
        )
        steps = InProcess(config).train(0, routed_samples(random_rows))["metrics"]
        found.append([{k: v for k, v in step.items() if "critic" in k or "value" in k} for step in steps])
    assert found[0] == found[1]
    assert found[0][0]


def test_rejects_missing_routing_except_for_removed_or_carried_samples(moe_folder, tmp_path) -> None:
    config = config_for(moe_folder, tmp_path, use_rollout_routing_replay=True)
    [[bare, *_], *_] = make_samples(1, 1)
    with pytest.raises(UserError, match="sample 0 has no rollout_routed_experts"):
        make_train_batch(config, [bare])
    bare.remove_sample = True
    samples = flatten_samples(routed_samples(random_rows))
    batch = make_train_batch(config, [bare, *samples])
    assert [rows.shape for rows in batch.rollout_routed_experts[:2]] == [(0, 3, 3), (samples[0].total_length - 1, 3, 3)]
    again = open_share({"batch": batch.to_message()})
    for sent, come in zip(batch.rollout_routed_experts, again.rollout_routed_experts, strict=True):
        assert come.dtype == np.uint8
        assert np.array_equal(sent, come)
    carried = make_train_batch(config.replace(use_rollout_routing_replay=False), samples[:2])
    joined = prepend_carried(carried, batch)
    assert [len(rows) for rows in joined.rollout_routed_experts[:3]] == [0, 0, 0]
    assert joined.rollout_routed_experts[3] is batch.rollout_routed_experts[1]


def test_routing_replay_reduces_gap_to_bfloat16_engine(tmp_path: Path) -> None:
    """The engine runs in bfloat16 and the trainer in float32: routers near ties choose differently, and replay removes
    that part of the difference."""
    folder = make_model_folder(
        tmp_path / "model", "qwen3_moe", num_experts=32, num_experts_per_tok=4, moe_intermediate_size=32
    )
    args = SimpleNamespace(num_layers=2, moe_router_topk=4)
    with running_core(folder, "--dtype", "bfloat16") as core:
        sent = [{"input_ids": prompt(i, 12), "sampling_params": {"max_new_tokens": 40}} for i in range(12)]
        answers = routed(core, *({**body, "return_logprob": True} for body in sent))
    samples = []
    for index, (seq, meta) in enumerate(answers):
        sample = Sample(index=index, group_index=index // 4, tokens=list(seq.prompt_ids), reward=float(index % 3))
        log_probs, ids, *_ = zip(*meta["output_token_logprobs"], strict=True)
        sample.append_response_tokens(args, tokens=list(ids), log_probs=list(log_probs), meta_info=meta)
        check_sample(sample, Bounds(routed=RouterDimensions.of(folder)))
        samples.append(sample)
    found = {}
    for replays in (False, True):
        config = config_for(folder, tmp_path, use_rollout_routing_replay=replays, rollout_max_response_len=40)
        [found[replays]] = InProcess(config).train(0, [samples[i : i + 4] for i in (0, 4, 8)])["metrics"]
    name = "train/train_rollout_logprob_abs_diff"
    assert 0.001 < found[True]["train/routing_mismatch"] < 0.2
    assert found[True][name] < found[False][name]
