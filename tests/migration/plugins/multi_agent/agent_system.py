"""Solvers answer at once, rewriters improve on what they said, a selector picks one; all of it is trained on."""

import asyncio
import re
from copy import deepcopy

from slime.rollout.rm_hub import batched_async_rm
from slime.utils.http_utils import post
from slime.utils.types import Sample

SOLVER_PROMPT = "{problem}"
REWRITER_PROMPT = "{problem}\nHere are earlier solutions:\n{solutions}\nWrite a better one:\n"
SELECTOR_PROMPT = "{problem}\nWhich of these is right?\n{solutions}\nJudgment:"


async def generate_response(args, prompt, key):
    sampling_params = args.sampling_params
    tokenizer = args.tokenizer
    sample = deepcopy(args.sample)

    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.prompt = prompt
    prompt_token_ids = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    current_sampling_params = deepcopy(sampling_params)
    current_sampling_params["max_new_tokens"] = min(
        sampling_params["max_new_tokens"], args.rollout_max_context_len - len(prompt_token_ids)
    )
    if current_sampling_params["max_new_tokens"] <= 0:
        return None

    output = await post(
        url,
        {"input_ids": prompt_token_ids, "sampling_params": current_sampling_params, "return_logprob": True},
    )
    sampled = output["meta_info"]["output_token_logprobs"]
    sample.tokens = prompt_token_ids + [item[1] for item in sampled]
    sample.response_length = len(sampled)
    sample.response = output["text"]
    sample.rollout_log_probs = [item[0] for item in sampled]
    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "abort":
            sample.status = Sample.Status.ABORTED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    sample.metadata["agent"] = key

    args.results_dict[key].append(sample)
    return sample.response


class Agent:
    template = ""
    key = ""

    async def run(self, args, max_retries=1, **values):
        prompt = self.template.format(**values)
        for _attempt in range(max_retries):
            response = await generate_response(args, prompt, key=self.key)
            if response is not None:
                return response
        return None


class SolverAgent(Agent):
    template = SOLVER_PROMPT
    key = "solver"


class RewriterAgent(Agent):
    template = REWRITER_PROMPT
    key = "rewriter"


class SelectorAgent(Agent):
    template = SELECTOR_PROMPT
    key = "selector"

    def extract_selected_solution_idx(self, response, count):
        found = re.search(r"IDX\s*(\d+)", response or "")
        if found is None or int(found.group(1)) >= count:
            return None
        return int(found.group(1))


def numbered(solutions):
    return "\n".join(f"[{position}] {text}" for position, text in enumerate(solutions))


def reward_adjustment(samples, reward_weight):
    for sample in samples:
        sample.reward = sample.reward * reward_weight
    return samples


async def run_agent_system(args, sample):
    args = deepcopy(args)
    args.sample = sample
    args.results_dict = {"solver": [], "rewriter": [], "selector": []}

    problem = sample.prompt
    solver = SolverAgent()
    solved = await asyncio.gather(*(solver.run(args, problem=problem) for _ in range(args.num_parallel)))
    solutions = [text for text in solved if text is not None]
    if not solutions:
        sample.status = Sample.Status.ABORTED
        return [sample]

    rewriter = RewriterAgent()
    rewritten = await asyncio.gather(
        *(rewriter.run(args, problem=problem, solutions=numbered(solutions)) for _ in range(args.num_parallel))
    )
    rewrites = [text for text in rewritten if text is not None]

    for key in ("solver", "rewriter"):
        rewards = await batched_async_rm(args, args.results_dict[key])
        for one, reward in zip(args.results_dict[key], rewards, strict=True):
            one.reward = reward

    selector = SelectorAgent()
    judgment = await selector.run(args, problem=problem, solutions=numbered(rewrites))
    index = selector.extract_selected_solution_idx(judgment, len(rewrites))
    chosen = 0.0 if index is None else args.results_dict["rewriter"][index].reward
    for one in args.results_dict["selector"]:
        one.reward = chosen

    weight = args.correct_reward_weight if chosen else args.incorrect_reward_weight
    samples = args.results_dict["solver"] + args.results_dict["rewriter"] + args.results_dict["selector"]
    for one in samples:
        one.rollout_id = sample.index
        one.metadata["raw_reward"] = one.reward
    return reward_adjustment(samples, weight)
