"""Flags of sampling, rewards, the asynchronous modes, agents and the live service, including their plugins."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import above, at_least, between, flag, minus_one_or_at_least
from slime.storage.json_types import JsonMapping

# ruff: noqa: RUF009 (`flag` declares a dataclass field)


DEFAULT_ROLLOUT_FUNCTION = "slime.rollout.sglang_rollout.generate_rollout"
SFT_ROLLOUT_FUNCTION = "slime.rollout.sft_rollout.generate_rollout"

DEFAULT_RESPONSE_LEN = 128
"""SGLang's default limit, which applies to requests without a limit."""


@dataclass(frozen=True, kw_only=True)
class RolloutFlags:
    """Rollout: sampling responses"""

    rollout_function_path: str = flag(
        DEFAULT_ROLLOUT_FUNCTION,
        "function (args, rollout_id, data_source, evaluation=False) that generates one rollout; "
        "with --loss-type sft_loss the default reads answers instead of sampling them",
    )
    custom_generate_function_path: str | None = flag(
        None, "async function (args, sample, sampling_params) that generates one sample, for tools and several turns"
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
        7200.0, "timeout of the generation of one sample in seconds, tools and hooks included", check=above(0)
    )
    rollout_sample_filter_path: str | None = flag(
        None, "function (args, groups) that marks samples to leave out of training"
    )
    rollout_sample_hook_path: list[str] = flag(
        [], "function (args, sample) called after generation, before the reward; may be repeated", repeat=True
    )
    over_sampling_batch_size: int = flag(
        None,
        "prompts dispatched at a time; more than a batch lets a rollout finish without the slowest",
        check=at_least(1),
        follows="--rollout-batch-size",
    )
    dynamic_sampling_filter_path: str | None = flag(
        None,
        "function (args, samples) that decides whether a finished group is used for training",
        derived="groups with different rewards, with dapo",
    )
    partial_rollout: bool = flag(
        False, "continue responses that are cut off when the batch is full in the next rollout"
    )
    mask_offpolicy_in_partial_rollout: bool = flag(
        False, "do not train on tokens of earlier rollouts in a continued response"
    )
    rollout_all_samples_process_path: str | None = flag(
        None, "function (args, all_groups, data_source) called with every finished group, those dropped included"
    )
    rollout_data_postprocess_path: str | None = flag(
        None, "function (args, rollout_id, rollout_data) called on every training rank once advantages are computed"
    )
    custom_convert_samples_to_train_data_path: str | None = flag(
        None, "function (args, samples) that builds the training batch, a dict of lists"
    )
    sglang_server_concurrency: int = flag(512, "requests in flight per engine", check=at_least(1))


RM_TYPES = ("math", "dapo", "deepscaler", "f1", "gpqa", "ifbench", "remote_rm", "random")
LABEL_FREE_RM_TYPES = ("ifbench", "remote_rm", "random")
"""Verifiers that need no label."""


def compares_with_label(rm_type: str, metadata: JsonMapping) -> bool:
    """Return whether a verifier needs the sample's label; gpqa also accepts the letter in a row's metadata."""
    kind = rm_type.removeprefix("boxed_")
    return kind not in LABEL_FREE_RM_TYPES and not (kind == "gpqa" and metadata.get("correct_letter"))


def known_rm_type(value: str) -> str | None:
    """Check the name of a built-in verifier, with or without the boxed_ prefix."""
    return None if value.removeprefix("boxed_") in RM_TYPES else f"must be one of {', '.join(RM_TYPES)}"


@dataclass(frozen=True, kw_only=True)
class RewardFlags:
    """Reward: scoring responses"""

    rm_type: str | None = flag(
        None,
        f"built-in verifier: {', '.join(RM_TYPES)}; the prefix boxed_ extracts the boxed answer first",
        check=known_rm_type,
    )
    rm_url: str | None = flag(None, "address of the reward service, for --rm-type remote_rm", metavar="URL")
    custom_rm_path: str | None = flag(None, "function (args, sample) that returns the reward")
    reward_key: str | None = flag(None, "entry to train on where rewards are dicts")
    eval_reward_key: str | None = flag(None, "entry to report in evaluation", follows="--reward-key")
    group_rm: bool = flag(False, "score all samples of a prompt in one call: custom function gets (args, samples)")
    reward_timeout: float = flag(600.0, "timeout of a reward function in seconds", check=above(0))
    reward_workers: int | None = flag(
        None,
        "processes that compare answers, for --rm-type math and deepscaler",
        check=at_least(1),
        derived="cores / 2",
    )
    custom_reward_post_process_path: str | None = flag(
        None, "function (args, samples) -> (raw_rewards, rewards) instead of group normalisation"
    )


