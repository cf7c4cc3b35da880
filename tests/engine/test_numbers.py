"""The engine's log-probs and tokens against transformers' forward pass on the same tokens."""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slime.engine.embedded.engine import EngineCore, EngineTask
from slime.engine.embedded.http.requests import ModelFacts, parse_generate
from slime.engine.embedded.model import attention
from slime.engine.embedded.model.cpu_sampler import edit_logits
from slime.engine.embedded.options import parse_options
from slime.engine.embedded.sampling_params import parse_sampling_params
from slime.engine.embedded.scheduler import Sequence
from slime.errors import UserError
from slime.models import small
from tests.engine.conftest import Waiter
from tests.tiny_models import make_model_folder, make_tokenizer

LATENT: dict[str, Any] = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
LATENT |= {"v_head_dim": 16, "num_key_value_heads": 4}
SIGMOID: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SIGMOID |= {"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
DELTA: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
DELTA |= {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DELTA |= {"num_hidden_layers": 3}
DELTA_ROUNDING = 5e-3
"""Tolerance of log-probs: the state is summed in another order token by token than in chunks, and small vectors are
normalized to length one. The largest error in 40,000 tokens is 1.2e-3; a wrong state is off by at least 0.1."""
SOFTMAX: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
INDEXER: dict[str, Any] = {"index_topk": 64, "index_head_dim": 16, "index_n_heads": 2}
MODEL_TYPE = {"moonlight": "deepseek_v3"}  # model types that differ from the name here
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "qwen2": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {
        "sliding_window": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 16,
    },
    "gpt_oss": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": SOFTMAX,
    "granite": {"logits_scaling": 3.0},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": SIGMOID,
    "glm4_moe_lite": {**LATENT, **SIGMOID},
    "deepseek_v3": {**LATENT, **SIGMOID, "head_dim": 8},
    "moonlight": {**LATENT, **SIGMOID, "head_dim": 8, "q_lora_rank": None},
    "qwen3_next": {**DELTA, **SOFTMAX, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **SOFTMAX, "shared_expert_intermediate_size": 32},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm_moe_dsa": {**LATENT, **SIGMOID, **INDEXER},
    "qwen2_moe": {**SOFTMAX, "shared_expert_intermediate_size": 32, "use_sliding_window": True, "sliding_window": 8},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "deepseek_v32": {**LATENT, **SIGMOID, **INDEXER, "head_dim": 8},
}


@contextmanager
def running_core(folder: Path, *options: str) -> Iterator[EngineCore]:
    deaths: list[BaseException] = []
    core = EngineCore(parse_options(["--model-path", str(folder), *options]), on_death=deaths.append)
    core.load("cpu")
    core.start()
    yield core
    core.stop()
    assert not deaths


def generate(core: EngineCore, bodies: list[dict[str, Any]], eos: frozenset[int] = frozenset()) -> list[Sequence]:
    """Run the requests together with fixed seeds; return the sequences in the order of the requests."""
    facts = ModelFacts(make_tokenizer(), core.loaded.vocab_size, core.loaded.context_len, eos)
    waiter, sequences = Waiter(), []
    for i, body in enumerate(bodies):
        params = {"sampling_seed": i, **body.get("sampling_params", {})}
        [request], _ = parse_generate({"return_logprob": True, **body, "sampling_params": params}, facts)
        sequences += request.sequences(facts, waiter.notify)
    core.submit(sequences)
    waiter.wait(len(sequences))
    return sequences


def reference_logprobs(folder: Path, seq: Sequence, temperature: float = 1.0) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([seq.tokens])).logits[0, len(seq.prompt_ids) - 1 : -1]
    chosen = torch.tensor(seq.output_ids)[:, None]
    return (logits / temperature).log_softmax(-1).gather(1, chosen)[:, 0]


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, length).tolist()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probs_match_transformers(architecture: str, tmp_path: Path) -> None:
    model_type = MODEL_TYPE.get(architecture, architecture)
    folder = make_model_folder(tmp_path / architecture, model_type, **ARCHITECTURES[architecture])
    params = {"max_new_tokens": 12, "temperature": 0.7}
    with running_core(folder, "--chunked-prefill-size", "16") as core:
        bodies = [{"input_ids": prompt(i, n), "sampling_params": params} for i, n in enumerate((3, 11, 11, 40, 25))]
        sequences = generate(core, bodies)
    for seq in sequences:
        assert len(seq.output_ids) == 12
        want = reference_logprobs(folder, seq, temperature=0.7)
        atol = DELTA_ROUNDING if "layer_types" in ARCHITECTURES[architecture] else 2e-5
        torch.testing.assert_close(torch.tensor(seq.logprobs), want, atol=atol, rtol=0)


