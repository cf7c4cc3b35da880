from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import slime
from slime import cli
from slime.cluster import devices
from slime.config import Config, resolve
from slime.driver.plan.memory import engine_memory, trainer_memory
from slime.driver.plan.plan import choose_rollout_backend, make_plan
from slime.driver.plan.schedule import planned_machines
from slime.errors import UserError
from slime.models.shape import ModelShape
from tests.model_files import add_weights

# Qwen3-0.6B, whose published size is 0.6 B parameters (596,049,920)
QWEN3_06B = {
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
PARAMETERS = 596_049_920


@pytest.fixture
def flags(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B))
    add_weights(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"input": "1", "label": "1"}\n')
    return {
        "hf_checkpoint": str(tmp_path),
        "prompt_data": str(prompts),
        "label_key": "label",
        "rollout_batch_size": 32,
        "n_samples_per_prompt": 8,
        "num_steps_per_rollout": 2,
        "num_rollout": 10,
        "rollout_max_response_len": 512,
        "rollout_max_prompt_len": 128,
        "rm_type": "math",
        "output_dir": str(tmp_path / "out"),
        "save": str(tmp_path / "ckpt"),
        "device": "cpu",
    }


def test_plan_notes_trainers_that_may_get_no_samples(flags: dict[str, Any]) -> None:
    few = {**flags, "rollout_batch_size": 2, "n_samples_per_prompt": 2, "num_steps_per_rollout": 1}
    layout = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}
    plan = make_plan(resolve(Config(**few, actor_num_gpus_per_node=8, **layout)), device="cpu", gpu_count=0)
    assert dict(dict(plan.sections)["Batches"])["per trainer"].startswith("0 to 1 samples")
    assert [note for note in plan.notes if "may leave 4 of the 8 training processes without samples" in note]


def test_plan_shows_batch_and_step_arithmetic(flags: dict[str, Any]) -> None:
    plan = make_plan(resolve(Config(**flags, actor_num_gpus_per_node=3)), device="cpu", gpu_count=0)
    text = plan.render()
    assert "32 prompts x 8 samples = 256 samples" in text
    assert "2 optimizer steps of 128 samples" in text
    assert "42 to 43 samples, 1 per forward pass" in text
    assert "10 rollout steps, 20 optimizer steps" in text
    assert plan.optimizer_steps == 20
    assert [(process.name, process.count) for process in plan.processes] == [
        ("driver", 1),
        ("engine", 3),
        ("trainer", 3),
    ]
    assert plan.gpus_needed == 0
    assert not Path(flags["output_dir"]).exists()


def test_memory_estimate_of_a_known_shape(flags: dict[str, Any]) -> None:
    config = resolve(Config(**flags, use_kl_loss=True, engine_max_total_tokens=1000, log_probs_chunk_size=100))
    shape = ModelShape.from_folder(flags["hf_checkpoint"])
    half, head, layer = PARAMETERS // 2, 151936 * 1024, (PARAMETERS - 151936 * 1024 - 1024) // 28
    estimate = trainer_memory(config, shape, device="cuda", trainers=2)
    # residuals and norm outputs, queries and attention outputs, keys and values, gate and up
    kept = 2 * (4 * 1024 + 3 * 2048 + 3 * 1024 + 2 * 3072)
    assert estimate.peak == "loss"
    assert estimate.parts == {
        "weights": 4 * half,
        "Adam moments": 8 * half,
        "reference": 2 * half,
        "gradients": 4 * half,
        "whole weights": 2 * (head + 1024 + layer),
        "activations": 640 * (28 * kept + 10 * 1024),
        "logits": 4 * 100 * 151936 * 3 // 2 + 8 * head + 2 * 512 * 151936,  # last term: gradients kept for the backward
    }
    engine = engine_memory(config, shape, dtype="bfloat16", device="cuda", available=None)
    assert engine.parts == {"weights": 2 * PARAMETERS, "KV cache": 1000 * 2 * 28 * 8 * 128 * 2}
    unbounded = config.replace(engine_max_total_tokens=None)
    on_cpu = engine_memory(unbounded, shape, dtype="float32", device="cpu", available=4 * 2**30)
    assert on_cpu.parts["KV cache (at most)"] == int(0.3 * 4 * 2**30)
    assert on_cpu.parts["weights"] == 4 * PARAMETERS


def test_plan_shows_and_counts_model_copies(flags: dict[str, Any]) -> None:
    config = resolve(Config(**flags, actor_num_gpus_per_node=4, fsdp_shard_size=2))
    plan = make_plan(config, device="cpu", gpu_count=0)
    (trainer,) = [process for process in plan.processes if process.name == "trainer"]
    assert "4 on cpu, 2 copies of the model" in plan.render()
    assert trainer.memory is not None
    assert trainer.memory.parts["weights"] == 4 * PARAMETERS // 2


