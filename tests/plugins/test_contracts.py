"""Start-up checks of the functions that path flags name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import slime
from slime.config import Config
from slime.config.config import FLAG_SPECS
from slime.config.plugins import CONTRACTS, check, contract_of, load_function
from slime.config.plugins.view import check_plugins
from slime.config.resolve import derive
from slime.errors import UserError

Write = Callable[[str, str], str]


def rejection(**flags: Any) -> str:
    with pytest.raises(UserError) as caught:
        check_plugins(Config(rollout_batch_size=1, **flags))
    return str(caught.value)


def given(contract: Any, path: str) -> dict[str, Any]:
    repeated = FLAG_SPECS[contract.field_name].info.repeat
    return {contract.field_name: [path] if repeated else path}


def good_source(contract: Any) -> str:
    """Return the smallest source that satisfies a contract."""
    if contract.is_class:
        return "class f:\n    def __init__(self, args): pass\n    def get_samples(self, num_samples): return []\n"
    named = f", *, {', '.join(contract.keywords)}" if contract.keywords else ""
    return f"def f({', '.join(contract.params)}{named}): pass\n"


def test_contracts_cover_every_flag_that_names_a_function() -> None:
    paths = [spec for spec in FLAG_SPECS.values() if spec.flag.endswith("-path")]
    flags = {spec.flag for spec in paths if "function" in spec.info.help or "class" in spec.info.help}
    assert {contract.flag for contract in CONTRACTS} == flags
    assert len(CONTRACTS) == len(flags) == 26


def test_built_in_functions_pass_the_check() -> None:
    config = derive(Config(rollout_batch_size=1, advantage_estimator="dapo", rollout_max_response_len=4))
    assert config.dynamic_sampling_filter_path is not None
    check_plugins(config)
    check_plugins(derive(Config(rollout_batch_size=1, loss_type="sft_loss")))


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.field_name)
def test_each_contract_accepts_valid_and_rejects_invalid_functions(contract: Any, write: Write) -> None:
    check_plugins(Config(rollout_batch_size=1, **given(contract, write("good.py", good_source(contract)) + ":f")))

    missing = rejection(**given(contract, write("good.py", good_source(contract)) + ":g"))
    assert missing.startswith(f"{contract.flag} ")
    assert "has no g: it defines f" in missing

    sentence = rejection(**given(contract, write("few.py", "def f(): pass\n") + ":f"))
    assert sentence.startswith(f"{contract.flag} ")
    assert sentence.endswith("but its signature is (): change it")

    source = good_source(contract).replace("def get", "async def get").replace("def f", "async def f")
    path = write("later.py", source) + ":f"
    if contract.awaiting == "either":
        check_plugins(Config(rollout_batch_size=1, **given(contract, path)))
    else:
        assert "write it as a plain def" in rejection(**given(contract, path))

    generator = rejection(**given(contract, write("gen.py", "def f(*a, **k): yield 1\n") + ":f"))
    assert "is a generator" in generator

    if not contract.of_class:
        a_class = rejection(
            **given(contract, write("cls.py", "class f:\n    def __init__(self, *a, **k): pass\n") + ":f")
        )
        assert a_class.endswith("is a class, but a function is called: name a function")


@pytest.mark.parametrize(
    ("flag", "source", "sentence"),
    [
        (
            "rollout_function_path",
            "def f(args, rollout_id, data_source): pass",
            "data_source, evaluation=...), but its",
        ),
        ("eval_function_path", "def f(args, rollout_id, evaluation): pass", "evaluation=...), but its signature"),
        ("custom_tis_function_path", "def f(args, pg_loss): pass", "train_log_probs=..., rollout_log_probs=..."),
        ("custom_tis_function_path", "def f(pg_loss, *, args, **kw): pass", "is called with (args, pg_loss=..."),
        (
            "custom_pg_loss_reducer_function_path",
            "def f(total_lengths, response_lengths, loss_masks): pass",
            "calculate_per_token_loss=...",
        ),
        ("custom_rm_path", "class f: pass", "is a class without compute_reward(prompts, responses): add this method"),
        (
            "custom_rm_path",
            "class f:\n    def compute_reward(self, prompts): pass",
            ":f: compute_reward is called with (self, prompts, responses), but its signature is (self, prompts)",
        ),
        (
            "custom_rm_path",
            "class f:\n    def __init__(self, model_path): pass\n    def compute_reward(self, p, r): pass",
            "needs the argument model_path, which is not a flag: put model_path: ... into a YAML file",
        ),
        ("data_source_path", "class f: pass", "is a class without get_samples(num_samples): add this method"),
        (
            "data_source_path",
            "class f:\n    def get_samples(self, n): pass\n    def add_samples(self): pass",
            ":f: add_samples is called with (self, samples), but its signature is (self): change it",
        ),
        (
            "data_source_path",
            "class f:\n    def get_samples(self, n): pass\n    async def save(self, rollout_id): pass",
            ":f: save is async, but it is not awaited: write it as a plain def",
        ),
        (
            "data_source_path",
            "class f:\n    def __init__(self, args, other): pass\n    def get_samples(self, n): pass",
            "is called with (args), but its signature is (args, other): change it",
        ),
        (
            "custom_generate_function_path",
            "async def f(args, sample): pass",
            "(args, sample, sampling_params), but its",
        ),
        ("rollout_sample_hook_path", "def f(args, sample, other): pass", "but its signature is (args, sample, other)"),
        ("rollout_sample_hook_path", "f = 3", "is a int, not a function: name a callable"),
    ],
)
def test_functions_that_break_their_contract_are_rejected(flag: str, source: str, sentence: str, write: Write) -> None:
    contract = contract_of(f"--{flag.replace('_', '-')}")
    assert sentence in rejection(**given(contract, write("wrong.py", source + "\n") + ":f"))


def test_functions_may_require_optional_arguments_of_the_contract(write: Write) -> None:
    path = write(
        "demanding.py",
        """
        def hook(args, sample, *, rollout_id, evaluation): pass
        async def generate(args, sample, sampling_params, evaluation): pass
        async def listed(args, samples, sampling_params): pass
        class Reward:
            def compute_reward(self, prompts, responses, labels): pass
        """,
    )
    for flag, name in (
        ("custom_generate_function_path", "generate"),
        ("custom_generate_function_path", "listed"),
        ("custom_rm_path", "Reward"),
    ):
        check_plugins(Config(rollout_batch_size=1, **{flag: f"{path}:{name}"}))
    check_plugins(Config(rollout_batch_size=1, rollout_sample_hook_path=[f"{path}:hook"]))


def test_every_hook_of_a_repeated_flag_is_checked(write: Write) -> None:
    path = write("hooks.py", "def one(args, sample): pass\ndef two(args): pass\n")
    check_plugins(Config(rollout_batch_size=1, rollout_sample_hook_path=[f"{path}:one"]))
    assert "hooks.py:two is called with (args, sample)" in rejection(
        rollout_sample_hook_path=[f"{path}:one", f"{path}:two"]
    )


def test_async_contract_rejects_plain_functions() -> None:
    contract = contract_of("--custom-generate-function-path")
    assert contract is not None
    awaited = replace(contract, awaiting="async")

    def plain(args: Any, sample: Any, sampling_params: Any) -> None: ...

    async def later(args: Any, sample: Any, sampling_params: Any) -> None: ...

    class Later:
        async def __call__(self, args: Any, sample: Any, sampling_params: Any) -> None: ...

    check(later, awaited, "m.later")
    check(Later(), awaited, "m.Later")
    with pytest.raises(UserError, match=r"m\.plain is a plain function, but it is awaited: write it as async def"):
        check(plain, awaited, "m.plain")


def test_path_of_a_file_alone_selects_its_function(write: Write) -> None:
    def found(name: str, source: str, flag: str = "--custom-rm-path") -> str:
        return load_function(write(name, source), what=flag).__name__

    helper = "def helper(x): pass\n"
    assert found("score_it.py", helper + "def score_it(args, sample): pass\n") == "score_it"
    assert found("mine.py", helper + "def reward_func(args, sample): pass\n") == "reward_func"
    assert found("only.py", "from os.path import join\ndef _hidden(): pass\ndef odd(args, sample): pass\n") == "odd"
    assert found("a_class.py", "class RewardModel:\n    pass\n") == "RewardModel"
    assert found("g.py", helper + "def generate(a, s, p): pass\n", "--custom-generate-function-path") == "generate"
    with pytest.raises(UserError, match=r"which of helper, odd is meant\? write .*several.py:helper"):
        found("several.py", helper + "def odd(args, sample): pass\n")
    with pytest.raises(UserError, match="has no empty: it defines no functions"):
        found("empty.py", "X = 1\n")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("mine.py:f", "must be a function of args, sample, not 'mine.py:f': give custom_rm_path='mine.py:f'"),
        (3, "must be a function of args, sample, not 3"),
        (lambda sample: 1.0, "is called with (args, sample), but its signature is (sample): change it"),
    ],
)
def test_run_rejects_an_invalid_reward_function(given: Any, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        slime.run(reward=given, hf_checkpoint="/nowhere")
    assert sentence in str(caught.value)
    assert "given reward function" in str(caught.value)