def test_log_probs_match_when_sequences_end_at_different_steps(qwen3_folder: Path) -> None:
    lengths = (40, 3, 25, 90, 12, 7, 61)
    with running_core(qwen3_folder) as core:
        bodies = [
            {"input_ids": prompt(i, 4 + 9 * i), "sampling_params": {"max_new_tokens": n, "ignore_eos": True}}
            for i, n in enumerate(lengths)
        ]
        sequences = generate(core, bodies)
    for seq, length in zip(sequences, lengths, strict=True):
        assert len(seq.output_ids) == length
        torch.testing.assert_close(torch.tensor(seq.logprobs), reference_logprobs(qwen3_folder, seq), atol=2e-5, rtol=0)


def test_greedy_follows_the_arg_max(qwen3_folder: Path) -> None:
    with running_core(qwen3_folder) as core:
        bodies = [
            {"input_ids": prompt(i, 5 + i), "sampling_params": {"max_new_tokens": 16, "temperature": 0}}
            for i in range(4)
        ]
        sequences = generate(core, bodies)
    model = AutoModelForCausalLM.from_pretrained(qwen3_folder, dtype=torch.float32).eval()
    for seq in sequences:
        ids = torch.tensor([seq.prompt_ids])
        for token in seq.output_ids:
            with torch.no_grad():
                assert int(model(input_ids=ids).logits[0, -1].argmax()) == token
            ids = torch.cat([ids, torch.tensor([[token]])], 1)


def test_sampling_follows_the_distribution(qwen3_folder: Path) -> None:
    """3,000 draws of the first token: each frequency within 5 standard errors of its probability."""
    ids, draws = prompt(3, 6), 3000
    with running_core(qwen3_folder) as core:
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 1.3, "n": draws}}
        sequences = generate(core, [body])
        assert core.steps.counters.cached_tokens >= (draws - 1) * (len(ids) - 1)
    model = AutoModelForCausalLM.from_pretrained(qwen3_folder, dtype=torch.float32).eval()
    with torch.no_grad():
        probs = (model(input_ids=torch.tensor([ids])).logits[0, -1] / 1.3).softmax(-1)
    seen = torch.bincount(torch.tensor([s.output_ids[0] for s in sequences]), minlength=len(probs)) / draws
    error = (probs * (1 - probs) / draws).sqrt()
    assert ((seen - probs).abs() <= 5 * error + 1e-3).all()


