"""When and on what the model is evaluated; sampling values not given are the rollout's."""

# ruff: noqa: RUF009 (`flag` declares a dataclass field)

from dataclasses import dataclass

from slime.config.flag import at_least, between, flag, minus_one_or_at_least


@dataclass(frozen=True, kw_only=True)
class EvalFlags:
    """Evaluation"""

    eval_prompt_data: list[tuple[str, str]] = flag(
        [], "datasets to evaluate on, as pairs; may be repeated", metavar="NAME PATH", repeat=True
    )
    eval_config: str | None = flag(
        None, "YAML, TOML or JSON file of evaluation datasets with their own sampling and rewards", metavar="FILE"
    )
    eval_interval: int | None = flag(None, "evaluate every so many rollout steps", check=at_least(1))
    skip_eval_before_train: bool = flag(False, "no evaluation before the first step")
    n_samples_per_eval_prompt: int = flag(1, "responses per evaluation prompt", check=at_least(1))
    eval_function_path: str = flag(
        None, "function like --rollout-function-path, called with evaluation=True", derived="--rollout-function-path"
    )
    eval_input_key: str = flag(None, "column of the prompt", derived="--input-key")
    eval_label_key: str | None = flag(None, "column of the reference answer", derived="--label-key")
    eval_tool_key: str = flag(None, "column of tool schemas", derived="--tool-key")
    eval_temperature: float = flag(
        None, "sampling temperature; 0: greedy", check=at_least(0), derived="--rollout-temperature"
    )
    eval_top_p: float = flag(None, "nucleus sampling", check=between(0, 1, low_open=True), derived="--rollout-top-p")
    eval_top_k: int = flag(None, "top-k sampling", check=minus_one_or_at_least(1), derived="--rollout-top-k")
    eval_max_response_len: int | None = flag(
        None, "most new tokens", check=at_least(1), derived="--rollout-max-response-len"
    )
    eval_max_prompt_len: int | None = flag(
        None, "longer prompts are dropped", check=at_least(1), derived="--rollout-max-prompt-len"
    )
    eval_max_context_len: int | None = flag(
        None, "most tokens of prompt and response together", check=at_least(2), derived="--rollout-max-context-len"
    )
    eval_min_new_tokens: int | None = flag(None, "fewest new tokens", check=at_least(0))
