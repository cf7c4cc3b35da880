"""A tokenizer on disk, a scripted engine that answers over HTTP, and runtimes that talk to it."""

import asyncio
import json
import string

import pytest
from aiohttp import web

from slime.config import Config, derive
from slime.data.sample import Sample
from slime.rollout.event_loop import LoopThread
from slime.rollout.runtime import RolloutRuntime
from slime.rollout.sample_pipeline import generate_and_rm_group

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A character-level tokenizer (one token per character, `</s>` and roles as single tokens) and a config.json."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["</s>", "<user>", "<assistant>", "<system>"]
    characters = string.ascii_letters + string.digits + string.punctuation + " \n"
    vocab = {token: i for i, token in enumerate([*specials, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", additional_special_tokens=specials[1:], unk_token="?"
    )
    fast.chat_template = CHAT_TEMPLATE
    folder = tmp_path_factory.mktemp("model")
    fast.save_pretrained(folder)
    facts = {"model_type": "qwen3", "max_position_embeddings": 512, "vocab_size": 200}
    (folder / "config.json").write_text(json.dumps(facts))
    return str(folder)


class ScriptedEngine:
    """Answers `/generate` with `respond(body)`: text, or a dict that overrides parts of the usual answer.

    The log-prob of token id t is -t / 100, so that tests can recompute every number.
    """

    def __init__(self, encode):
        self.encode = encode
        self.respond = lambda body: "7</s>"
        self.requests = []
        self.version = "1"
        self.aborts = []
        self._held = []
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        self._loop = LoopThread("scripted-engine")
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        self._loop.run(self._runner.setup())
        self._loop.run(web.TCPSite(self._runner, "127.0.0.1", 0).start())
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _generate(self, request):
        body = await request.json()
        self.requests.append(body)
        answer = self.respond(body)
        if asyncio.iscoroutine(answer):
            answer = await answer
        if isinstance(answer, web.StreamResponse):
            return answer
        overrides = answer if isinstance(answer, dict) else {"text": answer}
        text = overrides["text"]
        ids = self.encode(text)
        limit = body["sampling_params"]["max_new_tokens"]
        finish = overrides.get("finish") or ("stop" if len(ids) <= limit else "length")
        ids = ids[:limit]
        meta_info = {
            "finish_reason": {"type": finish},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": overrides.get("cached", 0),
            "weight_version": self.version,
            "output_token_logprobs": [[-t / 100, t, None] for t in ids],
            **overrides.get("meta", {}),
        }
        return web.json_response({"text": text, "output_ids": ids, "meta_info": meta_info})

    async def held(self, text, finish="abort"):
        """Return an answer when the engine receives an abort request."""
        released = asyncio.get_running_loop().create_future()
        self._held.append(released)
        await released
        return {"text": text, "finish": finish}

    @property
    def holding(self):
        """The number of answers held now."""
        return len(self._held)

    async def when(self, condition, answer):
        """Return an answer as soon as a condition holds that other requests fulfil."""
        while not condition():  # noqa: ASYNC110 - the condition reads lists, which have no event
            await asyncio.sleep(0.005)
        return answer

    async def _abort(self, request):
        self.aborts.append(await request.json())
        held, self._held = self._held, []
        for released in held:
            released.set_result(None)
        return web.Response()

    def close(self):
        self._loop.run(self._runner.cleanup())
        self._loop.close()


@pytest.fixture(scope="session")
def tokenizer(model_folder):
    from slime.data.chat_template import load_tokenizer

    return load_tokenizer(model_folder)


@pytest.fixture
def make_engine(tokenizer):
    engines = []

    def make():
        engines.append(ScriptedEngine(lambda text: tokenizer.encode(text, add_special_tokens=False)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(make_engine):
    return make_engine()


@pytest.fixture
def make_runtime(model_folder, monkeypatch):
    """`make_runtime(urls, **flags)`: a bound runtime over those engines; engine retries have a short backoff."""
    monkeypatch.setattr("slime.engine.http.pool.FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr("slime.engine.http.transport.FIRST_BACKOFF_S", 0.01)
    runtimes = []

    def make(urls, **flags):
        usual = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "rollout_max_response_len": 8, "num_rollout": 1}
        config = derive(Config(**({"hf_checkpoint": model_folder, "device": "cpu"} | usual | flags)))
        runtimes.append(RolloutRuntime(config, urls, dispatch=generate_and_rm_group))
        return runtimes[-1]

    yield make
    for runtime in runtimes:
        runtime.close()


@pytest.fixture
def write_plugin(tmp_path):
    """Write a plugin file; returns the path of its function `f`."""

    def write(source, name="plugin"):
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        return f"{path}:f"

    return write


class Prompts:
    """A data source over fixed prompts with the interface that rollout functions use."""

    def __init__(self, prompts, n, labels=None):
        self.groups = [
            [
                Sample(prompt=prompt, label=labels[g] if labels else None, group_index=g, index=g * n + i)
                for i in range(n)
            ]
            for g, prompt in enumerate(prompts)
        ]

        self.asked = []

    def get_samples(self, count):
        self.asked.append(count)
        taken, self.groups = self.groups[:count], self.groups[count:]
        return taken

    def add_samples(self, groups):
        self.groups = groups + self.groups


@pytest.fixture
def prompts():
    return Prompts