def test_top_k_top_p_and_min_p_restrict_the_support(qwen3_folder: Path) -> None:
    ids = prompt(4, 9)
    model = AutoModelForCausalLM.from_pretrained(qwen3_folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
    ordered, index = logits.softmax(-1).sort(descending=True)
    nucleus = set(index[: int((ordered.cumsum(0) < 0.5).sum()) + 1].tolist())
    cases = {
        "top_k": ({"top_k": 3}, set(index[:3].tolist())),
        "top_p": ({"top_p": 0.5}, nucleus),
        "min_p": ({"min_p": 0.4}, set(index[ordered >= 0.4 * ordered[0]].tolist())),
    }
    with running_core(qwen3_folder) as core:
        for name, (extra, support) in cases.items():
            params = {"max_new_tokens": 1, "n": 300, **extra}
            sequences = generate(core, [{"input_ids": ids, "sampling_params": params}])
            drawn = {s.output_ids[0] for s in sequences}
            assert drawn <= support, name
            assert len(drawn) > 1 or len(support) == 1, name
            want = logits.log_softmax(-1)  # log-probs of the full distribution, before the cut
            for seq in sequences[:5]:
                assert math.isclose(seq.logprobs[0], float(want[seq.output_ids[0]]), abs_tol=1e-4)


def test_logit_bias_and_minimum_length_take_effect(qwen3_folder: Path) -> None:
    ids = prompt(5, 7)
    with running_core(qwen3_folder) as core:
        free = generate(core, [{"input_ids": ids, "sampling_params": {"max_new_tokens": 8, "temperature": 0}}])[0]
        first = free.output_ids[0]
        never = {"max_new_tokens": 8, "temperature": 0, "logit_bias": {str(first): -1000.0}}
        assert first not in generate(core, [{"input_ids": ids, "sampling_params": never}])[0].output_ids
        always = {"max_new_tokens": 8, "temperature": 0, "logit_bias": {"77": 1000.0}}
        assert generate(core, [{"input_ids": ids, "sampling_params": always}])[0].output_ids == [77] * 8
        held = {"max_new_tokens": 8, "min_new_tokens": 4, "temperature": 0, "stop_token_ids": free.output_ids[:3]}
        assert len(generate(core, [{"input_ids": ids, "sampling_params": held}])[0].output_ids) >= 5


def test_penalties_follow_their_formulas() -> None:
    raw = {"frequency_penalty": 0.5, "presence_penalty": 0.25, "repetition_penalty": 2.0, "logit_bias": {"3": 1.0}}
    params = parse_sampling_params(raw, vocab_size=6)
    seq = Sequence("r", [0, 1], params, frozenset(), 8, lambda _: None)
    for token in (2, 2, 3):
        seq.append(token, 0.0, "v")
    edited = edit_logits(torch.tensor([4.0, -4.0, 2.0, 1.0, 1.0, -1.0]), seq)
    # seen tokens are halved (or doubled when negative), then 0.5 per occurrence and 0.25 for occurring in the output
    assert edited.tolist() == [2.0, -8.0, 1.0 - 1.25, 0.5 - 0.75 + 1.0, 1.0, -1.0]


def test_seeded_samples_repeat_in_any_batch(qwen3_folder: Path) -> None:
    body = {"input_ids": prompt(6, 8), "sampling_params": {"max_new_tokens": 10, "sampling_seed": 17}}
    with running_core(qwen3_folder) as core:
        alone = generate(core, [body])[0].output_ids
        crowd = generate(
            core, [{"input_ids": prompt(i, 9), "sampling_params": {"max_new_tokens": 9}} for i in range(5)] + [body]
        )
    assert crowd[-1].output_ids == alone


def test_lookahead_gives_the_same_tokens_and_correct_log_probs(qwen3_folder: Path) -> None:
    """Launching a step before the last one is read, as on CUDA: same tokens, correct log-probs, no slot lost."""
    bodies = [
        {
            "input_ids": prompt(i, 6 + i % 3),
            "sampling_params": {
                "max_new_tokens": 5 + 3 * i,
                "sampling_seed": i,
                "stop_token_ids": list(range(100, 130)),
            },
        }
        for i in range(10)
    ]
    answers = []
    for ahead in (False, True):
        with running_core(qwen3_folder) as core:
            core.runner.looks_ahead = ahead
            sequences = generate(core, bodies)
            answers.append([(s.output_ids, s.finish) for s in sequences])
            core.call(core.flush_cache).result()
            assert core.scheduler.cache.pool.free == core.loaded.capacity
        for seq in sequences:
            want = reference_logprobs(qwen3_folder, seq)
            torch.testing.assert_close(torch.tensor(seq.logprobs), want, atol=2e-5, rtol=0)
    assert answers[0] == answers[1]
    reasons = [finish["type"] for _, finish in answers[0]]
    assert {"stop", "length"} <= set(reasons)


class LateInbox:
    """An engine inbox that gets a command right after it was seen empty while a step was in flight."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[EngineTask] = queue.SimpleQueue()
        self.put, self.get = self._queue.put, self._queue.get
        self.late: Callable[[], None] | None = None
        self.in_flight: Callable[[], bool] = lambda: False

    def empty(self) -> bool:
        answer = self._queue.empty()
        if answer and self.late is not None and self.in_flight():
            self._queue.put(EngineTask(self.late))
            self.late = None
        return answer


@pytest.mark.parametrize("command", ["update", "retract"])
def test_command_during_a_step_runs_after_its_tokens_are_read(command: str, qwen3_folder: Path, tmp_path: Path) -> None:
    """A token sampled with the old weights is never reported with the new version, and no slot is lost."""
    other = make_model_folder(tmp_path / "other", seed=1)
    core = EngineCore(parse_options(["--model-path", str(qwen3_folder)]), on_death=lambda error: None)
    inbox = LateInbox()
    core._inbox = inbox  # type: ignore[assignment]
    core.load("cpu")
    core.runner.looks_ahead = True
    flights: list[int] = []

    def late() -> None:
        flights.append(len(core.steps.flights))
        if command == "update":
            core.weights.update_from_folder(str(other), "new", flush=True)
        else:
            core.pause("retract")
            core.resume()

    inbox.late, inbox.in_flight = late, lambda: bool(core.steps.flights)
    core.start()
    params = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    [seq] = generate(core, [{"input_ids": prompt(1, 6), "sampling_params": params}])
    core.call(core.flush_cache).result()
    assert core.scheduler.cache.pool.free == core.loaded.capacity
    core.stop()
    assert flights == [0]
    old = (torch.tensor(seq.logprobs) - reference_logprobs(qwen3_folder, seq)).abs() < 2e-5
    spans = dict(seq.versions)
    assert old[: spans.get("new", len(old))].all()
    if command == "update":
        assert not old[spans["new"]]


def test_prompt_log_probs_match_transformers(qwen3_folder: Path) -> None:
    ids = prompt(7, 30)
    body = {"input_ids": ids, "logprob_start_len": 4, "sampling_params": {"max_new_tokens": 0}}
    with running_core(qwen3_folder, "--chunked-prefill-size", "7") as core:
        for _ in range(2):  # in the second pass a cached prefix must not hide positions
            [seq] = generate(core, [body])
            assert seq.output_ids == []
            assert len(seq.input_logprobs) == 25
    model = AutoModelForCausalLM.from_pretrained(qwen3_folder, dtype=torch.float32).eval()
    with torch.no_grad():
        want = model(input_ids=torch.tensor([ids])).logits[0, 4:-1].log_softmax(-1)
    want = want.gather(1, torch.tensor(ids[5:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(seq.input_logprobs), want, atol=2e-5, rtol=0)


def test_memory_pressure_retracts_and_stays_exact(qwen3_folder: Path) -> None:
    """12 sequences of 36 tokens in 100 slots: some are retracted, and every log-prob stays correct."""
    params = {"max_new_tokens": 24}
    with running_core(qwen3_folder, "--max-total-tokens", "100", "--max-running-requests", "8") as core:
        sequences = generate(core, [{"input_ids": prompt(i, 12), "sampling_params": params} for i in range(12)])
        core.call(core.flush_cache).result()
        assert core.scheduler.cache.pool.free == 100
        assert core.scheduler.retractions > 0
    for seq in sequences:
        want = reference_logprobs(qwen3_folder, seq)
        torch.testing.assert_close(torch.tensor(seq.logprobs), want, atol=2e-5, rtol=0)


def test_prefixes_are_shared(qwen3_folder: Path) -> None:
    ids = prompt(8, 40)
    with running_core(qwen3_folder) as core:
        params = {"max_new_tokens": 6, "n": 8}
        [first, *others] = generate(core, [{"input_ids": ids, "sampling_params": params}])
        assert first.cached_tokens == 0
        assert [s.cached_tokens for s in others] == [39] * 7  # all but the token that gives the logits
        follow_up = first.tokens + prompt(9, 5)
        [turn] = generate(core, [{"input_ids": follow_up, "sampling_params": {"max_new_tokens": 4}}])
        assert turn.cached_tokens == len(first.tokens) - 1  # the last sampled token was never computed
    torch.testing.assert_close(torch.tensor(turn.logprobs), reference_logprobs(qwen3_folder, turn), atol=2e-5, rtol=0)


def test_fused_experts_are_updated_by_checkpoint_names(tmp_path: Path) -> None:
    """transformers fuses experts while loading; an update uses the checkpoint's names, in several files."""
    extra = ARCHITECTURES["qwen3_moe"]
    first = make_model_folder(tmp_path / "first", "qwen3_moe", **extra)
    other = make_model_folder(tmp_path / "other", "qwen3_moe", seed=1, **extra)
    tensors = list(load_file(other / "model.safetensors").items())
    for name, part in (("a", tensors[:20]), ("b", tensors[20:])):
        save_file(dict(part), tmp_path / f"{name}.safetensors", metadata={"format": "pt"})
    paths = [str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")]
    with running_core(first) as core:
        core.call(lambda: core.weights.update_from_files(paths, "1", flush=True)).result()
        [seq] = generate(core, [{"input_ids": prompt(2, 9), "sampling_params": {"max_new_tokens": 8}}])
    torch.testing.assert_close(torch.tensor(seq.logprobs), reference_logprobs(other, seq), atol=2e-5, rtol=0)


def test_weight_updates_reach_packed_layers(tmp_path: Path) -> None:
    wide = {"hidden_size": 512, "intermediate_size": 1024, "initializer_range": 0.05}
    first = make_model_folder(tmp_path / "first", **wide)
    other = make_model_folder(tmp_path / "other", seed=1, **wide)
    bodies = [{"input_ids": prompt(i, 5 + 3 * i), "sampling_params": {"max_new_tokens": 6}} for i in range(3)]
    with running_core(first) as core:
        before = generate(core, bodies)
        core.call(lambda: core.weights.update_from_folder(str(other), "1", flush=True)).result()
        after = generate(core, bodies)
    for folder, sequences in ((first, before), (other, after)):
        for seq in sequences:
            want = reference_logprobs(folder, seq)
            torch.testing.assert_close(torch.tensor(seq.logprobs), want, atol=2e-5, rtol=0)


def test_rejects_models_with_state_outside_attention(tmp_path: Path) -> None:
    extra = {"state_size": 8, "num_hidden_layers": 2, "hidden_size": 32}
    folder = make_model_folder(tmp_path / "mamba", "mamba", **extra)
    with pytest.raises(UserError, match="outside transformers' attention interface"), running_core(folder):
        pass


HYBRID = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}


@pytest.mark.parametrize("scale", [0.2, 0.02])
def test_rejects_a_model_that_is_computed_wrongly(scale: float, tmp_path: Path) -> None:
    """Every layer of Falcon-H1 uses the attention interface and also keeps a separate state."""
    folder = make_model_folder(tmp_path / "hybrid", "falcon_h1", **HYBRID, initializer_range=scale)
    wrong = r"computes falcon_h1 models wrongly \(a log-prob differs by [0-9.e-]+ from its plain forward\)"
    with pytest.raises(UserError, match=wrong), running_core(folder):
        pass


@pytest.mark.parametrize("window", [20, 200])
@pytest.mark.parametrize("model_type", ["qwen2_moe", "phimoe"])
def test_windows_given_only_by_the_mask_are_verified(
    model_type: str, window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that reads windows from the arguments only must not start."""
    more = {**ARCHITECTURES[model_type], "sliding_window": window}
    folder = make_model_folder(tmp_path / "model", model_type, **more)
    with running_core(folder) as core:
        assert window in core.runner.context.windows.values()
    monkeypatch.setattr(attention, "window_of", lambda mask, argument: argument)
    with pytest.raises(UserError, match=f"computes {model_type} models wrongly"), running_core(folder):
        pass


@pytest.mark.parametrize(("dtype", "scale"), [("float32", 1e-4), ("bfloat16", 0.02)])
def test_wrong_scale_is_detected_despite_small_weights_or_bfloat16(
    dtype: str, scale: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small weights make attention uniform at any scale, and bfloat16 rounding exceeds the effect of a wrong scale."""
    folder = make_model_folder(tmp_path / "model", initializer_range=scale)
    rules = attention.Rules
    monkeypatch.setattr(attention, "Rules", lambda scale, *more: rules(1.1 * scale, *more))
    wrong = r"computes qwen3 models wrongly \(a log-prob differs by [0-9.e-]+ from its plain forward\)"
    with pytest.raises(UserError, match=wrong), running_core(folder, "--dtype", dtype):
        pass


@pytest.mark.parametrize("window", [20, 200])
def test_falls_back_to_own_weights_without_a_small_model(
    window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose windows are too wide for this comparison is rejected."""

    def refuse(*_: Any) -> None:
        raise UserError("transformers cannot compute a small mistral model")

    monkeypatch.setattr(small, "small_model", refuse)
    folder = make_model_folder(tmp_path / "model", "mistral", sliding_window=window)
    if window == 200:
        with pytest.raises(UserError, match="transformers cannot compute a small mistral model"), running_core(folder):
            pass
        return
    with running_core(folder):
        pass
    monkeypatch.setattr(attention, "window_of", lambda mask, argument: None)
    with pytest.raises(UserError, match="computes mistral models wrongly"), running_core(folder):
        pass


def test_rejects_model_code_that_cannot_run_over_slots(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model", "modernbert-decoder", bos_token_id=1, cls_token_id=3)
    wrong = r"cannot compute modernbert-decoder models \(.*\): serve it with SGLang"
    with pytest.raises(UserError, match=wrong), running_core(folder):
        pass


def test_load_check_runs_with_one_row_and_a_tiny_cache(qwen3_folder: Path) -> None:
    """The check runs with one request row and a cache of fewer tokens than it writes."""
    with running_core(qwen3_folder, "--max-running-requests", "1", "--max-total-tokens", "4") as core:
        [seq] = generate(core, [{"input_ids": prompt(1, 2), "sampling_params": {"max_new_tokens": 2}}])
    torch.testing.assert_close(torch.tensor(seq.logprobs), reference_logprobs(qwen3_folder, seq), atol=2e-5, rtol=0)


def test_context_is_limited_to_the_indexer_topk(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "sparse", "glm_moe_dsa", **{**ARCHITECTURES["glm_moe_dsa"], "index_topk": 32})
    with running_core(folder) as core:
        assert core.loaded.context_len == 32
        [seq] = generate(core, [{"input_ids": prompt(1, 20), "sampling_params": {"max_new_tokens": 30}}])
        assert len(seq.tokens) == 32
    torch.testing.assert_close(torch.tensor(seq.logprobs), reference_logprobs(folder, seq), atol=2e-5, rtol=0)
    wrong = "does not attend to every token in sequences above 32 tokens: set --context-length to 32 at most"
    with pytest.raises(UserError, match=wrong), running_core(folder, "--context-length", "33"):
        pass


def test_context_is_limited_to_the_original_rope_length(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    original = {"original_max_position_embeddings": 64}
    folder = make_model_folder(tmp_path / "long", "phi3", rope_parameters={**rope, **original}, **original)
    with running_core(folder) as core:
        assert core.loaded.context_len == 64
        [seq] = generate(core, [{"input_ids": prompt(1, 50), "sampling_params": {"max_new_tokens": 20}}])
        assert len(seq.tokens) == 64
    torch.testing.assert_close(torch.tensor(seq.logprobs), reference_logprobs(folder, seq), atol=2e-5, rtol=0)
    with pytest.raises(UserError, match="sequences above 64 tokens"), running_core(folder, "--context-length", "65"):
        pass
