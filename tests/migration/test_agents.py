"""Agents written for upstream slime, unchanged, in whole runs: several turns, tools, environments, several agents."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from aiohttp import web

from slime.data.sample import Sample
from tests.e2e.runs import records
from tests.migration.agent_runs import Folder, make_folder, served, spelled, stretches

SEARCHES = {
    "\n": {"<search>": 0.5, "<answer>": 0.5},
    "<search>": {"q": 1.0},
    **spelled("quick", "</search>"),
    "</search>": {"and": 1.0},  # goes on unless somebody stops it
    "<answer>": {"forty-six": 0.6, "forty-seven": 0.4},
    "forty-six": {"</answer>": 1.0},
    "forty-seven": {"</answer>": 1.0},
    "</answer>": {"and": 1.0},
}
INFORMATION = "\n\n<information>Doc 1(Title: fox) the quick fox\nDoc 2(Title: dog) the lazy dog</information>\n\n"


def retrieval(asked: list[Any]) -> web.Application:
    """A retrieval server that keeps what it was asked."""

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


def test_search_r1_with_the_tokens_as_sampled(search_folder: Folder) -> None:
    asked: list[Any] = []
    with served(retrieval(asked)) as url:
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
                assert tokens[1:-1] == spelled_out  # as sampled: its text would be tokenised otherwise
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


def test_search_r1_with_text_that_is_cut_and_tokenised(search_folder: Folder) -> None:
    search_folder.edit("generate_with_search.py", '"return_logprob": True', '"return_logprob": False')
    asked: list[Any] = []
    with served(retrieval(asked)) as url:
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
            assert "and" not in text or not bit  # cut behind the first tag
    assert len(asked) == sum(not bit for sample in samples for bit, _ in stretches(sample)) > 0
