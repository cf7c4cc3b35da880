from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config, parse_args, resolve, resolve_for_run
from slime.config.batch import data_parallel_size, tokens_per_row
from slime.config.plugins.view import upstream_view
from slime.errors import UserError


def rejection(valid: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(UserError) as caught:
        resolve(Config(**{**valid, **changes}))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_resolve_derives_dependent_values(valid: dict[str, Any]) -> None:
    config = resolve(
        Config(
            **valid,
            actor_num_gpus_per_node=2,
            rollout_temperature=0.7,
            rollout_max_context_len=100,
            label_key="label",
            reward_key="score",
            eps_clip=0.3,
        )
    )
    assert (config.global_batch_size, config.num_steps_per_rollout) == (256, 1)
    assert (config.rollout_num_gpus, config.colocate, config.offload_rollout) == (2, True, False)
    assert (config.eval_temperature, config.eval_top_p, config.eval_top_k) == (0.7, 1.0, -1)
    assert (config.eval_input_key, config.eval_label_key, config.eval_tool_key) == (None, "label", "tools")
    assert (config.eval_max_response_len, config.eval_max_prompt_len) == (16, 99)
    assert config.rollout_max_prompt_len == 99
    assert config.eval_reward_key == "score"
    assert config.eps_clip_high == 0.3
    assert config.eval_function_path == config.rollout_function_path


def test_resolve_is_idempotent(valid: dict[str, Any]) -> None:
    once = resolve(Config(**valid, recompute_granularity="full"))
    assert resolve(once) == once
    assert once.recompute_activations is True


def test_given_rollout_num_gpus_disables_colocation_by_default(valid: dict[str, Any]) -> None:
    assert resolve(Config(**valid, rollout_num_gpus=2)).colocate is False
    assert resolve(Config(**valid, rollout_num_gpus=2, colocate=True)).colocate is True


def test_output_dir_defaults_to_save_or_a_timestamped_folder(valid: dict[str, Any], tmp_path: Path) -> None:
    del valid["output_dir"]
    assert resolve(Config(**valid)).output_dir.startswith("outputs/20")
    assert resolve(Config(**valid, save=str(tmp_path / "s"))).output_dir == str(tmp_path / "s")
    saving = resolve(Config(**valid, save_interval=100, output_dir=str(tmp_path / "o")))
    assert (saving.save, resolve(saving)) == (str(tmp_path / "o"), saving)
    assert resolve(Config(**valid, save_interval=100, save_hf=str(tmp_path / "hf"))).save is None


def test_sft_uses_the_sft_rollout_and_evaluates_by_generating(valid: dict[str, Any], prompts: Path) -> None:
    del valid["rollout_max_response_len"]
    config = resolve(Config(**valid, loss_type="sft_loss"))
    assert config.rollout_function_path == "slime.rollout.sft_rollout.generate_rollout"
    assert config.eval_function_path == "slime.rollout.sglang_rollout.generate_rollout"
    resolve(Config(**valid, loss_type="sft_loss", eval_prompt_data=[("a", str(prompts))], eval_interval=1))


@pytest.mark.parametrize(
    ("given", "derived"),
    [
        ({"global_batch_size": 64}, (64, 4)),
        ({"num_steps_per_rollout": 8}, (32, 8)),
        ({"global_batch_size": 128, "num_steps_per_rollout": 2}, (128, 2)),
    ],
)
def test_derives_batch_size_or_number_of_steps(
    valid: dict[str, Any], given: dict[str, int], derived: tuple[int, int]
) -> None:
    config = resolve(Config(**valid, **given))
    assert (config.global_batch_size, config.num_steps_per_rollout) == derived


def test_inconsistent_batch_sizes_are_rejected_with_the_numbers(valid: dict[str, Any]) -> None:
    left = "rollout_batch_size 32 x n_samples_per_prompt 8 = 256"
    assert rejection(valid, global_batch_size=100, num_steps_per_rollout=2) == (
        f"{left}, but global_batch_size 100 x num_steps_per_rollout 2 = 200: change one of the four"
    )
    assert rejection(valid, global_batch_size=100) == (
        f"{left}, which global_batch_size 100 does not divide: change one of the three"
    )
    assert rejection(valid, num_steps_per_rollout=3) == (
        f"{left}, which num_steps_per_rollout 3 does not divide: change one of the three"
    )
    few = rejection(valid, num_steps_per_rollout=256, actor_num_nodes=2, actor_num_gpus_per_node=4)
    assert few.startswith("global_batch_size 1 is less than the 8 training processes (actor_num_nodes 2 x")


def test_model_parallel_sizes_reduce_the_data_parallel_size(valid: dict[str, Any]) -> None:
    """Batch sizes that upstream accepts with tensor, pipeline and context parallelism are valid."""
    flags = {**valid, "actor_num_gpus_per_node": 8, "rollout_batch_size": 2, "n_samples_per_prompt": 2}
    tp, pp = "tensor_model_parallel_size", "pipeline_model_parallel_size"
    dynamic = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 8}
    one = resolve(Config(**flags, **dynamic, context_parallel_size=2, **{tp: 2, pp: 2}))
    assert (data_parallel_size(one), one.global_batch_size, one.rollout_num_gpus) == (1, 4, 8)
    assert tokens_per_row(one) == 16
    assert tokens_per_row(one.replace(use_dynamic_batch_size=False)) is None
    shown = upstream_view(one)
    assert (shown["context_parallel_size"], shown["data_parallel_size"], shown["tensor_model_parallel_size"]) == (
        2,
        4,
        1,
    )
    assert data_parallel_size(resolve(Config(**flags, **{tp: 2}))) == 4
    assert data_parallel_size(resolve(Config(**{**flags, "actor_num_gpus_per_node": 1, tp: 2, pp: 4}))) == 1
    assert rejection(flags, global_batch_size=1, **{tp: 4}) == (
        "global_batch_size 1 is less than the 2 training processes (actor_num_nodes 1 x actor_num_gpus_per_node 8 / 4 of "
        "a model replica), each of which needs a sample per step: use fewer processes or a larger batch"
    )
    assert rejection(flags).startswith("global_batch_size 4 is less than the 8 training processes")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hf_checkpoint": None}, "--hf-checkpoint is missing"),
        ({"rollout_batch_size": None}, "--rollout-batch-size must have a value"),
        ({"rollout_batch_size": 0}, "--rollout-batch-size must be at least 1, not 0"),
        ({"rollout_temperature": 0}, "--rollout-temperature must be greater than 0, not 0"),
        ({"rollout_top_p": 0.0}, "--rollout-top-p must be in (0, 1], not 0.0"),
        ({"rollout_top_k": 0}, "--rollout-top-k must be -1 or at least 1, not 0"),
        ({"rollout_top_p": 0.9}, "--rollout-top-p 0.9: tokens are sampled from a part of the vocabulary"),
        ({"rollout_top_k": 20}, "or accept the bias with --allow-biased-sampling"),
        ({"lr": "fast"}, "--lr must be a number, not 'fast'"),
        ({"metadata_key": None}, "--metadata-key must have a value"),
        ({"rm_type": "maths"}, "--rm-type must be one of math, dapo, deepscaler"),
        ({"rm_type": "remote_rm"}, "--rm-type remote_rm needs --rm-url"),
        ({"prompt_data": None}, "--prompt-data is missing"),
        ({"overlong_buffer_len": 4, "rollout_max_response_len": None}, "counts from --rollout-max-response-len"),
        (
            {"hf_checkpoint": None, "prompt_data": None},
            "--hf-checkpoint DIR and --prompt-data PATH are missing: give all of them",
        ),
        ({"use_dynamic_batch_size": True}, "--use-dynamic-batch-size needs --max-tokens-per-gpu"),
        ({"kl_loss_coef": 0.1}, "--kl-loss-coef 0.1 needs --use-kl-loss"),
        ({"ref_load": "/nowhere"}, "there is no model folder /nowhere: --ref-load takes"),
        ({"use_kl_loss": True, "ref_load": "/nowhere"}, "there is no model folder /nowhere: --ref-load takes"),
        ({"eval_prompt_data": [("a", "x"), ("a", "y")]}, "two datasets named a"),
        ({"eval_prompt_data": [("a", "/no.jsonl")]}, "--eval-prompt-data a: there is no file /no.jsonl"),
        ({"ckpt_keep": 2}, "--ckpt-keep 2 has no effect without --save DIR"),
        ({"save_hf": "hf_{step}"}, "--save-hf hf_{step} may hold only the placeholder {rollout_id}"),
        ({"rollout_num_gpus": 3, "rollout_num_gpus_per_engine": 2}, "--rollout-num-gpus 3 is not a multiple of"),
        ({"rollout_num_gpus": 0}, "--rollout-num-gpus 0 leaves no rollout engines"),
        (
            {"actor_num_gpus_per_node": 4, "fsdp_shard_size": 3, "global_batch_size": None},
            "--fsdp-shard-size 3 does not divide the 4 training processes (--actor-num-nodes 1 x "
            "--actor-num-gpus-per-node 4)",
        ),
        (
            {"context_parallel_size": 2, "actor_num_gpus_per_node": 3},
            "--context-parallel-size 2 does not divide the 3 training processes (--actor-num-nodes 1 x "
            "--actor-num-gpus-per-node 3)",
        ),
        ({"rollout_max_context_len": 8, "rollout_max_prompt_len": 8}, "leaves no room for a response"),
        ({"freeze_params_name_list": ["("]}, "--freeze-params-name-list '(' is not a regular expression"),
        ({"freeze_params_name_list": ["a"], "only_train_params_name_list": ["b"]}, "exclude each other"),
        ({"lr_decay_style": "cosine", "min_lr": 1.0}, "--min-lr 1.0 is larger than --lr 1e-06"),
        ({"lr_decay_iters": 5, "lr_warmup_iters": 5}, "--lr-warmup-iters 5 must be less than --lr-decay-iters 5"),
        ({"lr_warmup_fraction": 0.1, "lr_warmup_iters": 5}, "all set the warm-up's length: keep one"),
        ({"lr_decay_samples": 8, "lr_decay_iters": 5}, "both set the length of the decay: keep one"),
        ({"lr_warmup_init": 1.0}, "--lr-warmup-init 1.0 is larger than --lr 1e-06, where warm-up ends: lower it"),
        ({"lr_decay_style": "WSD"}, "--lr-decay-style WSD needs --lr-wsd-decay-iters"),
        ({"lr_wsd_decay_iters": 5}, "--lr-wsd-decay-iters is part of --lr-decay-style WSD, not of constant"),
        ({"start_weight_decay": 0.1}, "need --weight-decay-incr-style linear or cosine"),
        ({"weight_decay_incr_style": "linear"}, "linear needs both --start-weight-decay and --end-weight-decay"),
        (
            {"num_rollout": None, "disable_rollout_global_dataset": True},
            "--disable-rollout-global-dataset leaves no prompts to count epochs",
        ),
        ({"hf_checkpoint": "/nowhere"}, "there is no model folder /nowhere"),
        ({"hf_checkpoint": __file__}, "is a file, but a model folder is needed"),
        ({"prompt_data": "/nowhere.jsonl@[0:5]"}, "--prompt-data: there is no file /nowhere.jsonl"),
        ({"prompt_data": "/tmp"}, "--prompt-data: /tmp is a folder"),
        ({"load": __file__}, "is a file, but a folder is needed"),
        ({"output_dir": __file__}, "is a file, but a folder is needed"),
        ({"save": f"{__file__}/a/b"}, f"cannot be created: {__file__} is a file"),
        ({"custom_rm_path": "no_such_module_x.rm"}, "--custom-rm-path no_such_module_x.rm: module"),
    ],
)
def test_invalid_values_are_rejected_in_one_sentence(
    valid: dict[str, Any], changes: dict[str, Any], sentence: str
) -> None:
    assert sentence in rejection(valid, **changes)


