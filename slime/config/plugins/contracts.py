"""Contracts of the functions and classes that path flags name, and the checks against them.

Invariant: a function or class that `check` accepts can be called the way the run calls it; a refusal is one sentence
that names the flag, the path and the remedy.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from slime.errors import UserError
from slime.storage.json_types import JsonObject

Awaiting = Literal["plain", "async", "either"]


@dataclass(frozen=True)
class Contract:
    """Calling convention of the function or class of one path flag."""

    flag: str
    params: tuple[str, ...]
    """Positional arguments; for a class, those of its constructor."""
    keywords: tuple[str, ...] = ()
    """Arguments that are always passed by name."""
    offered: tuple[str, ...] = ()
    """Arguments that are passed by name if the function has them."""
    awaiting: Awaiting = "plain"
    """When the result is awaited: never (plain), always (async), or if it is awaitable (either)."""
    names: tuple[str, ...] = ()
    """Usual names of the function, for paths that name only a file."""
    list_params: tuple[str, ...] | None = None
    """Positional arguments of the form for several samples, whose second parameter is named `samples`."""
    of_class: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Methods that a class needs to replace the function, with their arguments."""
    offered_to_methods: tuple[str, ...] = ()
    """Arguments that are passed by name to such a method if it has them."""
    is_class: bool = False
    """The flag names a class (or a function that returns such an object)."""
    methods: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Optional methods of the class, with the arguments that they are called with."""

    @property
    def field_name(self) -> str:
        """The config field of the flag."""
        return self.flag.removeprefix("--").replace("-", "_")


_ROLLOUT = ("args", "rollout_id", "data_source")
_TIS = ("pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths")

CONTRACTS: tuple[Contract, ...] = (
    Contract(
        "--rollout-function-path", _ROLLOUT, keywords=("evaluation",), names=("generate_rollout", "rollout_function")
    ),
    Contract(
        "--eval-function-path",
        _ROLLOUT,
        keywords=("evaluation",),
        names=("eval_rollout", "generate_rollout", "eval_function"),
    ),
    Contract(
        "--custom-generate-function-path",
        ("args", "sample", "sampling_params"),
        offered=("sampling_params", "evaluation"),
        awaiting="either",
        names=("custom_generate", "generate"),
        list_params=("args", "samples"),
    ),
    Contract(
        "--rollout-sample-hook-path",
        ("args", "sample"),
        offered=("rollout_id", "evaluation"),
        awaiting="either",
        names=("sample_hook", "hook"),
    ),
    Contract(
        "--custom-rm-path",
        ("args", "sample"),
        awaiting="either",
        names=("custom_rm", "reward_func", "reward", "rm"),
        list_params=("args", "samples"),
        of_class={"compute_reward": ("prompts", "responses")},
        offered_to_methods=("labels", "samples"),
    ),
    Contract(
        "--dynamic-sampling-filter-path", ("args", "samples"), names=("dynamic_filter", "dynamic_sampling_filter")
    ),
    Contract("--buffer-filter-path", ("args", "rollout_id", "buffer", "num_samples"), names=("buffer_filter",)),
    Contract(
        "--data-source-path",
        ("args",),
        names=("DataSource", "RolloutDataSourceWithBuffer", "RolloutDataSource"),
        is_class=True,
        of_class={"get_samples": ("num_samples",)},
        methods={
            "add_samples": ("samples",),
            "buffer_filter": ("args", "buffer", "num_samples"),
            "observe_samples": ("rollout_id", "groups"),
            "save": ("rollout_id",),
            "load": ("rollout_id",),
        },
    ),
    Contract("--rollout-sample-filter-path", ("args", "groups"), names=("sample_filter", "rollout_sample_filter")),
    Contract(
        "--rollout-all-samples-process-path",
        ("args", "all_groups", "data_source"),
        names=("all_samples_process", "process_all_samples"),
    ),
    Contract(
        "--rollout-data-postprocess-path",
        ("args", "rollout_id", "rollout_data"),
        names=("rollout_data_postprocess", "data_postprocess"),
    ),
    Contract(
        "--custom-reward-post-process-path", ("args", "samples"), names=("reward_post_process", "post_process_rewards")
    ),
    Contract(
        "--custom-convert-samples-to-train-data-path",
        ("args", "samples"),
        names=("convert_samples_to_train_data", "convert_samples"),
    ),
    Contract(
        "--custom-rollout-log-function-path",
        ("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time"),
        names=("rollout_log", "log_rollout"),
    ),
    Contract(
        "--custom-eval-rollout-log-function-path",
        ("rollout_id", "args", "data", "extra_metrics"),
        names=("eval_log", "eval_rollout_log", "log_eval"),
    ),
    Contract("--live-judge-path", ("args", "exchange"), awaiting="either", names=("live_judge", "judge")),
    Contract("--live-filter-path", ("exchange",), names=("live_filter", "may_be_kept")),
    Contract("--custom-advantage-function-path", ("args", "rollout_data"), names=("advantage_function", "advantages")),
    Contract(
        "--custom-loss-function-path",
        ("args", "batch", "logits", "sum_of_sample_mean"),
        names=("loss_function", "loss"),
    ),
    Contract("--custom-tis-function-path", ("args",), keywords=_TIS, names=("tis_function", "tis")),
    Contract(
        "--custom-pg-loss-reducer-function-path",
        ("total_lengths", "response_lengths", "loss_masks"),
        keywords=("calculate_per_token_loss",),
        names=("pg_loss_reducer", "get_pg_loss_reducer"),
    ),
    Contract(
        "--custom-update-weight-post-write-path", ("args", "version_dir", "rollout_engines"), names=("post_write",)
    ),
    Contract(
        "--custom-model-provider-path",
        ("pre_process", "post_process"),
        offered=("vp_stage", "config", "args", "default"),
        names=("model_provider",),
    ),
    Contract("--custom-megatron-init-path", ("args",), names=("megatron_init", "init")),
    Contract(
        "--custom-megatron-before-log-prob-hook-path",
        ("args", "model", "store_prefix"),
        names=("before_log_prob", "hook"),
    ),
    Contract(
        "--custom-megatron-before-train-step-hook-path",
        ("args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler"),
        names=("before_train_step", "hook"),
    ),
)
"""Every path flag."""

_BY_FLAG = {contract.flag: contract for contract in CONTRACTS}


def contract_of(flag: str) -> Contract | None:
    """Return the contract of a flag; None if it is not a path flag."""
    return _BY_FLAG.get(flag)


def takes_samples(function: Callable[..., object]) -> bool:
    """Return whether a function takes a list of samples: its second parameter is named `samples`."""
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    return len(parameters) > 1 and parameters[1] == "samples"


def check_given(found: object, flag: str, what: str) -> None:
    """Raise a `UserError` unless an object that replaces a flag's function can be called as its contract says."""
    contract = contract_of(flag)
    assert contract is not None, f"{flag} has no contract"
    if not callable(found):
        shown = f"{contract.field_name}={found!r}" if isinstance(found, str) else f"{flag} names one in a file"
        raise UserError(f"{what} must be a function of {', '.join(contract.params)}, not {found!r:.80}: give {shown}")
    name = getattr(found, "__qualname__", type(found).__name__)
    check(found, replace(contract, flag=what), name)


