"""Other supported forms of a user's functions, taken from introductions to slime."""

from __future__ import annotations

import asyncio

import pytest

from slime.config import Config
from slime.config.parser import parse_flags
from slime.config.plugins.view import check_plugins
from slime.data.custom_source import make_data_source
from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.base_types import leaves
from slime.rollout.rewards.hub import RewardHub
from slime.rollout.sglang_rollout import generate_and_rm_group, generate_rollout

LIST_GENERATE = '''
async def generate_single(conversation):
    return "call 2" if len(conversation) == 1 else f"answer {conversation[-1]['content']}"

def extract_tool_call(response):
    return response.split()[1] if response.startswith("call") else None

def execute_tool(call):
    return str(2 * int(call))

def compute_reward(sample):
    return 1.0 if sample.response == "answer 4" else 0.0

async def custom_generate(args, samples, evaluation=False):
    """Multi-turn generation with tool calling."""
    for sample in samples:
        conversation = sample.prompt
        for turn in range(args.max_turns):
            # Generate response
            response = await generate_single(conversation)

            # Check for tool call
            tool_call = extract_tool_call(response)
            if tool_call:
                tool_result = execute_tool(tool_call)
                conversation.append({"role": "assistant", "content": response})
                conversation.append({"role": "tool", "content": tool_result})
            else:
                break

        sample.response = response
        sample.reward = compute_reward(sample)

    return samples
'''
CLASS_REWARD = """
def load_model(model_path):
    return lambda inputs: Scores(len(response) + len(model_path) for _, response in inputs)

class Scores(list):
    def tolist(self):
        return list(self)

class CustomRewardModel:
    made = 0

    def __init__(self, model_path):
        CustomRewardModel.made += 1
        self.model = load_model(model_path)

    def tokenize(self, prompts, responses):
        return list(zip(prompts, responses))

    def compute_reward(self, prompts, responses):
        inputs = self.tokenize(prompts, responses)
        scores = self.model(inputs)
        return [score + 10 * (self.made - 1) for score in scores.tolist()]
"""
SOURCES = """
from slime.utils.types import Sample

def select_best(buffer, num_samples):
    return sorted(buffer, key=lambda group: -group[0].reward)[:num_samples]

class Dataset:
    def sample(self, num_samples):
        return [Sample(prompt="fresh") for _ in range(num_samples)]

class RolloutDataSource:
    dataset = Dataset()

    def get_samples(self, num_samples):
        return self.dataset.sample(num_samples)

    def add_samples(self, samples):
        pass

class RolloutDataSourceWithBuffer(RolloutDataSource):
    def __init__(self):
        self.buffer = []

    def add_samples(self, samples):
        self.buffer.extend(samples)

    def buffer_filter(self, args, buffer, num_samples):
        return select_best(buffer, num_samples)
"""


def test_list_generate_function_with_tool_calls_is_tokenized(engine, make_runtime, prompts, write, tokenizer):
    path = write("custom_generate.py", LIST_GENERATE)
    check_plugins(Config(rollout_batch_size=1, custom_generate_function_path=path, max_turns=5))
    runtime = make_runtime([engine.url], custom_generate_function_path=path, max_turns=5)
    source = prompts([[{"role": "user", "content": "2*2"}], [{"role": "user", "content": "2*2"}]], n=2)
    for group in source.groups:
        for sample in group:
            sample.prompt = [dict(message) for message in sample.prompt]
    samples = list(leaves(generate_rollout(runtime.args, 0, source).samples))
    assert [(sample.response, sample.reward) for sample in samples] == [("answer 4", 1.0)] * 4
    for sample in samples:
        split = sample.prompt_length
        assert tokenizer.decode(sample.tokens[:split]) == (
            "<user>2*2</s>\n<assistant>call 2</s>\n<tool>4</s>\n<assistant>"
        )
        assert tokenizer.decode(sample.tokens[split:]) == "answer 4"
        assert (sample.loss_mask, sample.rollout_log_probs) == ([1] * 8, None)
        assert sample.status is Sample.Status.COMPLETED
    assert engine.requests == []


