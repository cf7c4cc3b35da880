"""Compares signatures: a function must accept every call of upstream's function, with the same defaults."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

Parameters = dict[str, tuple[inspect._ParameterKind, str | None]]
"""Kind and default (source text, None if there is none) of each parameter, by name."""


def upstream_parameters(call: str) -> Parameters:
    """Parse the parameters of a signature given as text: `f(a, b=1, *, c=None, **kwargs)`."""
    (function,) = ast.parse(f"def {call}: ...").body
    if not isinstance(function, ast.FunctionDef):
        raise ValueError(f"{call} is no signature")
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    without = len(positional) - len(arguments.defaults)
    found: Parameters = {}
    for place, argument in enumerate(positional):
        default = None if place < without else ast.unparse(arguments.defaults[place - without])
        found[argument.arg] = (inspect.Parameter.POSITIONAL_OR_KEYWORD, default)
    if arguments.vararg:
        found[arguments.vararg.arg] = (inspect.Parameter.VAR_POSITIONAL, None)
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found[argument.arg] = (inspect.Parameter.KEYWORD_ONLY, None if value is None else ast.unparse(value))
    if arguments.kwarg:
        found[arguments.kwarg.arg] = (inspect.Parameter.VAR_KEYWORD, None)
    return found


def differences(ours: Callable[..., Any], call: str, *, is_method: bool = False) -> list[str]:
    """Differences that affect callers of upstream's function; empty if all their calls work."""
    parameters = list(inspect.signature(ours).parameters.values())
    if is_method:
        parameters = parameters[1:]
    by_name = {parameter.name: parameter for parameter in parameters}
    kinds = {parameter.kind for parameter in parameters}
    places = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    wrong = []
    theirs = upstream_parameters(call)
    for place, (name, (kind, default)) in enumerate(theirs.items()):
        if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            if kind not in kinds:
                wrong.append(f"takes no {'*' if kind is inspect.Parameter.VAR_POSITIONAL else '**'}{name}")
            continue
        parameter = by_name.get(name)
        if parameter is None:
            if not _takes_anything(kind, kinds):
                wrong.append(f"takes no {name}")
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            wrong.append(f"does not take {name} by name")
        if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and places[place : place + 1] != [name]:
            wrong.append(f"takes {name} in another place than number {place + 1}")
        wrong.extend(_default_differs(parameter, default))
    wrong.extend(f"asks for {one.name}" for one in parameters if one.name not in theirs and _is_needed(one))
    return wrong


def _takes_anything(kind: inspect._ParameterKind, kinds: set[inspect._ParameterKind]) -> bool:
    if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
    return inspect.Parameter.VAR_KEYWORD in kinds


def _is_needed(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not variadic


def _default_differs(parameter: inspect.Parameter, default: str | None) -> list[str]:
    if default is None:
        return []
    if parameter.default is parameter.empty:
        return [f"needs {parameter.name}, which is {default} when left out"]
    try:
        same = ast.literal_eval(default) == parameter.default
    except ValueError:  # a name such as Sample.Status.PENDING: compared by its text
        same = default.rpartition(".")[2] in str(parameter.default)
    return [] if same else [f"has {parameter.name}={parameter.default!r} and not {default}"]
