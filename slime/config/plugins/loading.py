"""Loading of the user's functions by name.

Invariant: `load_function` returns a callable that accepts the positional arguments it will get, or raises a `UserError`
that names the flag, the path and the remedy; a plugin file is executed once per process.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from slime.config.plugins.contracts import check, check_call, contract_of
from slime.errors import UserError

_NOT_NEEDED = {
    "megatron": "Megatron-Core is not installed: pip install 'slime[megatron]', or drop the import, which "
    "slime.backends.megatron_utils does not need",
    "ray": "Ray is not installed: plugins are called in the processes of the run and do not need it; drop the "
    "import, or pip install 'slime[ray]'",
}
"""Packages that plugins written for upstream slime may import, and what to do if they are not installed."""
_MOVED = {
    "slime.agent.live.service.generate": "slime.agent.online.generate",
    "slime.agent.live.baseline.traffic_baseline": "slime.agent.online.traffic_baseline",
}
"""Functions that config files and journals of earlier versions may name, and their present paths."""
_OWN_PACKAGE = __name__.partition(".")[0]
_OWN_ROOT = str(Path(__file__).resolve().parents[3])


def load_function(path: str, *, what: str, params: Sequence[str] | None = None) -> Callable[..., Any]:
    """Load the callable of `pkg.module.name`, `pkg.module:name`, `file.py:name` or `file.py`.

    A file alone selects the function with the name of the file, else the one with a usual name for the flag, else the
    only class with the methods that the flag requires, else the only public one. `what` names the flag or field for
    error messages; `params` are the positional arguments of the call.
    """
    given = present_path(path)
    module_name, attribute = given, ""
    if ":" in given or not given.endswith(".py"):
        module_name, _, attribute = given.rpartition(":" if ":" in given else ".")
        if not module_name or not attribute:
            raise UserError(f"{what} {path} names no function: write it as package.module.function or file.py:function")
    is_file = module_name.endswith(".py")
    module = _load_file(Path(module_name), what) if is_file else _import_module(module_name, path, what)
    attribute = attribute or _implied_name(module, path, what)
    namespace = vars(module)
    if attribute not in namespace and not hasattr(module, attribute):
        functions = [name for name, value in namespace.items() if callable(value) and not name.startswith("__")]
        close = difflib.get_close_matches(attribute, functions, n=1, cutoff=0.6)
        own = [name for name in functions if getattr(namespace[name], "__module__", None) == module.__name__]
        hint = f"did you mean {close[0]}?" if close else f"it defines {', '.join(own) or 'no functions'}"
        raise UserError(f"{what} {path}: {module.__file__ if is_file else module.__name__} has no {attribute}: {hint}")
    found = namespace[attribute] if attribute in namespace else getattr(module, attribute)
    if not callable(found):
        raise UserError(f"{what} {path} is a {type(found).__name__}, not a function: name a callable")
    if params is not None:
        check_call(found, params, f"{what} {path}")
    return found


def present_path(path: str) -> str:
    """Return the path under which a function of an earlier version is loaded now."""
    return _MOVED.get(path, path)


def load_plugin(path: str, flag: str) -> Callable[..., Any]:
    """Load the function or class of a path flag and check it against its complete contract."""
    contract = contract_of(flag)
    assert contract is not None, f"{flag} has no contract"
    found = load_function(path, what=flag)
    check(found, contract, path)
    return found


def _implied_name(module: ModuleType, path: str, what: str) -> str:
    """Return the name of the function to use if only a file is given."""
    contract = contract_of(what)
    stem = Path(path).stem
    for name in (stem, *(contract.names if contract is not None else ())):
        if name in vars(module):
            return name
    own = [
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    methods = contract.of_class if contract is not None else {}
    fitting = [name for name in own if methods and all(hasattr(vars(module)[name], method) for method in methods)]
    if len(fitting) == 1:
        return fitting[0]
    if len(own) > 1:
        raise UserError(f"{what} {path}: which of {', '.join(own)} is meant? write {path}:{own[0]}")
    return own[0] if own else stem


def _load_file(file: Path, what: str) -> ModuleType:
    file = file.expanduser().resolve()
    if not file.is_file():
        raise UserError(f"{what}: there is no file {file}")
    name = f"slime_plugin_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"{what}: {file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    _make_importable(str(file.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserError(f"{what}: {file} could not be imported ({_cause(error)})") from error
    return module


def _import_module(module_name: str, path: str, what: str) -> ModuleType:
    _make_importable(os.getcwd())
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        hint = ""
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (module_name == missing or module_name.startswith(missing + ".")):
            top, _, rest = module_name.partition(".")
            hint = ": is it installed, or in the folder where you start the run?"
            if top == _OWN_PACKAGE and Path(os.getcwd(), top, *rest.split(".")).with_suffix(".py").is_file():
                hint = f": it is in {top} of this folder, but the run uses that of {_OWN_ROOT}; give its file instead"
        raise UserError(f"{what} {path}: module {module_name} could not be imported ({_cause(error)}){hint}") from error


def _make_importable(folder: str) -> None:
    """Append a folder to `sys.path`, so that a plugin can import its neighbours without shadowing anything.

    This package's folder is appended before it, so that it is not shadowed either in processes that are started later
    with the same search path.
    """
    if _OWN_ROOT not in sys.path:
        sys.path.append(_OWN_ROOT)
    if folder not in sys.path and not (folder == os.getcwd() and "" in sys.path):
        sys.path.append(folder)


def _cause(error: Exception) -> str:
    missing = error.name if isinstance(error, ModuleNotFoundError) and error.name else ""
    remedy = _NOT_NEEDED.get(missing.partition(".")[0])
    return f"{type(error).__name__}: {error}" + (f"; {remedy}" if remedy else "")
