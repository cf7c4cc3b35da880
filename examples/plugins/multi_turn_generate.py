"""Several turns: the model answers, is told something, and answers again, --max-turns times (2 by default).

    --custom-generate-function-path examples/plugins/multi_turn_generate.py --max-turns 3

What was sampled is trained on, what is put in between is not. With --partial-rollout, `post` stands still between two
rollouts and goes on where it was; without, an answer that was cut off when the batch was full ends the sample.
"""

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post


async def multi_turn_generate(args, sample, sampling_params, evaluation=False):
    """Fill in the turns of one sample."""
    tokenizer = GenerateState(args).tokenizer
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.tokens = tokenizer.encode(sample.prompt, add_special_tokens=False)
    for turn in range(args.max_turns or 2):
        if turn:
            note = " Are you sure? "
            note_ids = tokenizer.encode(note, add_special_tokens=False)
            sample.append_response_tokens(args, tokens=note_ids, trainable=False, text=note)
        request = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
        answer = await post(url, request)
        sampled = answer["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[token for _, token, _ in sampled],
            log_probs=[log_prob for log_prob, _, _ in sampled],
            meta_info=answer["meta_info"],
            text=answer["text"],
        )
        if sample.status is sample.Status.ABORTED:
            break
    return sample
