"""How responses are sampled, and which functions of the user take part."""

# ruff: noqa: RUF009 (`flag` declares a dataclass field)

from dataclasses import dataclass

from slime.config.flag import above, at_least, between, flag, minus_one_or_at_least

DEFAULT_ROLLOUT_FUNCTION = "slime.rollout.sglang_rollout.generate_rollout"
SFT_ROLLOUT_FUNCTION = "slime.rollout.sft_rollout.generate_rollout"

DEFAULT_RESPONSE_LEN = 128
"""Where no limit is given, requests go out without one, and this is what SGLang takes then."""


@dataclass(frozen=True, kw_only=True)
class RolloutFlags:
    """Rollout: sampling responses"""

    rollout_function_path: str = flag(
        DEFAULT_ROLLOUT_FUNCTION,
        "function (args, rollout_id, data_source, evaluation=False) that makes one rollout step; "
        "with --loss-type sft_loss the default reads answers instead of sampling them",
    )
    custom_generate_function_path: str | None = flag(
        None, "async function (args, sample, sampling_params) that makes one sample: tools, several turns"
    )
    rollout_temperature: float = flag(1.0, "sampling temperature; also divides the logits in training", check=above(0))
    rollout_top_p: float = flag(1.0, "nucleus sampling", check=between(0, 1, low_open=True))
    rollout_top_k: int = flag(-1, "sample from the k likeliest tokens; -1: all", check=minus_one_or_at_least(1))
    allow_biased_sampling: bool = flag(
        False,
        "train on tokens that were drawn from a part of the vocabulary (--rollout-top-p, --rollout-top-k): log-probs "
        "are taken over all of it, so the gradient is biased",
    )
    rollout_max_response_len: int | None = flag(
        None, "most new tokens of one response", check=at_least(1), derived=f"{DEFAULT_RESPONSE_LEN}, as in SGLang"
    )
    rollout_stop: list[str] | None = flag(None, "strings that end a response", metavar="TEXT")
    rollout_stop_token_ids: list[int] | None = flag(None, "token ids that end a response", metavar="ID")
    rollout_skip_special_tokens: bool | None = flag(
        None,
        "leave all special tokens out of the response text; not given: only the one that ends it; with --no-: none",
    )
    rollout_sample_timeout: float = flag(
        7200.0, "seconds until one sample must be generated, tools and hooks included", check=above(0)
    )
    rollout_sample_filter_path: str | None = flag(
        None, "function (args, groups) that marks samples to leave out of training"
    )
    rollout_sample_hook_path: list[str] = flag(
        [], "function (args, sample) called after generation, before the reward; may be repeated", repeat=True
    )
    over_sampling_batch_size: int = flag(
        None,
        "prompts asked for at a time; more than a batch lets the slowest be left behind",
        check=at_least(1),
        derived="--rollout-batch-size",
    )
    dynamic_sampling_filter_path: str | None = flag(
        None,
        "function (args, samples) that says whether a finished group is worth training on",
        derived="groups with different rewards, with dapo",
    )
    partial_rollout: bool = flag(False, "responses cut off when the batch is full are continued in the next one")
    mask_offpolicy_in_partial_rollout: bool = flag(
        False, "tokens of earlier rollouts in a continued response are not trained on"
    )
    rollout_all_samples_process_path: str | None = flag(
        None, "function (args, all_groups, data_source) called with every finished group, those dropped included"
    )
    rollout_data_postprocess_path: str | None = flag(
        None, "function (args, rollout_id, rollout_data) called on every training rank once advantages are there"
    )
    custom_convert_samples_to_train_data_path: str | None = flag(
        None, "function (args, samples) that makes the training batch, a dict of lists"
    )
    sglang_server_concurrency: int = flag(512, "requests in flight per engine", check=at_least(1))