def test_rejects_model_folders_without_a_valid_config_json(valid: dict[str, Any], model_dir: Path) -> None:
    config = model_dir / "config.json"
    config.write_text("{}")
    assert rejection(valid).endswith("has no model_type: it does not describe a Hugging Face model")
    config.write_text("{broken")
    assert rejection(valid).startswith(f"cannot read {config}")
    config.write_text("[]")
    assert "does not hold a JSON object" in rejection(valid)
    config.unlink()
    assert rejection(valid).startswith(f"model folder {model_dir} has no config.json")


def test_accepts_prompt_slices_and_path_objects(valid: dict[str, Any], prompts: Path, model_dir: Path) -> None:
    config = resolve(
        Config(
            **{**valid, "prompt_data": f"{prompts}@[-1:]", "hf_checkpoint": model_dir},
            eval_prompt_data=[("a", prompts)],
        )
    )
    assert config.hf_checkpoint == str(model_dir)
    assert config.eval_prompt_data == [("a", str(prompts))]


@pytest.mark.parametrize(
    ("carried", "hf_name"),
    [
        ({"num_layers": 3}, "num_hidden_layers 2"),
        ({"hidden_size": 63}, "hidden_size 64"),
        ({"num_attention_heads": 8}, "num_attention_heads 4"),
        ({"num_query_groups": 4}, "num_key_value_heads 2"),
        ({"ffn_hidden_size": 97}, "intermediate_size 96"),
    ],
)
def test_contradicting_shape_flags_show_both_numbers(
    valid: dict[str, Any], carried: dict[str, int], hf_name: str
) -> None:
    ((name, value),) = carried.items()
    sentence = rejection(valid, carried=carried)
    assert sentence.startswith(f"--{name.replace('_', '-')} {value} contradicts {hf_name} in ")