def check(found: Callable[..., object], contract: Contract, path: str) -> None:
    """Raise a `UserError` unless `found` can be called as the contract says."""
    what = f"{contract.flag} {path}"
    if isinstance(found, type):
        _check_class(found, contract, what)
        return
    params = contract.params
    if contract.list_params is not None and takes_samples(found):
        params = contract.list_params
    check_call(found, params, what, keywords=contract.keywords, offered=contract.offered)
    if inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
        raise UserError(f"{what} is a generator, whose body would never run: return its result instead of yielding it")
    if contract.awaiting == "plain" and is_async(found):
        raise UserError(
            f"{what} is an async function, but it is not awaited: write it as a plain def, and wait for coroutines "
            "with slime.utils.async_utils.run"
        )
    if contract.awaiting == "async" and not is_async(found):
        raise UserError(f"{what} is a plain function, but it is awaited: write it as async def")


def check_call(
    function: Callable[..., object],
    params: Sequence[str],
    what: str,
    *,
    keywords: Sequence[str] = (),
    offered: Sequence[str] = (),
) -> None:
    """Raise a `UserError` unless the function accepts these arguments; `offered` ones only count if it has them."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin without a signature: only the call itself can tell
    named = [*keywords, *(name for name in offered if name in signature.parameters and name not in params)]
    try:
        signature.bind(*params, **dict.fromkeys(named))
    except TypeError:
        call = f"({', '.join([*params, *(f'{name}=...' for name in keywords)])})"
        shown = signature.replace(return_annotation=inspect.Signature.empty)
        raise UserError(f"{what} is called with {call}, but its signature is {shown}: change it") from None


def _check_class(found: type, contract: Contract, what: str) -> None:
    if not contract.of_class:
        raise UserError(f"{what} is a class, but a function is called: name a function")
    for name, params in contract.of_class.items():
        call = f"{name}({', '.join(params)})"
        if not callable(getattr(found, name, None)):
            raise UserError(f"{what} is a class without {call}: add this method")
    for name, params in {**contract.of_class, **contract.methods}.items():
        method = getattr(found, name, None)
        if not callable(method):
            continue
        is_bound = isinstance(inspect.getattr_static(found, name), staticmethod | classmethod)
        positional = params if is_bound else ("self", *params)
        check_call(method, positional, f"{what}: {name}", offered=contract.offered_to_methods)
        if contract.awaiting == "plain" and is_async(method):
            raise UserError(f"{what}: {name} is async, but it is not awaited: write it as a plain def")
    if contract.is_class and not takes_nothing(found):
        check_call(found, contract.params, what)


def is_async(function: Callable[..., object]) -> bool:
    """Return whether a call returns a coroutine; for other callables, whether their `__call__` does."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def takes_nothing(found: Callable[..., object]) -> bool:
    """Return whether a callable has no parameters, so that it is called without arguments."""
    try:
        return not inspect.signature(found).parameters
    except (TypeError, ValueError):
        return False


