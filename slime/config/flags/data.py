"""Flags of prompts, batch sizes, the length of the run and evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import at_least, between, flag, minus_one_or_at_least
from slime.storage.json_types import JsonObject

# ruff: noqa: RUF009 (`flag` declares a dataclass field)


DEFAULT_DATA_SOURCE = "slime.rollout.data_source.RolloutDataSourceWithBuffer"
OUR_DATA_SOURCES = (DEFAULT_DATA_SOURCE, "slime.rollout.data_source.RolloutDataSource")


@dataclass(frozen=True, kw_only=True)
class DataFlags:
    """Data: prompts, batches and the length of the run"""

    prompt_data: str | None = flag(None, "prompts as .jsonl or .parquet; PATH@[a:b] takes a slice", metavar="PATH")
    prompt_config: str | None = flag(
        None, "YAML, TOML or JSON file of prompt datasets with weights, rewards and limits of their own", metavar="FILE"
    )
    input_key: str | None = flag(
        None,
        "column that holds the prompt: text, chat messages, or any value that a custom function reads",
        derived="input, else the only one of prompt, messages, question and problem",
    )
    label_key: str | None = flag(None, "column that holds the reference answer; a.b is b inside the object a")
    prompt_suffix: str | None = flag(None, "text appended to every prompt, or to its last user message", metavar="TEXT")
    metadata_key: str = flag("metadata", "column that holds a dict for reward and generate functions")
    tool_key: str = flag("tools", "column that holds tool schemas for the chat template")
    multimodal_keys: JsonObject | None = flag(
        None,
        "columns that hold images or other media; rows with such values are refused, prompts are text",
        metavar="JSON",
    )
    apply_chat_template: bool = flag(False, "render chat messages with the tokenizer's template")
    apply_chat_template_kwargs: JsonObject = flag({}, "extra arguments of the chat template", metavar="JSON")
    rollout_shuffle: bool = flag(False, "shuffle the prompts, in a new order in each epoch")
    rollout_seed: int = flag(42, "seed of the shuffle and of sampling")
    num_data_workers: int = flag(
        0, "processes that template and tokenise prompts; 0: in the driver itself", check=at_least(0)
    )
    streaming_data: bool = flag(False, "read prompts lazily, for files larger than memory")
    rollout_max_prompt_len: int | None = flag(
        None,
        "longer prompts (tokens) are dropped from the data",
        check=at_least(1),
        derived="--rollout-max-context-len minus 1 when that is given",
    )
    rollout_max_context_len: int | None = flag(None, "most tokens of prompt and response together", check=at_least(2))
    num_rollout: int | None = flag(None, "rollout steps of the whole run", check=at_least(0))
    num_epoch: int | None = flag(
        None, "passes over the prompts, where --num-rollout is not given", check=at_least(1), derived="1"
    )
    start_rollout_id: int | None = flag(None, "number of the first rollout step", check=at_least(0))
    rollout_batch_size: int = flag(32, "prompts per rollout step", check=at_least(1))
    n_samples_per_prompt: int = flag(1, "responses sampled for each prompt", check=at_least(1))
    global_batch_size: int = flag(
        None,
        "rollouts per optimizer step",
        check=at_least(1),
        derived="rollout_batch_size x n_samples_per_prompt / num_steps_per_rollout",
    )
    num_steps_per_rollout: int = flag(
        None, "optimizer steps per rollout step", check=at_least(1), derived="from --global-batch-size, else 1"
    )
    micro_batch_size: int = flag(1, "samples per forward pass, without --use-dynamic-batch-size", check=at_least(1))
    use_dynamic_batch_size: bool = flag(False, "fill each forward pass up to --max-tokens-per-gpu")
    max_tokens_per_gpu: int | None = flag(None, "tokens per forward pass and process", check=at_least(1))
    balance_data: bool = flag(False, "distribute the work over the training processes by FLOPs instead of by tokens")
    balance_by_flops: bool = flag(
        False, "micro-batches of equal FLOPs instead of at most --max-tokens-per-gpu tokens, which they may exceed"
    )
    loss_mask_type: str = flag(
        "auto",
        "how the turns of an assistant are found in supervised training; auto: by the chat template",
        choices=("auto", "qwen", "qwen3", "qwen3_5", "distill_qwen"),
    )
    data_source_path: str = flag(
        DEFAULT_DATA_SOURCE, "class that provides prompts: f(args) with get_samples, add_samples, save, load"
    )
    buffer_filter_path: str | None = flag(
        None, "function (args, rollout_id, buffer, num_samples) that picks groups from the buffer"
    )
    disable_rollout_global_dataset: bool = flag(
        False, "no prompt file: the data source or generate function makes prompts"
    )


@dataclass(frozen=True, kw_only=True)
class EvalFlags:
    """Evaluation"""

    eval_prompt_data: list[tuple[str, str]] = flag(
        [], "datasets to evaluate on, as pairs; may be repeated", metavar="NAME PATH", repeat=True
    )
    eval_config: str | None = flag(
        None, "YAML, TOML or JSON file of evaluation datasets with their own sampling and rewards", metavar="FILE"
    )
    eval_interval: int | None = flag(None, "rollout steps between evaluations", check=at_least(1))
    skip_eval_before_train: bool = flag(False, "no evaluation before the first step")
    n_samples_per_eval_prompt: int = flag(1, "responses per evaluation prompt", check=at_least(1))
    eval_function_path: str = flag(
        None, "function like --rollout-function-path, called with evaluation=True", follows="--rollout-function-path"
    )
    eval_input_key: str = flag(None, "column of the prompt", follows="--input-key")
    eval_label_key: str | None = flag(None, "column of the reference answer", follows="--label-key")
    eval_tool_key: str = flag(None, "column of tool schemas", follows="--tool-key")
    eval_temperature: float = flag(
        None, "sampling temperature; 0: greedy", check=at_least(0), follows="--rollout-temperature"
    )
    eval_top_p: float = flag(None, "nucleus sampling", check=between(0, 1, low_open=True), follows="--rollout-top-p")
    eval_top_k: int = flag(None, "top-k sampling", check=minus_one_or_at_least(1), follows="--rollout-top-k")
    eval_max_response_len: int | None = flag(
        None, "most new tokens", check=at_least(1), follows="--rollout-max-response-len"
    )
    eval_max_prompt_len: int | None = flag(
        None, "longer prompts are dropped", check=at_least(1), follows="--rollout-max-prompt-len"
    )
    eval_max_context_len: int | None = flag(
        None, "most tokens of prompt and response together", check=at_least(2), follows="--rollout-max-context-len"
    )
    eval_min_new_tokens: int | None = flag(None, "fewest new tokens", check=at_least(0))