SYNC, ONE_STEP, FULL = "sync", "one-step", "full"
FULLY_ASYNC_ROLLOUT_FUNCTION = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"


@dataclass(frozen=True, kw_only=True)
class AsyncFlags:
    """Asynchronous: generating while training"""

    async_mode: str = flag(
        None,
        "sync: generate, then train; one-step: the next rollout is generated while one is trained on; full: generation "
        "never stops, and weights change during requests",
        choices=(SYNC, ONE_STEP, FULL),
        derived="sync; one-step for slime train-async and train_async.py",
    )
    update_weights_interval: int = flag(1, "rollout steps between weight updates of the engines", check=at_least(1))
    async_buffer_size: int = flag(1, "one-step: most finished rollouts that wait for the trainers", check=at_least(1))
    max_weight_staleness: int | None = flag(
        None,
        "most rollout steps by which the weights that sampled a token may be behind in training; 0: synchronous",
        check=at_least(0),
        derived="2 in full mode, else no bound",
    )
    stale_samples: str = flag(
        "regenerate",
        "treatment of samples that are older than --max-weight-staleness: sampled again, or dropped",
        choices=("regenerate", "drop"),
    )


@dataclass(frozen=True, kw_only=True)
class AgentFlags:
    """Agents and sessions"""

    max_turns: int | None = flag(
        None, "most turns of one session, or of a multi-turn generate function", check=at_least(1)
    )
    session_max_tokens: int | None = flag(
        None, "most tokens that one session may sample, over all its turns", check=at_least(1)
    )
    strict_tokens: bool = flag(
        False, "refuse a client that edits, compacts or branches its history, instead of starting another sample"
    )
    agent_server_port: int | None = flag(
        None,
        "port of the OpenAI and Anthropic endpoints for agents",
        check=between(1, 65535),
        derived="a free one",
    )
    agent_public_url: str | None = flag(
        None,
        "base URL under which sandboxes on other machines reach these endpoints (needs --host and --agent-server-port)",
        metavar="URL",
    )
    sandbox: str = flag(
        "auto",
        "where agents and tools execute the model's code; auto: local, which needs namespaces; subprocess: no "
        "isolation, code has the rights of your user",
        choices=("auto", "local", "subprocess", "docker", "podman", "e2b"),
    )
    sandbox_image: str | None = flag(None, "image that sandboxes of docker, podman and e2b start from", metavar="NAME")
    sandbox_timeout: float = flag(120.0, "seconds that one command in a sandbox may take", check=above(0))
    sandbox_memory_mb: int = flag(
        4096, "MB of memory of one sandbox, for all its processes and the files that they write", check=at_least(1)
    )
    sandbox_processes: int = flag(512, "most processes of one sandbox", check=at_least(1))
    sandbox_disk_mb: int = flag(2048, "most MB that one sandbox may write to files", check=at_least(1))


@dataclass(frozen=True, kw_only=True)
class LiveFlags:
    """Live service"""

    live_judge_path: str | None = flag(
        None,
        "serve clients and train on their conversations: a function (args, exchange) that judges an answer by the "
        "client's next message",
        metavar="PATH",
    )
    live_filter_path: str | None = flag(
        None, "function (exchange) that returns True if the exchange may be kept and trained on", metavar="PATH"
    )
    live_idle_timeout: float = flag(
        600.0, "seconds after an answer without a new message, after which a conversation ends", check=above(0)
    )
    live_max_conversations: int = flag(
        4096, "most conversations held at once; beyond that, the one that is idle longest is evicted", check=at_least(1)
    )
