"""Starts `python -m slime...` children with this very package and without the driver's secrets.

Invariant: a child started with `module_command` imports `slime` from the package of this file, even if its working
folder, PYTHONPATH or the installed packages contain another `slime`. The working folder has the same position on the
child's search path as on its parent's (first or last), so both find the same user modules.

Children get the driver's environment without variables that look like secrets. Engines and trainers run the code of
models and of the user's losses, and their logs and crash reports are shared; none of them needs the keys of other
services, which the driver keeps for trackers, rewards and tools. The keys of engines on this machine are in files that
only this user can read.

The file also runs as a program (`python -P child_env.py [--here-first] MODULE ARGS...`), so it imports only the
standard library.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

HERE_FIRST = "--here-first"
PACKAGE = Path(__file__).resolve().parents[1]


def module_command(module: str) -> tuple[str, ...]:
    """Return the command prefix that runs a module; the module's own arguments follow it."""
    first = (HERE_FIRST,) if sys.path[:1] in ([""], [os.getcwd()]) else ()
    return (sys.executable, "-P", str(Path(__file__).resolve()), *first, module)


def import_own_package() -> None:
    """Import the package of this file, so that later imports find it before one in the working folder."""
    spec = importlib.util.spec_from_file_location(
        PACKAGE.name, PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE.name] = package
    spec.loader.exec_module(package)
    if str(PACKAGE.parent) not in sys.path:
        sys.path.append(str(PACKAGE.parent))


def main() -> None:
    words = sys.argv[1:]
    here_first = words[0] == HERE_FIRST
    module, *arguments = words[here_first:]
    import_own_package()
    if here_first:
        sys.path.insert(0, os.getcwd())
    elif os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    sys.argv = [module, *arguments]  # runpy replaces the first with the module's file
    runpy.run_module(module, run_name="__main__", alter_sys=True)


_SECRET = re.compile(
    r"(^|_)(TOKENS?|(API|ACCESS|PRIVATE|SIGNING|ENCRYPTION)?_?KEYS?|PAT|PWD|CREDENTIALS?|AUTH_SOCK)$"
    r"|SECRET|PASSWORD|PASSWD|PASSPHRASE|APIKEY|^AWS_",
    re.IGNORECASE,
)
ENGINE_KEY_VARIABLE = "SLIME_ENGINE_API_KEY"
"""The engines' API key: a run sends it, and an engine that has one requires it on all routes."""
CONTROL_KEY_VARIABLE = "SLIME_ENGINE_ADMIN_API_KEY"
"""The key that only an engine's control routes require."""
_NOT_SECRET = frozenset({"PWD", "OLDPWD"})


def is_secret(name: str) -> bool:
    """Tell from the name of an environment variable whether its value is a secret."""
    return name not in _NOT_SECRET and _SECRET.search(name) is not None


def without_secrets(environment: Mapping[str, str], *, passed: Collection[str] = ()) -> dict[str, str]:
    """Return the environment without variables that look like secrets, except the names in `passed`."""
    return {name: value for name, value in environment.items() if name in passed or not is_secret(name)}


def store_engine_key(port: int, key: str) -> Path:
    """Store the key of the engine on a loopback port, readable by this user only; return the file."""
    path = _key_file(port)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(key + "\n")
    except OSError as cause:
        from slime.errors import UserError  # this file is also run as a program, before `slime` can be imported

        raise UserError(
            f"the key of an engine's control routes cannot be stored in {path} ({cause.strerror}): set XDG_CACHE_HOME "
            f"to a writable folder, or give a key in {ENGINE_KEY_VARIABLE}"
        ) from cause
    return path


def delete_engine_key(port: int, key: str) -> None:
    """Delete the stored key, unless another engine has stored its own key there since."""
    if read_engine_key(port) == key:
        _key_file(port).unlink(missing_ok=True)


def read_engine_key(port: int) -> str | None:
    """Return the stored key for a port of this machine, or None."""
    try:
        return _key_file(port).read_text().strip() or None
    except (OSError, UnicodeError):
        return None


def _key_file(port: int) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slime" / "engine_keys" / str(port)


if __name__ == "__main__":
    main()
