"""Rollout function of supervised training: answers come from the data, without engines.

Invariant: a text prompt is followed by its label and the end-of-sequence token, and both are trained on. A conversation
is rendered once as a whole, and all its assistant turns are trained on (`slime.data.turn_mask`). If the label is a
conversation itself, it continues the prompt, and only its turns are trained on. The response runs from the first
trained token to the end. Nothing is generated or scored, so samples have no reward, and metrics have no speed. The
turns are found with the chat template under every `--loss-mask-type`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from slime.config import Config
from slime.data.chat_template import ASSISTANT, Message, encode, ending_token_ids, is_conversation, prompt_token_ids
from slime.data.prompt_rows import label_text
from slime.data.sample import Sample
from slime.data.turn_mask import DROP_KEY, mask_turns
from slime.errors import UserError
from slime.rollout.metrics import sample_metrics, task_metrics
from slime.rollout.outcomes import PromptSource, RolloutFnTrainOutput
from slime.rollout.runtime import runtime_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_TOKENS_AT_AN_END = 2


def generate_rollout(
    args: Config, rollout_id: int, data_buffer: PromptSource, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """Return the next `rollout_batch_size` groups as supervised samples."""
    if evaluation:
        raise UserError(
            "supervised training has no evaluation of its own: give --eval-function-path "
            "slime.rollout.sglang_rollout.generate_rollout"
        )
    started = time.monotonic()
    runtime = runtime_for(args)
    args, tokenizer = runtime.args, runtime.tokenizer
    groups = data_buffer.get_samples(args.rollout_batch_size)
    for group in groups:
        for sample in group:
            fill_supervised(sample, tokenizer, max_context=args.rollout_max_context_len)
    samples = [sample for group in groups for sample in group]
    _warn_of_missing_stop(samples, tokenizer, args.hf_checkpoint)
    metrics = {f"rollout/{name}": value for name, value in sample_metrics(samples).items()}
    metrics |= task_metrics(args, samples)
    return RolloutFnTrainOutput(groups, metrics | {"perf/rollout_time": time.monotonic() - started})


def fill_supervised(sample: Sample, tokenizer: PreTrainedTokenizerBase, *, max_context: int | None = None) -> None:
    """Set the answers of `sample` (its label, or its assistant turns) as its response to train on.

    A response that exceeds `max_context` is truncated.
    """
    if isinstance(sample.prompt, str):
        answer = _label_text(sample)
        answer_ids = encode(tokenizer, answer)
        if tokenizer.eos_token_id is not None and answer_ids[-1:] != [tokenizer.eos_token_id]:
            answer_ids.append(tokenizer.eos_token_id)
        sample.tokens = prompt_token_ids(tokenizer, sample) + answer_ids
        sample.response = answer
        sample.response_length = len(answer_ids)
        sample.loss_mask = [1] * len(answer_ids)
    else:
        _fill_conversation(sample, tokenizer)
    sample.status = Sample.Status.COMPLETED
    sample.rollout_log_probs = None
    sample.reward = None
    if max_context is not None and len(sample.tokens) > max_context:
        assert sample.loss_mask is not None
        if sample.response_length and sample.prompt_length >= max_context:  # the first trained token must fit
            raise UserError(
                f"sample {sample.index}: the prompt has {sample.prompt_length} tokens and leaves no room for an answer "
                f"in --rollout-max-context-len {max_context}"
            )
        kept = max(0, max_context - sample.prompt_length)
        sample.loss_mask = sample.loss_mask[:kept]
        sample.tokens = sample.tokens[:max_context]
        sample.response_length = kept
        sample.status = Sample.Status.TRUNCATED


def _fill_conversation(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the tokens of a conversation: the turns of the prompt, then those of the label, or the label as one turn."""
    assert isinstance(sample.prompt, list)
    messages: list[Message] = sample.prompt
    if is_conversation(sample.label):
        messages = [*({DROP_KEY: 0, **message} for message in messages), *sample.label]
    else:
        answered = any(message["role"] == ASSISTANT for message in messages)
        is_complete = messages[-1]["role"] == ASSISTANT or (answered and sample.label in (None, ""))
        if not is_complete:
            messages = [*messages, {"role": ASSISTANT, "content": _label_text(sample)}]
    masked = mask_turns(
        tokenizer,
        messages,
        tools=sample.metadata.get("tools"),
        template_kwargs=sample.apply_chat_template_kwargs,
    )
    split = len(masked.token_ids) - masked.response_length
    sample.tokens = masked.token_ids
    sample.response = tokenizer.decode(masked.token_ids[split:])
    sample.response_length = masked.response_length
    sample.loss_mask = masked.loss_mask[split:]


def _warn_of_missing_stop(samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase, folder: str) -> None:
    """Log a warning if no answer ends with a special token, because the model then does not learn to stop."""
    whole = [sample for sample in samples if sample.status is Sample.Status.COMPLETED and sample.loss_mask]
    if not whole:
        return
    stops = ending_token_ids(tokenizer, folder)
    for sample in whole:  # a template may write a line break after the token that ends a turn
        trained = np.flatnonzero(np.asarray(sample.loss_mask))[-_TOKENS_AT_AN_END:]
        if stops.intersection(int(token) for token in sample.token_array()[sample.prompt_length + trained]):
            return
    logger.warning(
        "no answer is trained on with a token that ends it: the model will not learn to stop; use a tokenizer with an "
        "eos_token, or a chat template that ends the assistant's turns with it"
    )


def _label_text(sample: Sample) -> str:
    if sample.label is None or sample.label == "":
        raise UserError(
            f"sample {sample.index} has no answer to train on: name the column with --label-key, "
            "or end its messages with an assistant turn (without --apply-chat-template)"
        )
    if is_conversation(sample.label) and len(sample.label) > 1:
        raise UserError(
            f"sample {sample.index}: its answer is a conversation of {len(sample.label)} messages, but its prompt is a "
            "text: give the prompt as messages, without --apply-chat-template"
        )
    return label_text(sample.label)
