"""One engine call per sample, the tokens kept as they were sampled.

--custom-generate-function-path examples/plugins/generate.py
"""

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post


async def generate(args, sample, sampling_params):
    """Fill in the response of one sample."""
    sample.tokens = GenerateState(args).tokenizer.encode(sample.prompt, add_special_tokens=False)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
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
    return sample