@pytest.mark.parametrize(("unit", "dtype", "size"), [(None, "float32", 4), ("amx_bf16", "bfloat16", 2)])
def test_plan_shows_the_precision_and_uses_it_in_memory_estimates(
    flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch, unit: str | None, dtype: str, size: int
) -> None:
    monkeypatch.setattr(devices, "bfloat16_unit", lambda: unit)
    config = resolve(Config(**flags, use_kl_loss=True))
    plan = make_plan(config, device="cpu", gpu_count=0)
    why = "this CPU has no bfloat16 units" if unit is None else "this CPU has units for it, amx_bf16"
    assert ("precision", f"{dtype} ({why})") in plan.sections[0][1]
    memory = {process.name: process.memory.parts for process in plan.processes if process.memory is not None}
    assert memory["engine"]["weights"] == memory["trainer"]["reference"] == size * PARAMETERS
    assert not any("slower" in note for note in plan.notes)


def test_plan_notes_bfloat16_on_a_cpu_without_units(flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "bfloat16_unit", lambda: None)
    plan = make_plan(resolve(Config(**flags, rollout_dtype="bfloat16")), device="cpu", gpu_count=0)
    words = "float32 (this CPU has no bfloat16 units), engines bfloat16 (as asked for)"
    assert ("precision", words) in plan.sections[0][1]
    assert [note for note in plan.notes if "slower" in note] == [
        "--rollout-dtype bfloat16: this CPU has no units for it and is about 40 times slower than in float32: "
        "leave out --rollout-dtype"
    ]


def test_recompute_and_token_budget_change_activations(flags: dict[str, Any]) -> None:
    shape = ModelShape.from_folder(flags["hf_checkpoint"])

    def activations(**changes: Any) -> int:
        config = resolve(Config(**{**flags, **changes}))
        return trainer_memory(config, shape, device="cpu", trainers=1).parts["activations"]

    assert activations(recompute_activations=True) < activations() / 3
    assert activations(micro_batch_size=2) == 2 * activations()
    assert activations(use_dynamic_batch_size=True, max_tokens_per_gpu=6400) == 10 * activations()


def test_sharded_memory_shrinks_with_ranks_but_gathered_layers_do_not(flags: dict[str, Any]) -> None:
    shape, config = ModelShape.from_folder(flags["hf_checkpoint"]), resolve(Config(**flags))
    one, two, eight = (trainer_memory(config, shape, device="cpu", trainers=n) for n in (1, 2, 8))
    assert one.parts["whole weights"] == one.parts["weights"]  # a single rank keeps all layers gathered
    assert two.parts["whole weights"] == eight.parts["whole weights"] < one.parts["whole weights"]
    assert eight.parts["Adam moments"] == two.parts["Adam moments"] // 4
    lone = config.replace(global_batch_size=8)  # one micro-batch per rank: no gradient accumulation
    assert "gradients" not in trainer_memory(lone, shape, device="cpu", trainers=8).parts
    shared = lone.replace(context_parallel_size=4)  # four ranks share a sample, so each has four micro-batches
    assert "gradients" in trainer_memory(shared, shape, device="cpu", trainers=8).parts
    copies = config.replace(fsdp_shard_size=2)
    assert trainer_memory(copies, shape, device="cpu", trainers=8).parts == two.parts


