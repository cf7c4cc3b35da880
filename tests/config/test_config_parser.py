from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config, parse_args, parse_flags
from slime.config.config import FLAG_SPECS
from slime.config.flag_aliases import REFUSED
from slime.config.help import ESSENTIAL_FLAGS
from slime.config.megatron_flags import MEGATRON_FLAGS
from slime.errors import UserError


def rejection(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        parse_flags(words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def parse(command: str) -> Config:
    return parse_flags(command.split())


def test_parses_every_kind_of_value() -> None:
    config = parse_flags(
        [
            *("--rollout-batch-size", "4"),
            "--lr=1e-5",
            "--use-kl-loss",
            "--no-use-tensorboard",
            *("--rollout-stop", "\n\n", "</s>"),
            *("--rollout-stop-token-ids", "1", "2"),
            *("--apply-chat-template-kwargs", '{"enable_thinking": false}'),
            *("--eval-prompt-data", "aime", "a.jsonl", "gsm8k", "g.jsonl"),
            *("--rollout-top-k", "-1"),
            "--input_key=prompt",
        ]
    )
    assert config.rollout_batch_size == 4
    assert config.lr == 1e-5
    assert config.use_kl_loss is True
    assert config.use_tensorboard is False
    assert config.rollout_stop == ["\n\n", "</s>"]
    assert config.rollout_stop_token_ids == [1, 2]
    assert config.apply_chat_template_kwargs == {"enable_thinking": False}
    assert config.eval_prompt_data == [("aime", "a.jsonl"), ("gsm8k", "g.jsonl")]
    assert config.rollout_top_k == -1
    assert config.input_key == "prompt"


def test_repeated_flags_append_or_override() -> None:
    config = parse(
        "--eval-prompt-data a x --eval-prompt-data b y --rollout-sample-hook-path m.f --rollout-sample-hook-path m.g "
        "--lr 1 --lr 2 --rollout-stop A --rollout-stop B"
    )
    assert config.eval_prompt_data == [("a", "x"), ("b", "y")]
    assert config.rollout_sample_hook_path == ["m.f", "m.g"]
    assert config.lr == 2.0
    assert config.rollout_stop == ["B"]


def test_unnamed_evaluation_file_is_named_aime_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert parse("--eval-prompt-data /data/test.jsonl").eval_prompt_data == [("aime", "/data/test.jsonl")]
    assert caplog.messages == [
        "--eval-prompt-data /data/test.jsonl has no name: it is named aime, as in upstream slime"
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--rollout-batchsize", "3"], "unknown flag --rollout-batchsize: did you mean --rollout-batch-size?"),
        (["--tensor-parallel-model-size", "3"], "did you mean --tensor-model-parallel-size?"),
        (["--qqq"], "unknown flag --qqq (slime flags lists all)"),
        (["--model.name", "x"], "--model.name is a name of prime-rl: here it is --hf-checkpoint"),
        (["--modle-name", "x"], "unknown flag --modle-name (slime flags lists all)"),
        (["--lr", "fast"], "--lr must be a number, not 'fast'"),
        (["--lr", "nan"], "--lr must be a number, not 'nan'"),
        (["--seed", "1.5"], "--seed must be a whole number, not '1.5'"),
        (["--device", "cdua"], "--device must be one of auto, cpu, cuda, not 'cdua': did you mean cuda?"),
        (["--lr"], "--lr needs a value (X)"),
        (["--lr", "--seed", "1"], "--lr needs a value (X)"),
        (["--lr", "1", "2"], "unexpected argument '2' after --lr"),
        (["stray"], "unexpected argument 'stray': flags start with two dashes"),
        (["--use-kl-loss", "0.1"], "unexpected argument '0.1' after --use-kl-loss"),
        (["--no-lr"], "unknown flag --no-lr"),
        (["--eval-prompt-data", "a", "x", "b"], "--eval-prompt-data takes pairs NAME PATH, but got 3 values: a x b"),
        (["--apply-chat-template-kwargs", "{a}"], "is not JSON"),
        (["--apply-chat-template-kwargs", "[1]"], "must be a JSON object"),
        (["--release-train"], "--release-train is not supported: trainers live as long as the run"),
        (
            ["--enable-mtp-training"],
            "--enable-mtp-training is not supported: layers that predict several tokens at once",
        ),
        (["--optimizer", "sgd"], "--optimizer sgd exists in slime, but this version does not have it yet: use adam"),
        (["--num-layers", "x"], "--num-layers must be a whole number, not 'x'"),
        (["--num-layers"], "--num-layers needs a value"),
        (["--swiglu", "1"], "unexpected argument '1' after --swiglu"),
        (["--config"], "--config needs a file"),
        (["--config", "/nowhere.toml"], "--config: there is no file /nowhere.toml"),
    ],
)
def test_invalid_arguments_are_rejected_in_one_sentence(words: list[str], sentence: str) -> None:
    assert sentence in rejection(*words)


def test_all_unknown_flags_are_reported_together() -> None:
    words = ["--qqq", "--lr", "1", "--beta", "0.1", "--release-train", "--qqq"]
    with pytest.raises(UserError) as caught:
        parse_flags(words)
    count, *lines = str(caught.value).splitlines()
    assert count == "3 flags are not known here:"
    assert lines[0] == "  unknown flag --qqq (slime flags lists all)"
    assert lines[1] == "  --beta is a name of TRL: here it is --use-kl-loss with --kl-loss-coef"
    assert lines[2].startswith("  --release-train is not supported: trainers live as long as the run")
    with pytest.raises(UserError) as caught:
        parse_flags(["data.train_files=x", "--qqq", "1", "trainer.nnodes=2"])
    assert str(caught.value).splitlines() == [
        "3 flags are not known here:",
        "  data.train_files is a name of verl: here it is --prompt-data",
        "  unknown flag --qqq (slime flags lists all)",
        "  trainer.nnodes is a name of verl: here it is --actor-num-nodes",
    ]


def test_all_unknown_keys_of_a_file_are_reported_together(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("rollout_batchsize: 3\nlr: 1\nbeta: 0.1\nrelease_train: true\n")
    with pytest.raises(UserError) as caught:
        parse_flags(["--config", str(file)])
    count, *lines = str(caught.value).splitlines()
    assert count == "3 keys are not known here:"
    assert lines[0] == f"  unknown key rollout_batchsize in {file}: did you mean rollout_batch_size?"
    assert lines[1] == f"  {file}: beta is a name of TRL: here it is --use-kl-loss with --kl-loss-coef"
    assert lines[2].startswith(f"  {file}: --release-train is not supported: trainers live as long as the run")


def test_carried_flags_are_typed_and_readable_as_attributes() -> None:
    config = parse(
        "--sglang-mem-fraction-static 0.8 --sglang-context-length 8192 --sglang-log-level INFO --sglang-enable-metrics "
        "--sglang-cuda-graph-bs 1 2 4 --router-policy cache_aware --tensor-model-parallel-size 2 --sequence-parallel "
        "--rotary-base 1000000 --attention-dropout 0 --spec my.module get_spec --sglang-server-concurrency 64"
    )
    assert config.carried == {
        "sglang_mem_fraction_static": 0.8,
        "sglang_context_length": 8192,
        "sglang_log_level": "INFO",
        "sglang_enable_metrics": True,
        "sglang_cuda_graph_bs": [1, 2, 4],
        "router_policy": "cache_aware",
        "rotary_base": 1000000,
        "attention_dropout": 0.0,
        "spec": ["my.module", "get_spec"],
    }
    assert (config.tensor_model_parallel_size, config.sequence_parallel) == (2, True)
    assert config.sglang_server_concurrency == 64
    assert config.sglang_context_length == 8192


SEED_COMMANDS = [
    """--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --advantage-estimator grpo --use-kl-loss
    --kl-loss-coef 0.001 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 --num-rollout 3000
    --prompt-data /path/to/data.jsonl""",
    """--prompt-data /path/to/train.jsonl --input-key prompt --label-key label --apply-chat-template --save-interval 100
    --eval-interval 50 --eval-prompt-data aime /path/to/aime.jsonl --eval-prompt-data gsm8k /path/to/gsm8k.jsonl
    --n-samples-per-eval-prompt 16""",
    """--custom-generate-function-path custom_generate.py --max-turns 5 --custom-rm-path custom_rm.py""",
    """--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --num-layers 32 --hidden-size 4096
    --sequence-parallel --sglang-mem-fraction-static 0.8 --sglang-context-length 8192 --sglang-log-level INFO""",
    """--colocate --recompute-activations --micro-batch-size 1 --num-data-workers 4 --streaming-data""",
    """--hf-checkpoint m --num-steps-per-rollout 2 --num-epoch 3 --eps-clip 0.2 --eps-clip-high 0.28 --lr 1e-6
    --rm-type math --save s --load s --save-hf hf_{rollout_id} --seed 7 --rollout-temperature 0.8 --rollout-top-p 0.9
    --rollout-top-k 20 --rollout-max-response-len 512 --rollout-stop END --rollout-stop-token-ids 2
    --use-dynamic-batch-size --max-tokens-per-gpu 4096 --rollout-backend embedded --dry-run""",
    """--swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --use-rotary-position-embeddings --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 151936 --kv-channels 128
    --qk-layernorm --context-parallel-size 1 --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --optimizer adam
    --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 --attention-dropout 0.0
    --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --attention-backend flash
    --kl-loss-type low_var_kl --entropy-coef 0.00 --rollout-num-gpus-per-engine 2""",
]


@pytest.mark.parametrize("command", SEED_COMMANDS)
def test_commands_of_existing_scripts_parse(command: str) -> None:
    assert isinstance(parse_flags(command.split()), Config)


def test_flag_tables_are_disjoint() -> None:
    fields = {name.replace("_", "-") for name in FLAG_SPECS}
    assert not fields & REFUSED.keys()
    assert not fields & set(MEGATRON_FLAGS)
    assert not set(MEGATRON_FLAGS) & REFUSED.keys()


@pytest.mark.parametrize("suffix", [".toml", ".yaml"])
def test_command_line_overrides_config_file(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"run{suffix}"
    sign = " = " if suffix == ".toml" else ": "
    lines = [
        "lr{}1e-5",
        "rollout-batch-size{}8",
        "n_samples_per_prompt{}4",
        "sglang-context-length{}99",
        "swiglu{}true",
    ]
    file.write_text("\n".join(line.format(sign) for line in lines))
    config = parse_flags(["--n-samples-per-prompt", "2", "--config", str(file), "--sglang-context-length", "100"])
    assert (config.lr, config.rollout_batch_size, config.n_samples_per_prompt) == (1e-5, 8, 2)
    assert config.carried == {"sglang_context_length": 100, "swiglu": True}


def test_command_line_replaces_lists_of_the_config_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("eval_prompt_data: {a: x.jsonl}\nrollout_stop: [A]\n")
    assert parse_flags(["--config", str(file)]).eval_prompt_data == [("a", "x.jsonl")]
    assert parse_flags(["--config", str(file), "--eval-prompt-data", "b", "y"]).eval_prompt_data == [("b", "y")]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rollout_batchsize: 3", "unknown key rollout_batchsize in {file}: did you mean rollout_batch_size?"),
        ("lr: fast", "lr in {file} must be a number, not 'fast'"),
        ("use_kl_loss: 3", "use_kl_loss in {file} must be true or false, not 3"),
        ("release_train: true", "{file}: --release-train is not supported: trainers live as long as the run"),
        ("- 1", "{file} must hold a mapping of flag names to values"),
        ("a: [", "{file} is not valid YAML"),
        ("rollout_stop: {a: 1}", "rollout_stop in {file} must be a list of texts"),
    ],
)
def test_invalid_config_files_are_rejected_in_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert sentence.format(file=file) in rejection("--config", str(file))


def test_custom_config_overrides_the_command_line_and_adds_entries(tmp_path: Path) -> None:
    file, second = tmp_path / "mine.yaml", tmp_path / "second.yaml"
    file.write_text(
        "use-tis: true\ntis_level: sequence\ntis_clip: 5\nrs_lower_bound: null\nrs_veto_threshold: 1e-4\nlr: 0.5\n"
        "sglang_mem_fraction_static: 0.5\ntis_upper_bound: 2.0\nsearch-url: http://x\nnested: {a: [1, 2], lr: {b: null}}\n"
    )
    second.write_text("tis_level: geometric\nsearch_url: http://y\n")
    words = ["--custom-config-path", str(file), "--lr", "0.1", "--no-use-tis", "--rs-lower-bound", "0.2"]
    config = parse_flags(words)
    assert (config.lr, config.use_tis, config.tis_level, config.tis_clip) == (0.5, True, "sequence", 5.0)
    assert (config.rs_lower_bound, config.rs_veto_threshold) == (None, 1e-4)
    assert config.carried == {
        "custom_config_path": str(file),
        "sglang_mem_fraction_static": 0.5,
        "tis_upper_bound": 2.0,
        "search_url": "http://x",
        "nested": {"a": [1, 2], "lr": {"b": None}},
    }
    both = parse_flags([*words, "--custom-config-path", str(second)])
    assert (both.tis_level, both.use_tis, both.carried["search_url"]) == ("geometric", True, "http://y")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lr: fast", "lr in {file} must be a number, not 'fast'"),
        ("use_tis: 1", "use_tis in {file} must be true or false, not 1"),
        (
            "tis_level: tokens",
            "tis_level in {file} must be one of token, sequence, geometric, not 'tokens': did you mean",
        ),
        ("tis_clip: -1", "tis_clip in {file} must be greater than 0, not -1.0"),
        ("lr: null", "lr in {file} must have a value: drop the key for the default"),
        ("replace: 3", "replace in {file} is reserved: args.replace already has a meaning, rename the key"),
        ("config: x.yaml", "config in {file} is reserved: args.config already has a meaning, rename the key"),
        ("release_train: true", "{file}: --release-train is not supported: "),
    ],
)
def test_invalid_custom_config_error_names_file_and_key(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    assert sentence.format(file=file) in rejection("--custom-config-path", str(file))


def test_custom_arguments_are_stored_in_carried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def add(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--search-top-k", type=int, default=3)
        parser.add_argument("--cache", type=Path, default=None)
        parser.add_argument("--verbose-search", action="store_true")
        return parser

    file = tmp_path / "run.yaml"
    file.write_text("search_top_k: 5\n")
    assert parse_flags([], add).carried == {"search_top_k": 3, "cache": None, "verbose_search": False}
    assert parse_flags(["--config", str(file)], add).carried["search_top_k"] == 5
    given = parse_flags(["--config", str(file), "--search-top-k", "7", "--cache", "/c", "--verbose-search"], add)
    assert given.carried == {"search_top_k": 7, "cache": "/c", "verbose_search": True}
    with pytest.raises(UserError, match="custom flags: argument --search-top-k: invalid int value: 'x'"):
        parse_flags(["--search-top-k", "x"], add)
    with pytest.raises(SystemExit):
        parse_flags(["--help"], add)
    assert "--verbose-search" in capsys.readouterr().out
    with pytest.raises(UserError, match="did you mean --search-top-k"):
        parse_flags(["--search-topk", "1"], add)
    with pytest.raises(UserError, match="custom flag --lr already exists"):
        parse_flags([], lambda parser: parser.add_argument("--lr") and parser)


def test_help_lists_every_flag_and_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        parse_args(["--lr", "1", "--help-all"])
    assert leave.value.code == 0
    text = capsys.readouterr().out
    assert all(spec.flag in text for spec in FLAG_SPECS.values())


def test_short_help_has_known_flags_and_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 110
    assert len(ESSENTIAL_FLAGS) == 20
    assert all(any(f"{FLAG_SPECS[name].flag} " in line for line in lines) for name, _ in ESSENTIAL_FLAGS)


def test_parse_args_returns_a_resolved_config(valid_argv: list[str], valid: dict[str, Any]) -> None:
    config = parse_args(valid_argv)
    assert config.global_batch_size == 256
    assert config.hf_checkpoint == valid["hf_checkpoint"]
