"""The rollout function of supervised training: answers come from the data, no engine takes part.

Invariant: `tokens` are the prompt as generation would see it followed by the answer and the end-of-sequence token;
the loss mask is 1 on exactly the latter two. Nothing is generated or scored: samples have no reward, metrics no speed.
"""

from __future__ import annotations

import time
from typing import Any

from slime.config import Config
from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.metrics import sample_metrics
from slime.rollout.runtime import runtime_for
from slime.rollout.tokenization import encode, prompt_token_ids, render_messages


def generate_rollout(args: Config, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """The next `rollout_batch_size` groups as supervised samples."""
    if evaluation:
        raise UserError(
            "supervised training has no evaluation of its own: give --eval-function-path "
            "slime.rollout.sglang_rollout.generate_rollout"
        )
    started = time.monotonic()
    tokenizer = runtime_for(args).tokenizer
    groups: list[Any] = data_source.get_samples(args.rollout_batch_size)
    for group in groups:
        for sample in group:
            fill_supervised(sample, tokenizer, max_context=args.rollout_max_context_len)
    samples = [sample for group in groups for sample in group]
    metrics = {f"rollout/{name}": value for name, value in sample_metrics(samples).items()}
    return RolloutFnTrainOutput(groups, metrics | {"perf/rollout_time": time.monotonic() - started})


def fill_supervised(sample: Sample, tokenizer: Any, *, max_context: int | None = None) -> None:
    """Write the answer (label, or last assistant turn) of `sample` into it as a response to be trained on."""
    prompt_ids, answer = _prompt_and_answer(sample, tokenizer)
    answer_ids = encode(tokenizer, answer)
    if tokenizer.eos_token_id is not None and answer_ids[-1:] != [tokenizer.eos_token_id]:
        answer_ids.append(tokenizer.eos_token_id)
    sample.status = Sample.Status.COMPLETED
    if max_context is not None and len(prompt_ids) + len(answer_ids) > max_context:
        if len(prompt_ids) >= max_context:
            raise UserError(
                f"sample {sample.index}: the prompt has {len(prompt_ids)} tokens and leaves no room for an answer "
                f"in --rollout-max-context-len {max_context}"
            )
        answer_ids = answer_ids[: max_context - len(prompt_ids)]
        sample.status = Sample.Status.TRUNCATED
    sample.tokens = prompt_ids + answer_ids
    sample.response = answer
    sample.response_length = len(answer_ids)
    sample.loss_mask = [1] * len(answer_ids)
    sample.rollout_log_probs = None
    sample.reward = None


def _prompt_and_answer(sample: Sample, tokenizer: Any) -> tuple[list[int], str]:
    if isinstance(sample.prompt, str):
        return prompt_token_ids(tokenizer, sample), _label_text(sample)
    messages = sample.prompt
    if messages[-1]["role"] != "assistant":
        messages = [*messages, {"role": "assistant", "content": _label_text(sample)}]
    prompt = render_messages(tokenizer, sample, messages[:-1], add_generation_prompt=True)
    whole = render_messages(tokenizer, sample, messages, add_generation_prompt=False)
    if not whole.startswith(prompt):  # a template that treats the last turn specially: take the words themselves
        return encode(tokenizer, prompt), str(messages[-1]["content"])
    answer = whole[len(prompt) :]
    if tokenizer.eos_token and tokenizer.eos_token in answer:
        answer = answer[: answer.index(tokenizer.eos_token) + len(tokenizer.eos_token)]
    return encode(tokenizer, prompt), answer


def _label_text(sample: Sample) -> str:
    if sample.label is None or sample.label == "":
        raise UserError(
            f"sample {sample.index} has no answer to train on: name the column with --label-key, "
            "or end its messages with an assistant turn (without --apply-chat-template)"
        )
    return sample.label if isinstance(sample.label, str) else str(sample.label)
