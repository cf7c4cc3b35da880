"""examples/search-r1: the synthetic data set, BM25, the retrieval server and the search tool."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from slime.config.plugins import load_function
from slime.data.sample import Sample

HERE = Path(__file__).resolve().parents[1] / "examples/search-r1"


def load(file: str, name: str) -> Any:
    return load_function(f"{HERE / file}.py:{name}", what=name)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    files, _ = load("task", "write_files")(
        tmp_path_factory.mktemp("world"), demonstrations=300, training=200, held_out=50, seed=2
    )
    return files


def test_held_out_names_are_in_no_other_file_and_towns_are_unique(world: Any) -> None:
    def told_of(questions: list[str]) -> set[str]:
        return {question.removeprefix("In which land was ").removesuffix(" born?") for question in questions}

    held_out = told_of([row["prompt"][0]["content"] for row in rows(world.held_out)])
    training = told_of([row["prompt"][0]["content"] for row in rows(world.training)])
    copied = rows(world.demonstrations)
    assert (len(held_out), len(training)) == (50, 200)
    assert not held_out & training
    towns = {line.split(" was born in ")[1].rstrip(".") for line in _texts(world) if " was born in " in line}
    assert len(towns) == 550  # one town per person
    named = json.dumps(copied)
    assert not [name for name in held_out if name in named]


def _texts(world: Any) -> list[str]:
    return [row["contents"].partition("\n")[2] for row in rows(world.corpus)]


def test_two_searches_find_every_held_out_answer(world: Any) -> None:
    index = load("bm25", "Bm25")([row["contents"] for row in rows(world.corpus)])
    for row in rows(world.held_out):
        name = row["prompt"][0]["content"].removeprefix("In which land was ").removesuffix(" born?")
        [(_, born)] = index.search(name, 1)
        town = born.partition(" was born in ")[2].rstrip(".")
        [(_, lies)] = index.search(town, 1)
        assert lies == f"{town}\n{town} lies in {row['label']}."


def test_bm25_scores_match_the_formula() -> None:
    index = load("bm25", "Bm25")(["a b b", "a c", "d"])
    found = index.search("b a unknown", 5)
    # idf(b) = ln(1 + 2.5/1.5), idf(a) = ln(1 + 1.5/2.5); mean length 2
    assert [text for _, text in found] == ["a b b", "a c"]
    weight_b = 0.9808292530117263 * 2 * 2.2 / (2 + 1.2 * (0.25 + 0.75 * 1.5))
    weight_a = 0.47000362924573563 * 2.2 / (1 + 1.2 * (0.25 + 0.75 * 1.5))
    assert found[0][0] == pytest.approx(weight_b + weight_a)
    assert found[1][0] == pytest.approx(0.47000362924573563)
    assert index.search("", 3) == []


def test_server_speaks_the_search_r1_protocol_and_answers_the_tool(world: Any) -> None:
    name = rows(world.held_out)[0]["prompt"][0]["content"].removeprefix("In which land was ").removesuffix(" born?")

    async def main(url: str) -> None:
        async with aiohttp.ClientSession() as session:
            async with session.post(
                url, json={"queries": [name, "Nobody"], "topk": 2, "return_scores": True}
            ) as answer:
                first, second = (await answer.json())["result"]
            assert first[0]["document"]["contents"].startswith(f"{name}\n{name} was born in ")
            assert first[0]["score"] > first[1]["score"] > 0
            assert second == []
            for body in ([], {"queries": "x"}, {"queries": [1]}, {"queries": [], "topk": 0.5}):
                async with session.post(url, json=body) as answer:
                    assert answer.status == 400
        async with load("generate", "environment")(url).open(Sample()) as box:
            assert (await box.call("search", {"query": name})).text.startswith(f"{name} was born in ")
            assert (await box.call("search", {"query": "xyzzy"})).text == "nothing found"

    with load("run", "retrieval_server")(world.corpus) as url:
        asyncio.run(main(url))


def test_search_returns_an_error_if_the_server_is_unreachable() -> None:
    async def main() -> None:
        async with load("generate", "environment")("http://127.0.0.1:9/retrieve").open(Sample()) as box:
            result = await box.call("search", {"query": "x"})
            assert result.outcome == "error"

    asyncio.run(main())


def test_reward_compares_the_recorded_answer_with_the_label() -> None:
    right_answer = load("task", "right_answer")
    assert right_answer(None, SimpleNamespace(metadata={"answer": "Tal Mon"}, label="Tal Mon")) == 1.0
    assert right_answer(None, SimpleNamespace(metadata={"answer": "Tal"}, label="Tal Mon")) == 0.0