LIST_FORMS = """
async def fills_in(args, samples):
    samples[0].response = "abc"

def fans_out(args, samples, sampling_params, evaluation=False):
    first = samples[0]
    first.response = f"{sampling_params['max_new_tokens']} {evaluation}"
    return [first, type(first)(prompt=first.prompt, response="more", group_index=first.group_index)]

async def returns_text(args, samples):
    return "abc"
"""


def test_list_generate_function_may_return_none_or_samples_only(engine, make_runtime, write):
    path = write("forms.py", LIST_FORMS)
    runtime = make_runtime([engine.url], rm_type="random")

    def group(name):
        sample = Sample(prompt="q", index=5, group_index=0, generate_function_path=f"{path}:{name}")
        return runtime.run(generate_and_rm_group(runtime.args, [sample], {"max_new_tokens": 7}, evaluation=True))

    [filled] = group("fills_in")
    assert (filled.response, filled.response_length, len(filled.tokens)) == ("abc", 3, 4)
    [[one, two]] = group("fans_out")
    assert (one.response, two.response) == ("7 True", "more")
    assert one.rollout_id == two.rollout_id == 5
    [failed] = group("returns_text")
    assert failed.failure == (
        f"generate: TypeError: {path}:returns_text must return a Sample or a list of them, not 'abc'"
    )


def test_reward_class_is_built_once_and_called_with_lists(write):
    path = write("custom_rm.py", CLASS_REWARD)
    config = Config(rollout_batch_size=1, custom_rm_path=f"{path}:CustomRewardModel", carried={"model_path": "12345"})
    check_plugins(config)
    hub = RewardHub(config)
    samples = [Sample(prompt="p", response="x" * n) for n in range(3)]
    assert asyncio.run(hub.score_group(samples)) == [5.0, 6.0, 7.0]
    assert asyncio.run(hub.score(samples[2])) == 7.0


CLASS_FORMS = """
class Later:
    def __init__(self, args, rollout_batch_size, scale=2):
        self.scale = scale * rollout_batch_size * args.n_samples_per_prompt

    async def compute_reward(self, prompts, responses, labels=None, **kwargs):
        return [self.scale * (prompt == label) for prompt, label in zip(prompts, labels)]

class TooFew:
    def compute_reward(self, prompts, responses):
        return [1.0]
"""


def test_reward_class_gets_flags_by_name_and_may_be_async(write):
    path = write("classes.py", CLASS_FORMS)
    config = Config(rollout_batch_size=3, n_samples_per_prompt=5, custom_rm_path=f"{path}:Later")
    samples = [Sample(prompt="a", label="a"), Sample(prompt="a", label="b")]
    assert asyncio.run(RewardHub(config).score_group(samples)) == [30.0, 0.0]
    with pytest.raises(
        Exception, match=r"TooFew got 2 samples and must return a list of as many rewards, but it returned \[1.0\]"
    ):
        asyncio.run(RewardHub(config.replace(custom_rm_path=f"{path}:TooFew")).score_group(samples))


def test_group_reward_scores_fan_outs_and_sample_function_overrides_it(engine, make_runtime, write):
    rewards = write(
        "rewards.py",
        """
        async def of_group(args, samples, **kwargs):
            return [10.0 * len(samples)] * len(samples)

        def of_one(args, sample, **kwargs):
            return float(len(sample.response))
        """,
    )
    fan_out = write(
        "fan.py",
        """
        async def fan(args, sample, sampling_params):
            return [type(sample)(prompt="q", response="r" * n, index=sample.index) for n in (1, 2, 3)]
        """,
    )
    flags = {"custom_rm_path": f"{rewards}:of_group", "group_rm": True, "custom_generate_function_path": fan_out}
    runtime = make_runtime([engine.url], **flags)
    group = [Sample(prompt="q", index=i, group_index=0) for i in range(2)]
    finished = runtime.run(generate_and_rm_group(runtime.args, group, {"max_new_tokens": 7}))
    assert [[sample.reward for sample in member] for member in finished] == [[60.0] * 3] * 2

    plain = make_runtime([engine.url], custom_rm_path=f"{rewards}:of_group", group_rm=True)
    group = [Sample(prompt="q", index=i, group_index=0) for i in range(3)]
    group[1].custom_rm_path = f"{rewards}:of_one"
    finished = plain.run(generate_and_rm_group(plain.args, group, {"max_new_tokens": 7}))
    assert [sample.reward for sample in finished] == [20.0, 1.0, 20.0]  # one letter without the end token