def test_offloaded_and_bfloat16_states_are_counted(flags: dict[str, Any]) -> None:
    shape = ModelShape.from_folder(flags["hf_checkpoint"])
    narrow = resolve(Config(**flags, exp_avg_dtype="bf16", exp_avg_sq_dtype="fp32"))
    assert trainer_memory(narrow, shape, device="cuda", trainers=2).parts["Adam moments"] == 6 * PARAMETERS // 2
    streamed = resolve(Config(**{**flags, "device": "cuda"}, exp_avg_sq_dtype="bf16", optimizer_cpu_offload=True))
    on_gpu = trainer_memory(streamed, shape, device="cuda", trainers=2)
    assert on_gpu.on_host == {"Adam moments": 6 * PARAMETERS // 2}
    assert "Adam moments" not in on_gpu.parts
    assert not trainer_memory(streamed, shape, device="cpu", trainers=2).on_host
    text = make_plan(streamed, device="cuda", gpu_count=2).render()
    assert "and in the host's memory: Adam moments" in text
    assert "moments on the host in fp32 and bf16" in text
    off = resolve(Config(**{**flags, "device": "cuda"}, fsdp_cpu_offload=True, use_kl_loss=True))
    estimate = trainer_memory(off, shape, device="cuda", trainers=1)
    assert estimate.on_host == {
        "weights": 4 * PARAMETERS,
        "Adam moments": 8 * PARAMETERS,
        "reference": 2 * PARAMETERS,
        "gradients": 4 * PARAMETERS,
    }
    assert set(estimate.parts) == {"whole weights", "activations", "logits"}
    assert estimate.parts["whole weights"] < PARAMETERS
    with pytest.raises(
        UserError, match="--exp-avg-dtype applies to Adam's moments, and --use-stateless-adam keeps none"
    ):
        resolve(Config(**flags, use_stateless_adam=True, exp_avg_dtype="bf16"))


def test_lora_memory_has_no_master_weights_of_the_base_model(flags: dict[str, Any]) -> None:
    shape = ModelShape.from_folder(flags["hf_checkpoint"])
    config = resolve(Config(**flags, lora_rank=8, use_kl_loss=True))
    parts = trainer_memory(config, shape, device="cuda", trainers=2).parts
    features = (2048 + 1024) + 2 * (1024 + 1024) + (1024 + 2048) + 3 * (1024 + 3072)
    assert parts["weights"] == 4 * 28 * 8 * features // 2
    assert parts["Adam moments"] == 2 * parts["weights"]
    assert parts["frozen weights"] == PARAMETERS
    assert "reference" not in parts  # the reference is the model without its adapter
    assert parts["logits"] < trainer_memory(resolve(Config(**flags)), shape, device="cuda", trainers=2).parts["logits"]


def test_plan_cluster_flag_plans_for_another_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama = {
        "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(llama))
    words = f"plan --hf-checkpoint {tmp_path} --plan-cluster 8x8x80 --actor-num-nodes 8 --actor-num-gpus-per-node 8"
    words += " --rollout-num-gpus-per-engine 8 --rollout-batch-size 128 --num-rollout 9 --rollout-max-context-len 9216"
    words += f" --recompute-activations --output-dir {tmp_path / 'out'}"
    assert cli.main(words.split()) == 0
    printed = capsys.readouterr().out
    assert "64 on GPUs 0-63" in printed
    assert "8 on GPUs 0-63" in printed
    assert "weights 4.11 GiB, Adam moments 8.21 GiB" in printed  # 70.6 B in float32 over 64
    assert "each GPU has" in printed
    assert "80.00 GiB" in printed
    assert "planned for 8 x 8 GPUs of 80 GiB, not for this machine" in printed
    assert "nccl (trainers and engines are on several nodes (node 2, node 3, node 4 and 4 more))" in printed
    assert cli.main([*words.split(), "--actor-num-gpus-per-node", "16"]) == 2
    assert "8 x --actor-num-gpus-per-node 16 do not fit on 8 x 8 GPUs" in capsys.readouterr().err
    assert cli.main([*words.split(), "--plan-cluster", "64x80"]) == 2
    assert "--plan-cluster must be nodes, GPUs per node and GiB per GPU, such as 8x8x80" in capsys.readouterr().err
    assert cli.main(["train", *words.split()[1:]]) == 2
    assert "--plan-cluster 8x8x80 is for a plan" in capsys.readouterr().err


def test_plan_places_gpus_or_rejects_too_few(flags: dict[str, Any]) -> None:
    flags["device"] = "cuda"
    apart = resolve(Config(**flags, actor_num_gpus_per_node=2, rollout_num_gpus=2))
    plan = make_plan(apart, device="cuda", gpu_count=4)
    assert plan.gpus_needed == 4
    assert {process.name: process.where for process in plan.processes} == {
        "driver": "cpu",
        "engine": "GPUs 2-3",
        "trainer": "GPUs 0-1",
    }
    with pytest.raises(UserError) as caught:
        make_plan(apart, device="cuda", gpu_count=2)
    assert str(caught.value) == (
        "this run needs 4 GPUs (2 for training and 2 for rollout), but there are 2: "
        "add --colocate, or lower --actor-num-gpus-per-node or --rollout-num-gpus"
    )
    together = apart.replace(colocate=True)
    assert make_plan(together, device="cuda", gpu_count=2).gpus_needed == 2
    with pytest.raises(UserError, match=r"needs 2 GPUs \(shared\), but there is 1: lower"):
        make_plan(together, device="cuda", gpu_count=1)
    with pytest.raises(UserError, match="no NVIDIA GPU: use --device cpu"):
        make_plan(together, device="cuda", gpu_count=0)


def test_context_parallel_size_must_divide_the_heads_of_every_model(flags: dict[str, Any], tmp_path: Path) -> None:
    config = resolve(Config(**flags, actor_num_gpus_per_node=12, context_parallel_size=4))
    batches = dict(dict(make_plan(config, device="cpu", gpu_count=0).sections)["Batches"])
    assert batches["per 4 trainers"] == "42 to 43 samples, 1 per forward pass, a 1/4 slice of each on every trainer"
    with pytest.raises(UserError) as refusal:
        make_plan(config.replace(context_parallel_size=6), device="cpu", gpu_count=0)
    assert str(refusal.value) == (
        f"--context-parallel-size 6 does not divide the 16 attention heads of {flags['hf_checkpoint']}: "
        "use one of 1, 2, 4, 8, 16"
    )
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**QWEN3_06B, "num_attention_heads": 6}))
    critic = config.replace(advantage_estimator="ppo", critic_hf_checkpoint=str(other))
    teacher = config.replace(use_opd=True, opd_type="trainer", opd_teacher_load=str(other))
    for changed in (critic, teacher):
        with pytest.raises(UserError, match=f"does not divide the 6 attention heads of {other}: use one of 1, 2, 3, 6"):
            make_plan(changed, device="cpu", gpu_count=0)
    make_plan(config.replace(critic_hf_checkpoint=str(other)), device="cpu", gpu_count=0)


