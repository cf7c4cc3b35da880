"""Agents written for upstream slime, unchanged, in whole runs: several turns, tools, environments, several agents."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from slime.data.sample import Sample
from tests.e2e.runs import records
from tests.engine.conftest import EngineProcess
from tests.migration.agent_runs import Folder, make_folder, served, spelled, stretches
from tests.migration.plugins.tau_bench.tau_env import TOOLS_INFO
from tests.migration.scripted import END, make_scripted_model

SEARCHES = {
    "\n": {"<search>": 0.5, "<answer>": 0.5},
    "<search>": {"q": 1.0},
    **spelled("quick", "</search>"),
    "</search>": {"and": 1.0},  # continues unless a stop string ends it
    "<answer>": {"forty-six": 0.6, "forty-seven": 0.4},
    "forty-six": {"</answer>": 1.0},
    "forty-seven": {"</answer>": 1.0},
    "</answer>": {"and": 1.0},
}
INFORMATION = "\n\n<information>Doc 1(Title: fox) the quick fox\nDoc 2(Title: dog) the lazy dog</information>\n\n"


def retrieval_app(asked: list[Any]) -> web.Application:
    """A retrieval server that records its requests in `asked`."""

    async def retrieve(request: web.Request) -> web.Response:
        asked.append(await request.json())
        documents = ["fox\nthe quick fox", "dog\nthe lazy dog", "cat\nthe third one"][: asked[-1]["topk"]]
        found = [{"document": {"contents": text}, "score": 1.0} for text in documents]
        return web.json_response({"result": [found for _ in asked[-1]["queries"]]})

    app = web.Application()
    app.router.add_post("/retrieve", retrieve)
    return app


@pytest.fixture(scope="module")
def search_folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"what is {i}+{46 - i}?"}],
            "reward_model": {"ground_truth": {"target": ["Forty-Six."]}},
        }
        for i in range(8)
    ]
    return make_folder(tmp_path_factory.mktemp("search"), "search_r1", SEARCHES, rows)


SEARCH_FLAGS = (
    "--input-key prompt --label-key reward_model --apply-chat-template --rollout-shuffle "
    "--custom-generate-function-path generate_with_search.generate --custom-rm-path generate_with_search.reward_func"
)


def search_reward(folder: Folder, sample: Sample) -> float:
    text = folder.decode(sample.tokens)
    answered = "<answer>" in text
    return (1.0 if "forty-six" in text else 0.2) if answered else 0.0


def test_search_r1_trains_on_the_sampled_tokens(search_folder: Folder) -> None:
    asked: list[Any] = []
    with served(retrieval_app(asked)) as url:
        stops = ["--rollout-stop", "</search>", "</answer>"]
        done = search_folder.train(*SEARCH_FLAGS.split(), *stops, SEARCH_URL=f"{url}/retrieve")
    assert done.code == 0, done.err
    samples = search_folder.samples()
    assert len(samples) == 16
    spelled_out = [search_folder.model.tokenizer.encode(char)[0] for char in "quick"]
    searches = Counter[int]()
    for sample in samples:
        turns = stretches(sample)
        for bit, tokens in turns:
            text = search_folder.decode(tokens)
            if not bit:
                assert text == INFORMATION
            elif "<search>" in text:
                assert tokens[1:-1] == spelled_out  # as sampled: encoding the text gives other tokens
        searches[len([bit for bit, _ in turns if not bit])] += 1
        search_folder.check_log_probs(sample)
        assert sample.reward == search_reward(search_folder, sample)
        assert sample.response == search_folder.decode(sample.tokens[-sample.response_length :])
        assert sample.status is Sample.Status.COMPLETED
    assert set(searches) >= {0, 1, 2}  # some answer at once, some after one search, some after two
    assert len(asked) == sum(count * times for count, times in searches.items())
    assert all(body == {"queries": ["quick"], "topk": 2, "return_scores": True} for body in asked)
    [rollout] = records(search_folder.path / "out", "rollout")
    assert rollout["rollout/raw_reward"] == pytest.approx(sum(sample.reward for sample in samples) / 16)
    [train] = records(search_folder.path / "out", "train")
    assert train["train/train_rollout_logprob_abs_diff_max"] <= 1e-4


def test_search_r1_without_log_probs_tokenizes_the_cut_text(search_folder: Folder) -> None:
    search_folder.edit("generate_with_search.py", '"return_logprob": True', '"return_logprob": False')
    asked: list[Any] = []
    with served(retrieval_app(asked)) as url:
        done = search_folder.train(*SEARCH_FLAGS.split(), SEARCH_URL=f"{url}/retrieve")
    assert done.code == 0, done.err
    samples = search_folder.samples()
    assert len(samples) == 16
    encode = search_folder.model.tokenizer.encode
    for sample in samples:
        assert sample.rollout_log_probs is None
        assert sample.reward == search_reward(search_folder, sample)
        for bit, tokens in stretches(sample):
            text = search_folder.decode(tokens)
            assert bit or text == INFORMATION
            assert tokens == encode(text)
            assert "and" not in text or not bit  # cut after the first tag
    assert len(asked) == sum(not bit for sample in samples for bit, _ in stretches(sample)) > 0


CODE = '{"name": "code_interpreter", "arguments": {"code": "print(40 + 6)"}}'
BROKEN_CODE = '{"name": "code_interpreter", "arguments": {"code": "print(1 / 0)"}}'
UNREADABLE = '{"name": "code_interpreter", "arguments": {"code": }}'
TOOL_USER = {
    "\n": {"<tool_call>": 0.5, "Answer: ": 0.5},
    "<tool_call>": {CODE: 0.4, BROKEN_CODE: 0.3, UNREADABLE: 0.3},
    **{call: {"</tool_call>": 1.0} for call in (CODE, BROKEN_CODE, UNREADABLE)},
    "Answer: ": {"\\boxed{": 1.0},
    "\\boxed{": {"4": 1.0},
    "4": {"6": 0.6, "7": 0.4},  # two tokens; encoding their text gives one
    "6": {"}": 1.0},
    "7": {"}": 1.0},
}
INTERPRETED = {
    CODE: "\n\n<interpreter>\n46\n</interpreter>\n\n",
    BROKEN_CODE: "\n\n<interpreter>\nError: ZeroDivisionError: division by zero\n</interpreter>\n\n",
    UNREADABLE: "\nMy previous action is invalid. If I want to execute code, I should put it between <tool_call> and "
    "</tool_call>. If I want to give the final answer, I should use 'Answer: \\boxed{answer}'.\n",
}
RETOOL_FLAGS = (
    "--input-key prompt --label-key label --reward-key score --use-dynamic-batch-size --max-tokens-per-gpu 1024 "
    "--context-parallel-size 1 --custom-generate-function-path generate_with_retool.generate "
    "--custom-rm-path generate_with_retool.reward_func"
)


def test_retool_runs_code_between_the_turns(tmp_path: Path) -> None:
    rows = [{"prompt": f"what is {i} + {46 - i}?", "label": "46"} for i in range(4)]
    folder = make_folder(tmp_path, "retool", TOOL_USER, rows)
    done = folder.train(*RETOOL_FLAGS.split())
    assert done.code == 0, done.err
    samples = folder.samples()
    assert len(samples) == 16
    seen = Counter[str]()
    for sample in samples:
        turns = stretches(sample)
        calls = 0
        for (bit, said), (other, answered) in pairwise(turns):
            assert (bit, other) in ((1, 0), (0, 1))
            if bit:
                [call] = [call for call in INTERPRETED if call in folder.decode(said)]
                assert folder.decode(answered) == INTERPRETED[call]
                seen[call] += 1
                calls += call != UNREADABLE
        folder.check_log_probs(sample)
        assert (sample.tool_call_count, sample.payload_has_tools) == (calls, True)
        last = folder.decode(turns[-1][1])
        if not turns[-1][0]:  # four turns and no answer
            assert len(turns) == 8
            assert sample.reward["score"] == pytest.approx(min(-0.6, -1 + (calls - 2) / 2 * 0.1))
        elif "46" in last:
            assert sample.reward == {"score": 1.0, "acc": True, "pred": "46"}
            assert turns[-1][1][-5:] == [
                folder.model.tokenizer.encode(piece)[0] for piece in ("\\boxed{", "4", "6", "}", END)
            ]
            seen["right"] += 1
        else:
            score = pytest.approx(min(-0.6, -1 + (calls - 2) / 2 * 0.1))
            assert sample.reward == {"score": score, "acc": False, "pred": "47"}
            seen["wrong"] += 1
    assert set(seen) == {CODE, BROKEN_CODE, UNREADABLE, "right", "wrong"}
    [rollout] = records(tmp_path / "out", "rollout")
    assert rollout["rollout/raw_reward"] == pytest.approx(sum(sample.reward["score"] for sample in samples) / 16)


AGENTS = {
    "\n": {"\\boxed{": 1.0},
    "\\boxed{": {"4": 1.0},
    "4": {"6": 0.5, "7": 0.5},
    "6": {"}": 1.0},
    "7": {"}": 1.0},
    ":": {"IDX": 1.0},
    "IDX": {"0": 0.4, "1": 0.4, "9": 0.2},
}
AGENT_FLAGS = (
    "--input-key prompt --label-key label --apply-chat-template --rollout-shuffle --rm-type math "
    "--rollout-max-context-len 512 --balance-data --custom-config-path agents.yaml "
    "--eval-prompt-data sums prompts.jsonl@[0:2] --eval-interval 1 --skip-eval-before-train --eval-max-context-len 400 "
    "--rollout-function-path slime.rollout.sglang_rollout.generate_rollout "
    "--custom-generate-function-path rollout_with_multi_agents.generate_with_multi_agents"
)


def test_multi_agent_rollout_yields_several_samples(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"what is {i}+{46 - i}?"}], "label": "46"} for i in range(4)]
    folder = make_folder(tmp_path, "multi_agent", AGENTS, rows)
    (tmp_path / "agents.yaml").write_text("num_parallel: 2\n")
    done = folder.train(*AGENT_FLAGS.split())
    assert done.code == 0, done.err
    samples = folder.samples()
    rollouts: dict[Any, list[Sample]] = {}
    for sample in samples:
        rollouts.setdefault((sample.group_index, sample.rollout_id), []).append(sample)
    assert len(rollouts) == 16
    picked = Counter[Any]()
    for siblings in rollouts.values():
        by_agent = {agent: [one for one in siblings if one.metadata["agent"] == agent] for agent in AGENT_COUNTS}
        assert {agent: len(found) for agent, found in by_agent.items()} == AGENT_COUNTS
        [selector] = by_agent["selector"]
        weight = 1.2 if selector.metadata["raw_reward"] else 0.8
        for sample in siblings:
            folder.check_log_probs(sample)
            if sample is not selector:
                assert sample.metadata["raw_reward"] == ("46" in sample.response)
            assert sample.reward == pytest.approx(sample.metadata["raw_reward"] * weight)
            prompt = folder.decode(sample.tokens[: -sample.response_length])
            assert prompt == sample.prompt
        for rewriter in by_agent["rewriter"]:
            given = {f"[{n}] {one.response}" for one in by_agent["solver"] for n in (0, 1)}
            assert any(line in rewriter.prompt for line in given)
        picked[selector.response] += 1
        picked["unlike"] += len({tuple(one.tokens) for one in by_agent["solver"]}) == 2
    assert picked["unlike"] > 0  # concurrent agents sample different answers
    assert {answer for answer in picked if "IDX" in answer} == {f"IDX{n}<|im_end|>" for n in (0, 1, 9)}
    [rollout] = records(tmp_path / "out", "rollout")
    raw = [one.metadata["raw_reward"] for one in samples]
    assert rollout["rollout/raw_reward"] == pytest.approx(sum(raw) / len(raw))
    [evaluation] = records(tmp_path / "out", "eval")  # with evaluation=True
    assert evaluation["eval/sums/failed/count"] == 0
    assert 0 < evaluation["eval/sums"] < 1.2


AGENT_COUNTS = {"solver": 2, "rewriter": 2, "selector": 1}


SUM = '{"name": "calculator", "arguments": {"expression": "40 + 6"}}'
NO_SUM = '{"name": "calculator", "arguments": {"expression": "open(1)"}}'
FRAMEWORK_USER = {
    "\n": {"<tool_call>": 0.5, "It is ": 0.5},
    "<tool_call>": {SUM: 0.6, NO_SUM: 0.4},
    SUM: {"</tool_call>": 1.0},
    NO_SUM: {"</tool_call>": 1.0},
    "It is ": {"\\boxed{": 1.0},
    "\\boxed{": {"4": 1.0},
    "4": {"6": 0.6, "7": 0.4},
    "6": {"}": 1.0},
    "7": {"}": 1.0},
}
TOOL_ANSWERS = {f"<|im_start|>tool\n{text}<|im_end|>\n" for text in ("46", "Error: only numbers and operators")}
STRANDS_FLAGS = (
    "--input-key prompt --label-key label --custom-generate-function-path generate_with_strands.generate "
    "--custom-rm-path generate_with_strands.reward_func"
)


@pytest.mark.parametrize(
    ("program", "flags"), [("train.py", []), ("train_async.py", ["--sglang-tool-call-parser", "qwen25"])]
)
def test_agent_framework_trains_over_the_openai_routes(tmp_path: Path, program: str, flags: list[str]) -> None:
    """Tool calls are in the response text or parsed by the engine; the async driver warns of missing log-probs."""
    rows = [{"prompt": f"what is {i} + {46 - i}?", "label": "46"} for i in range(4)]
    folder = make_folder(tmp_path, "strands", FRAMEWORK_USER, rows)
    done = folder.train(*STRANDS_FLAGS.split(), *flags, program=program)
    assert done.code == 0, done.err
    assert done.err.count("importance weights") == (program == "train_async.py")  # dropped with one warning
    samples = folder.samples()
    assert len(samples) == 16
    seen = Counter[Any]()
    for sample in samples:
        assert sample.rollout_log_probs is None
        said = [message for message in sample.metadata["messages"] if message["role"] == "assistant"]
        turns = stretches(sample)
        trained = [folder.decode(tokens) for bit, tokens in turns if bit]
        assert len(trained) == len(said)
        assert all(message["content"] == (None if flags else "") for message in said if "tool_calls" in message)
        assert sample.tool_call_count == len(said) - (sample.status is Sample.Status.COMPLETED)
        for message, text in zip(said, trained, strict=True):
            call = next((call for call in (SUM, NO_SUM) if call in text), None)
            assert text == (message["content"] if call is None else f"<tool_call>{call}</tool_call>") + "<|im_end|>\n"
            seen[call] += 1
        told = {folder.decode(tokens).removesuffix("<|im_start|>assistant\n") for bit, tokens in turns if not bit}
        assert told <= TOOL_ANSWERS
        if sample.status is Sample.Status.TRUNCATED:  # no answer after six turns
            assert (len(said), sample.reward) == (6, 0.0)
            continue
        right = "\\boxed{46}" in said[-1]["content"]
        assert sample.reward == pytest.approx(1.0 if right else min(0.2, 0.1 * sample.tool_call_count))
    assert seen[None] > 0 < seen[SUM] + seen[NO_SUM]  # which one is random: these routes take no seed
    [rollout] = records(tmp_path / "out", "rollout")
    assert rollout["rollout/raw_reward"] == pytest.approx(sum(sample.reward for sample in samples) / 16)


LOOK, CANCEL, UNFINISHED = (
    '{"name": "get_order", "arguments": {}}',
    '{"name": "cancel_order", "arguments": {}}',
    '{"call": ',
)
CLERK = {
    "\n": {"<tool_call>": 0.5, "What else?": 0.5},
    "<tool_call>": {LOOK: 0.4, CANCEL: 0.5, UNFINISHED: 0.1},
    **{call: {"</tool_call>": 1.0} for call in (LOOK, CANCEL, UNFINISHED)},
}
CUSTOMER = {"\n": {"please cancel it": 0.5, "thanks ###STOP###": 0.5}}
TAU_FLAGS = "--input-key index --custom-generate-function-path generate_with_tau.generate"


def test_tau_bench_trains_with_a_model_as_customer(tmp_path: Path) -> None:
    rows = [{"index": i, "metadata": '{"source": "shop"}'} for i in range(4)]  # task numbers instead of prompts
    folder = make_folder(tmp_path, "tau_bench", CLERK, rows)
    customer = EngineProcess(make_scripted_model(tmp_path / "customer", CUSTOMER).folder, tmp_path / "customer.log")
    try:
        done = folder.train(*TAU_FLAGS.split(), USER_MODEL_URL=customer.url)
    finally:
        customer.stop()
    assert done.code == 0, done.err
    samples = folder.samples()
    assert [sample.index for sample in samples] == list(range(16))
    seen = Counter[Any]()
    for sample in samples:
        task = str(sample.group_index)  # prompts are taken in their order
        messages, actions = sample.metadata["messages"], sample.metadata["actions"]
        assert folder.decode(sample.tokens) == folder.model.tokenizer.apply_chat_template(
            messages, tools=TOOLS_INFO, tokenize=False, add_generation_prompt=messages[-1]["role"] != "assistant"
        )
        trained = [folder.decode(tokens) for bit, tokens in stretches(sample) if bit]
        assert trained == [m["content"] + "<|im_end|>\n" for m in messages if m["role"] == "assistant"]
        assert len(trained) == len(actions)
        cancelled = sample.metadata["orders"][task] == "cancelled"
        assert cancelled == ("cancel_order" in actions)
        assert sample.metadata["user_id"] == f"user_{task}"
        if sample.status is Sample.Status.COMPLETED:
            assert sample.reward == float(cancelled)
        else:
            assert sample.status is Sample.Status.TRUNCATED
            assert (len(actions), sample.reward) == (4, 0.0)
        assert sample.rollout_log_probs is None
        assert UNFINISHED not in folder.decode(sample.tokens)  # aborted samples are retried
        seen.update([sample.status, *actions])
    assert {Sample.Status.COMPLETED, "respond", "get_order", "cancel_order"} <= set(seen)
    [rollout] = records(tmp_path / "out", "rollout")
    assert rollout["rollout/raw_reward"] == pytest.approx(sum(sample.reward for sample in samples) / 16)


CALLED = '<tool_call>{"name": "bash", "arguments": {"command": "echo '
CODER = {
    "\n": {CALLED: 0.6, "done": 0.4},
    CALLED: {"q": 0.7, "fox": 0.3},
    **spelled("quick", ' > answer.txt"}}</tool_call>'),
    "fox": {' > answer.txt"}}</tool_call>': 1.0},
}


def test_coding_agent_trains_through_the_openai_adapter(tmp_path: Path) -> None:
    rows = [{"prompt": f"write it, {i}", "label": "quick"} for i in range(4)]
    folder = make_folder(tmp_path, "coding_agent", CODER, rows)
    flags = "--input-key prompt --label-key label --custom-generate-function-path generate_with_agent.generate"
    done = folder.train(*flags.split(), "--rollout-max-context-len", "1024")
    assert done.code == 0, done.err
    samples = folder.samples()
    assert len(samples) == 16
    encode = folder.model.tokenizer.encode
    spelled_out = [encode(char)[0] for char in "quick"]
    seen = Counter[Any]()
    for sample in samples:
        folder.check_log_probs(sample)  # as sampled, at the temperature of the run and not of the client
        turns = [tokens for bit, tokens in stretches(sample) if bit]
        calls = [tokens for tokens in turns if folder.decode(tokens).startswith("<tool_call>")]
        assert all(tokens[1:-2] == spelled_out for tokens in calls if "fox" not in folder.decode(tokens))
        counted = sample.metadata["session"]
        assert (counted["turns"], counted["retokenised_tokens"], counted["forked"]) == (len(turns), 0, 0)
        wrote_last = calls and "fox" not in folder.decode(calls[-1])
        assert sample.reward == float(bool(wrote_last))
        limited = len(calls) == 4
        assert sample.status is (Sample.Status.TRUNCATED if limited else Sample.Status.COMPLETED)
        assert sample.metadata["exit_code"] == int(limited)
        assert sample.metadata["use_tool"] == bool(calls)
        seen.update([len(turns), f"reward {sample.reward}"])
    assert {1, 2, 3, "reward 0.0", "reward 1.0"} <= set(seen)
    [rollout] = records(tmp_path / "out", "rollout")
    assert rollout["rollout/raw_reward"] == pytest.approx(sum(sample.reward for sample in samples) / 16)
    [train] = records(tmp_path / "out", "train")
    assert train["train/train_rollout_logprob_abs_diff_max"] <= 1e-4