def test_invalid_reward_fails_the_rollout_and_names_the_function(engine, make_runtime, prompts, write):
    path = write("verdict.py", "def verdict(args, sample):\n    return 'yes' if sample.index == 1 else 1\n")
    runtime = make_runtime([engine.url], custom_rm_path=path)
    wrong = r"verdict.py: the reward of sample 1 must be a number or a dict, got 'yes' \(str\): return one"
    with pytest.raises(UserError, match=wrong):
        generate_rollout(runtime.args, 0, prompts(["a"], n=2))
    endless = write("endless.py", "def endless(args, sample):\n    return float('inf')\n")
    runtime = make_runtime([engine.url], custom_rm_path=endless)
    with pytest.raises(UserError, match=r"endless.py: the reward of sample \d is inf, which is not a finite number"):
        generate_rollout(runtime.args, 0, prompts(["a"], n=2))


def make_source(path, **flags):
    config = Config(rollout_batch_size=2, n_samples_per_prompt=2, data_source_path=path, **flags)
    check_plugins(config)
    return make_data_source(config)


def test_data_source_with_a_buffer_works_without_save_and_load(write):
    path = write("sources.py", SOURCES)
    source = make_source(path)  # selects the class with a buffer by its conventional name
    groups = source.get_samples(2)
    assert [[(s.prompt, s.group_index, s.index) for s in group] for group in groups] == [
        [("fresh", 0, 0), ("fresh", 0, 1)],
        [("fresh", 1, 2), ("fresh", 1, 3)],
    ]
    for reward, group in enumerate(groups):
        group[0].reward = float(reward)
    source.add_samples(groups)
    assert source.get_samples(1) == [groups[1]]
    assert source.buffer == [groups[0]]
    served = source.get_samples(2)
    assert served[0] is groups[0]
    assert [sample.index for sample in served[1]] == [4, 5]
    source.save(0)
    source.load(0)
    with pytest.raises(UserError, match="has no length for --num-epoch: give --num-rollout"):
        _ = source.num_rollout_per_epoch


LESS = """
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.utils.types import Sample

class Least:
    def get_samples(self, num_samples):
        return [[Sample(prompt="a", index=7, group_index=9)] for _ in range(num_samples)]

    def __len__(self):
        return 11

class Wrong:
    def get_samples(self, num_samples):
        return ["text"] * num_samples

def make(args):
    return Least()

class Worst(RolloutDataSourceWithBuffer):
    def buffer_filter(self, args, buffer, num_samples):
        return buffer[-num_samples:]
"""


def test_minimal_data_source_gets_default_methods(write):
    path = write("less.py", LESS)
    for name in ("Least", "make"):
        source = make_source(f"{path}:{name}")
        [group] = source.get_samples(1)
        assert (group[0].index, group[0].group_index, len(source), source.num_rollout_per_epoch) == (7, 9, 11, 5)
        source.add_samples([group])
        assert source.get_samples(2)[0] is group
    with pytest.raises(UserError, match=r"get_samples must return groups \(lists of Sample\) or samples, not 'text'"):
        make_source(f"{path}:Wrong").get_samples(1)


def test_data_source_subclass_may_override_buffer_filter(write):
    source = make_source(f"{write('less.py', LESS)}:Worst", disable_rollout_global_dataset=True)
    groups = source.get_samples(3)
    source.add_samples(groups)
    assert source.get_samples(2) == groups[1:]
    assert source.buffer == groups[:1]


def test_parses_named_evaluation_files_and_max_turns():
    words = ["--eval-prompt-data", "aime", "/path/to/aime.jsonl", "--eval-prompt-data", "gsm8k", "/path/to/gsm8k.jsonl"]
    config = parse_flags([*words, "--n-samples-per-eval-prompt", "16", "--max-turns", "5"])
    assert config.eval_prompt_data == [("aime", "/path/to/aime.jsonl"), ("gsm8k", "/path/to/gsm8k.jsonl")]
    assert (config.n_samples_per_eval_prompt, config.max_turns) == (16, 5)
