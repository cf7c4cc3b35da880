"""Search-R1: the model asks a retrieval server between <search> tags and answers between <answer> tags."""

import asyncio
import os
import re

import aiohttp
from qa_em import compute_score_em

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

SEARCH_R1_CONFIGS = {
    "max_turns": 3,
    "topk": 2,
    "search_concurrency": 4,
    "search_url": os.environ.get("SEARCH_URL", "http://127.0.0.1:8000/retrieve"),
    # tokens and log-probs as sampled; else the text is cut after the first tag and tokenised
    "return_logprob": True,
    "format_score": 0.2,
}

SEMAPHORE = asyncio.Semaphore(SEARCH_R1_CONFIGS["search_concurrency"])


def _passages2string(retrieval_result):
    text = ""
    for position, item in enumerate(retrieval_result):
        content = item["document"]["contents"]
        title, _, body = content.partition("\n")
        text += f"Doc {position + 1}(Title: {title}) {body}\n"
    return text


async def post_json(url, payload):
    async with aiohttp.ClientSession() as session, session.post(url, json=payload) as response:
        response.raise_for_status()
        return await response.json()


async def search(query):
    payload = {"queries": [query], "topk": SEARCH_R1_CONFIGS["topk"], "return_scores": True}
    async with SEMAPHORE:
        result = await post_json(SEARCH_R1_CONFIGS["search_url"], payload)
    return _passages2string(result["result"][0])


def postprocess_responses(resp):
    for tag in ("</search>", "</answer>"):
        if tag in resp:
            return resp.split(tag)[0] + tag
    return resp


def postprocess_predictions(prediction):
    match = re.search(r"<(search|answer)>(.*?)</\1>", prediction, re.DOTALL)
    if match is None:
        return None, ""
    return match.group(1), match.group(2).strip()


async def execute_predictions(prediction):
    action, content = postprocess_predictions(prediction)
    if action == "search":
        found = await search(content)
        return f"\n\n<information>{found.strip()}</information>\n\n", False
    if action == "answer":
        return "", True
    return (
        "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
        "If I want to give the final answer, I should put the answer between <answer> and </answer>.\n",
        False,
    )


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout, "Partial rollout is not supported for this function at the moment."

    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    return_logprob = SEARCH_R1_CONFIGS["return_logprob"]

    prompt_token_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response = ""
    response_token_ids = []
    loss_mask = []
    rollout_log_probs = [] if return_logprob else None
    output = None

    for _turn in range(SEARCH_R1_CONFIGS["max_turns"]):
        payload = {"text": sample.prompt + response, "sampling_params": sampling_params}
        if return_logprob:
            payload = {
                "input_ids": prompt_token_ids + response_token_ids,
                "sampling_params": sampling_params,
                "return_logprob": True,
            }
        output = await post(url, payload)

        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample

        cur_response = output["text"]
        if return_logprob:
            cur_token_ids = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
            rollout_log_probs += [item[0] for item in output["meta_info"]["output_token_logprobs"]]
        else:
            cur_response = postprocess_responses(cur_response)
            cur_token_ids = state.tokenizer(cur_response, add_special_tokens=False)["input_ids"]

        response += cur_response
        response_token_ids += cur_token_ids
        loss_mask += [1] * len(cur_token_ids)

        if output["meta_info"]["finish_reason"]["type"] == "length":
            break

        next_obs, done = await execute_predictions(cur_response)
        if done:
            break

        assert next_obs != "", "Next observation should not be empty."
        obs_token_ids = state.tokenizer(next_obs, add_special_tokens=False)["input_ids"]
        response += next_obs
        response_token_ids += obs_token_ids
        loss_mask += [0] * len(obs_token_ids)
        if return_logprob:
            rollout_log_probs += [0.0] * len(obs_token_ids)
            assert len(response_token_ids) == len(rollout_log_probs)

    sample.tokens = prompt_token_ids + response_token_ids
    sample.response_length = len(response_token_ids)
    sample.response = response
    sample.loss_mask = loss_mask
    sample.prompt = sample.prompt
    if return_logprob:
        sample.rollout_log_probs = rollout_log_probs

    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "abort":
            sample.status = Sample.Status.ABORTED
        case "stop":
            sample.status = Sample.Status.COMPLETED

    return sample


async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    return compute_score_em(
        solution_str=sample.prompt + sample.response,
        ground_truth=sample.label["ground_truth"],
        format_score=SEARCH_R1_CONFIGS["format_score"],
    )