def constructor_values(found: type, flags: object, args: object, what: str) -> JsonObject:
    """Return the constructor arguments of a user's class: `args`, or flags and entries of `args` by name.

    A flag that is not given does not replace the class's own default.
    """
    values: JsonObject = {}
    for name, parameter in inspect.signature(found).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        is_needed = parameter.default is parameter.empty
        if name in ("args", "config"):
            values[name] = args
        elif hasattr(flags, name) or (is_needed and hasattr(args, name)):
            value = getattr(flags if hasattr(flags, name) else args, name)
            if value is not None or is_needed:
                values[name] = value
        elif is_needed:
            raise UserError(
                f"{what} needs the argument {name}, which is not a flag: put {name}: ... into a YAML file and name "
                "that with --custom-config-path"
            )
    return values


_ORDERINGS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def computed_with(function: Callable[..., object]) -> list[str]:
    """Return the attributes of `args` that a function needs as numbers, read from its source; none without source.

    Invariant: a name is returned only if every use of it in the function is a computation (`range(args.x)`, arithmetic,
    an ordering), so that None would raise in every call. A name that is also tested, passed on or given a default may
    be None.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return []
    computed: dict[str, bool] = {}
    for parent in ast.walk(tree):
        for child in ast.iter_child_nodes(parent):
            if isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name) and child.value.id == "args":
                computed[child.attr] = computed.get(child.attr, True) and _needs_number(parent)
    return [name for name, always in computed.items() if always]


def _needs_number(context: ast.AST) -> bool:
    if isinstance(context, ast.Call):
        return isinstance(context.func, ast.Name) and context.func.id == "range"
    if isinstance(context, ast.BinOp):
        return not isinstance(context.op, ast.Mod)  # % also formats text
    return isinstance(context, ast.Compare) and all(isinstance(op, _ORDERINGS) for op in context.ops)