def test_matching_or_padded_shape_flags_are_accepted(valid: dict[str, Any], model_dir: Path) -> None:
    carried = {"num_layers": 2, "hidden_size": 64, "vocab_size": 160, "num_experts": 8}
    assert resolve(Config(**valid, carried=carried)).carried == carried
    nested = {"model_type": "vision", "text_config": json.loads((model_dir / "config.json").read_text())}
    (model_dir / "config.json").write_text(json.dumps(nested))
    assert "contradicts num_hidden_layers 2" in rejection(valid, carried={"num_layers": 3})


def test_plugin_signatures_are_checked(valid: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "async def generate(args, sample, sampling_params): return sample\n"
        "async def reward(args, sample, **kwargs): return 1.0\n"
        "def narrow(args): return 1.0\n"
        "def hook(args, sample, *, rollout_id=None): return None\n"
    )
    resolve(
        Config(
            **valid,
            custom_generate_function_path=f"{file}:generate",
            custom_rm_path=f"{file}:reward",
            rollout_sample_hook_path=[f"{file}:hook"],
        )
    )
    assert rejection(valid, custom_rm_path=f"{file}:narrow") == (
        f"--custom-rm-path {file}:narrow is called with (args, sample), but its signature is (args): change it"
    )
    assert "did you mean reward?" in rejection(valid, custom_rm_path=f"{file}:rewards")


