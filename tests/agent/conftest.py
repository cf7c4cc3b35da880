"""Fixtures: a model folder whose template renders tools, scripted engines, and runtimes that use them."""

import json

import pytest

from slime.config import Config, derive
from slime.data.chat_template import load_tokenizer
from slime.rollout.runtime import RolloutRuntime
from slime.rollout.sample_pipeline import generate_and_rm_group
from tests.agent.live_clients import JUDGE, Service
from tests.agent.scripted_engine import Script, ScriptedEngine, Turn
from tests.migration.scripted import CHAT_TEMPLATE
from tests.tiny_models import VOCAB, make_tokenizer

CONTEXT = 4096


@pytest.fixture(scope="session")
def agent_folder(tmp_path_factory):
    """Model folder without weights: a config.json and a tokenizer whose template renders tools and tool calls."""
    folder = tmp_path_factory.mktemp("agent_model")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    facts = {"model_type": "qwen3", "max_position_embeddings": CONTEXT, "vocab_size": VOCAB}
    (folder / "config.json").write_text(json.dumps(facts))
    return str(folder)


@pytest.fixture(scope="session")
def agent_tokenizer(agent_folder):
    return load_tokenizer(agent_folder)


@pytest.fixture
def play(agent_tokenizer):
    """`play([turn, ...], **options)`: (engine, url) of an engine that plays these turns."""
    serving = []

    def make(*plays, **options):
        engine = ScriptedEngine(Script(agent_tokenizer, plays), **options)
        context = engine.serving()
        serving.append(context)
        return engine, context.__enter__()

    yield make
    for context in serving:
        context.__exit__(None, None, None)


def make_agent_runtime(folder, run_dir, urls, **flags):
    """Return a bound runtime over these engines; the caller must close it."""
    usual = {
        "rollout_batch_size": 1,
        "n_samples_per_prompt": 1,
        "rollout_max_response_len": 400,
        "num_rollout": 1,
        "output_dir": str(run_dir),
    }
    config = derive(Config(hf_checkpoint=folder, device="cpu", **(usual | flags)))
    return RolloutRuntime(config, urls, dispatch=generate_and_rm_group)


@pytest.fixture
def agent_runtime(agent_folder, tmp_path, monkeypatch):
    """`agent_runtime(url, ..., **flags)`: a bound runtime over those engines; engine retries do not wait."""
    monkeypatch.setattr("slime.engine.http.pool.FIRST_BACKOFF_S", 0.01)
    runtimes = []

    def make(*urls, **flags):
        runtimes.append(make_agent_runtime(agent_folder, tmp_path / "run", urls, **flags))
        return runtimes[-1]

    yield make
    for runtime in runtimes:
        runtime.close()


@pytest.fixture
def serve(agent_folder, agent_tokenizer, tmp_path):
    """`serve(turn, ..., **flags)`: a live service whose engine plays these turns."""
    made = []
    (tmp_path / "judge.py").write_text(JUDGE)

    def make(*turns, **flags):
        engine = ScriptedEngine(Script(agent_tokenizer, [turns]))
        context = engine.serving()
        usual = {
            "async_mode": "full",
            "live_judge_path": f"{tmp_path / 'judge.py'}:judge",
            "live_filter_path": f"{tmp_path / 'judge.py'}:clean",
        }
        runtime = make_agent_runtime(agent_folder, tmp_path / "run", [context.__enter__()], **{**usual, **flags})
        made.append((runtime, context))
        return Service(runtime, engine)

    yield make
    for runtime, context in made:
        runtime.close()
        context.__exit__(None, None, None)


@pytest.fixture
def spoken(agent_tokenizer):
    return [Turn.of(agent_tokenizer, f"answer {number}", seed=number) for number in range(6)]