def test_context_parallelism_reduces_activations(flags: dict[str, Any]) -> None:
    shape = ModelShape.from_folder(flags["hf_checkpoint"])
    config = resolve(Config(**flags, micro_batch_size=4, actor_num_gpus_per_node=4))
    whole, half = (
        trainer_memory(config.replace(context_parallel_size=size), shape, device="cuda", trainers=4) for size in (1, 2)
    )
    assert half.parts["activations"] == whole.parts["activations"] // 2
    tokens = config.replace(context_parallel_size=2, use_dynamic_batch_size=True, max_tokens_per_gpu=4 * 640 // 2)
    assert trainer_memory(tokens, shape, device="cuda", trainers=4).parts["activations"] == half.parts["activations"]


def test_several_local_nodes_work_on_cpu_and_are_rejected_on_gpus(flags: dict[str, Any]) -> None:
    config = resolve(Config(**flags, actor_num_nodes=2, actor_num_gpus_per_node=2, rollout_num_gpus=1))
    plan = make_plan(config, device="cpu", gpu_count=0)
    assert {process.name: process.count for process in plan.processes} == {"driver": 1, "engine": 1, "trainer": 4}
    with pytest.raises(UserError) as caught:
        make_plan(config, device="cuda", gpu_count=8)
    assert str(caught.value) == (
        "--actor-num-nodes 2 with --cluster local: this machine is one node; use --cluster ray, or "
        "--actor-num-gpus-per-node alone"
    )


def test_sft_plan_has_no_engine(flags: dict[str, Any]) -> None:
    config = resolve(Config(**{**flags, "device": "cuda"}, loss_type="sft_loss", rollout_num_gpus=4))
    plan = make_plan(config, device="cuda", gpu_count=1)
    assert [process.name for process in plan.processes] == ["driver", "trainer"]
    assert (plan.rollout_backend, plan.weight_transport, plan.gpus_needed) == ("none", "none", 1)


def test_automatic_choices_show_their_reason(flags: dict[str, Any]) -> None:
    config = resolve(Config(**flags))
    assert choose_rollout_backend(config, "cpu") == ("embedded", "there is no GPU for SGLang")
    assert choose_rollout_backend(config.replace(rollout_backend="embedded"), "cpu") == ("embedded", "asked for")
    text = make_plan(config, device="cpu", gpu_count=0).render()
    assert "embedded (there is no GPU for SGLang)" in text
    assert "tensor (trainer and engines are on one machine" in text


def test_plan_rejects_an_unavailable_rollout_backend(flags: dict[str, Any]) -> None:
    config = resolve(Config(**flags, rollout_backend="sglang"))
    with pytest.raises(UserError, match="--rollout-backend sglang"):
        make_plan(config, device="cpu", gpu_count=0)


def test_plan_notes_flags_without_effect(flags: dict[str, Any], tmp_path: Path) -> None:
    carried = {
        "sglang_context_length": 9,
        "sglang_tool_call_parser": "glm45",
        "sglang_reasoning_parser": "glm45",
        "mine": 1,
    }
    del flags["save"]
    flags |= {"n_samples_per_prompt": 1, "tensor_model_parallel_size": 2, "sandbox": "subprocess"}
    config = resolve(Config(**flags, carried=carried, eval_prompt_data=[("a", flags["prompt_data"])]))
    notes = "\n".join(make_plan(config, device="cpu", gpu_count=0).notes)
    assert "Megatron flags without effect on the FSDP trainer: --tensor-model-parallel-size" in notes
    assert "SGLang flags without effect on the embedded engine: --sglang-context-length" in notes
    assert "-parser" not in notes  # the parser flags have an effect
    assert "without --eval-interval" in notes
    assert "no --save: the trained model is not kept" in notes
    assert "advantage 0" in notes
    assert "--sandbox subprocess isolates nothing" in notes


@pytest.mark.parametrize(
    ("changes", "noted"),
    [
        ({"advantage_estimator": "grpo"}, True),
        ({"advantage_estimator": "gspo"}, True),
        ({"advantage_estimator": "cispo"}, True),
        ({"advantage_estimator": "dr_grpo"}, True),
        ({"advantage_estimator": "dapo"}, True),
        ({"advantage_estimator": "reinforce_plus_plus_baseline", "normalize_advantages": True}, True),
        ({"advantage_estimator": "ppo"}, False),
        ({"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True}, False),
        ({"disable_rewards_normalization": True}, False),
        ({"use_opd": True, "opd_type": "engine", "opd_teacher_load": "."}, False),
        ({"loss_type": "sft_loss"}, False),
        ({"n_samples_per_prompt": 2}, False),
    ],
)
def test_plan_notes_one_sample_per_prompt_for_group_estimators(
    flags: dict[str, Any], changes: dict[str, Any], noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(flags["hf_checkpoint"])
    config = resolve(Config(**(flags | {"n_samples_per_prompt": 1} | changes)))
    notes = make_plan(config, device="cpu", gpu_count=0).notes
    assert [note.split(":")[0] for note in notes if "advantage 0" in note] == (
        [f"--n-samples-per-prompt 1 with --advantage-estimator {config.advantage_estimator}"] if noted else []
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"rollout_top_p": 0.9, "allow_biased_sampling": True}, "--rollout-top-p 0.9"),
        (
            {"rollout_top_p": 0.9, "rollout_top_k": 20, "allow_biased_sampling": True},
            "--rollout-top-p 0.9 and --rollout-top-k 20",
        ),
        ({"rollout_top_p": 0.9, "debug_rollout_only": True}, None),
    ],
)
def test_plan_notes_truncated_sampling(flags: dict[str, Any], changes: dict[str, Any], said: str | None) -> None:
    notes = make_plan(resolve(Config(**(flags | changes))), device="cpu", gpu_count=0).notes
    assert [note.split(":")[0] for note in notes if "log-probs over all of it" in note] == ([said] if said else [])


def test_plan_notes_that_only_save_hf_models_are_kept(flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.driver.plan.plan.available_memory", lambda: 2**40)  # low memory would add a note
    kept = resolve(Config(**(flags | {"save": None, "save_hf": "hf/{rollout_id}"})))
    (note,) = make_plan(kept, device="cpu", gpu_count=0).notes
    assert note.startswith("no --save: only the models of --save-hf hf/{rollout_id} are kept")


def test_plan_notes_too_little_memory(flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.driver.plan.plan.available_memory", lambda: 2**30)
    notes = make_plan(resolve(Config(**flags)), device="cpu", gpu_count=0).notes
    assert any("more than the 1.00 GiB there are: with --recompute-activations" in note for note in notes)


def test_unknown_architecture_gets_a_plan(flags: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "brand_new"}')
    text = make_plan(resolve(Config(**flags)), device="cpu", gpu_count=0).render()
    assert "brand_new, 1 parameters" in text  # counted from the weights


def test_planned_device_follows_the_device_flag(flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert planned_machines(Config(**{**flags, "device": "cpu"})).device == "cpu"
    assert planned_machines(Config(**{**flags, "device": "cuda"})).device == "cuda"
    found = planned_machines(Config(**{**flags, "device": "auto"}))
    assert found.device == ("cuda" if found.gpus else "cpu")


def test_plan_notes_another_slime_in_the_working_folder(
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve(Config(**flags))
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "slime").mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    assert not any("of its own" in note for note in make_plan(config, device="cpu", gpu_count=0).notes)
    (elsewhere / "slime" / "__init__.py").touch()
    notes = make_plan(config, device="cpu", gpu_count=0).notes
    ours = Path(slime.__file__).resolve().parent
    assert f"this folder has its own slime ({elsewhere / 'slime'}), but the run uses {ours}" in notes