@pytest.mark.parametrize(
    ("package", "flags", "sentence"),
    [
        (
            "wandb",
            {"use_wandb": True},
            "--use-wandb needs the package wandb, which is not installed: pip install wandb, or drop it",
        ),
        (
            "tensorboard",
            {},
            "--use-tensorboard needs the package tensorboard, which is not installed: pip install tensorboard, or turn "
            "it off with --no-use-tensorboard",
        ),
    ],
)
def test_rejects_trackers_that_are_not_installed(
    valid: dict[str, Any], monkeypatch: pytest.MonkeyPatch, package: str, flags: dict[str, Any], sentence: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert rejection(valid, **flags) == sentence
    resolve(Config(**valid, use_tensorboard=False))


def test_accepts_flags_that_the_documentation_recommends(valid_argv: list[str]) -> None:
    """Covers the flags recommended against slow data, lack of memory and crashes."""
    remedies = "--num-data-workers 4 --streaming-data --recompute-activations --micro-batch-size 1 --sequence-parallel "
    remedies += "--use-fault-tolerance --update-weights-interval 5 --max-turns 5 --async-buffer-size 4"
    config = parse_args([*valid_argv, *remedies.split()])
    assert (config.num_data_workers, config.streaming_data, config.recompute_activations) == (4, True, True)
    assert (config.max_turns, config.async_buffer_size, config.sequence_parallel) == (5, 4, True)


def test_routing_replay_needs_a_model_with_routers(valid: dict[str, Any]) -> None:
    file = Path(valid["hf_checkpoint"]) / "config.json"
    for flag in ("use_routing_replay", "use_rollout_routing_replay"):
        words = flag.replace("_", "-")
        assert rejection(valid, **{flag: True}) == (
            f"--{words} repeats the choices of routers, but the model of {file} has none: drop the flag"
        )
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_experts": 8, "num_experts_per_tok": 2}))
    assert resolve(Config(**valid, use_rollout_routing_replay=True)).use_routing_replay


def test_resolved_config_is_trusted_for_one_run(valid: dict[str, Any], tmp_path: Path) -> None:
    config = resolve(Config(**valid, save=str(tmp_path / "saved")))
    assert resolve_for_run(config) is config
    (tmp_path / "saved" / "iter_0000001").mkdir(parents=True)  # by the run
    with pytest.raises(UserError, match="has a checkpoint that this slime did not write"):
        resolve_for_run(config)


def test_changed_copy_of_a_resolved_config_is_checked_again(valid: dict[str, Any]) -> None:
    config = resolve(Config(**valid))
    with pytest.raises(UserError, match="--lr must be at least 0, not -1"):
        resolve_for_run(config.replace(lr=-1.0))
    again = resolve_for_run(config.replace(eval_top_k=None))
    assert again == config
    assert again.overlay is not config.overlay
