"""`python -m slime...` for child processes that must run this very package.

Invariant: a child started with `module_command` imports `slime` from where this file is, whatever else has that name in
its working folder, in PYTHONPATH or among the installed packages. The working folder is where the starting process has
it on its search path, first or last, so that a user's modules are found by parent and child alike.

Executed on its own (`python -P child_env.py [--here-first] MODULE ARGS...`), so it imports only the standard library.
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
    """The words in front of a module's own arguments."""
    first = (HERE_FIRST,) if sys.path[:1] in ([""], [os.getcwd()]) else ()
    return (sys.executable, "-P", str(Path(__file__).resolve()), *first, module)


def import_own_package() -> None:
    """Import the package that this file belongs to; what it imports and starts finds it before the working folder."""
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
    sys.argv = [module, *arguments]  # the first is replaced by the module's file
    runpy.run_module(module, run_name="__main__", alter_sys=True)


# Which of the driver's environment its children get: all of it, but for what looks like a secret; and the keys of
# engines on this machine, which its user's programs find in files.
#
# Engines and trainers run the code of models and of the user's losses, and their logs and crashes are shown around;
# none of them needs the keys to other services, which the driver keeps for trackers, rewards and tools.

_SECRET = re.compile(
    r"(^|_)(TOKENS?|(API|ACCESS|PRIVATE|SIGNING|ENCRYPTION)?_?KEYS?|PAT|PWD|CREDENTIALS?|AUTH_SOCK)$"
    r"|SECRET|PASSWORD|PASSWD|PASSPHRASE|APIKEY|^AWS_",
    re.IGNORECASE,
)
ENGINE_KEY_VARIABLE = "SLIME_ENGINE_API_KEY"
"""The key of engines: what a run shows to them, and what all routes of an engine ask for that has it."""
CONTROL_KEY_VARIABLE = "SLIME_ENGINE_ADMIN_API_KEY"
"""The key that an engine's control routes alone ask for."""
_NO_SECRETS = frozenset({"PWD", "OLDPWD"})


def is_secret(name: str) -> bool:
    """Whether the name of an environment variable says that its value is a secret."""
    return name not in _NO_SECRETS and _SECRET.search(name) is not None


def without_secrets(environment: Mapping[str, str], *, passed: Collection[str] = ()) -> dict[str, str]:
    """The environment without what looks like a secret, but with the names in `passed`."""
    return {name: value for name, value in environment.items() if name in passed or not is_secret(name)}


def keep_key(port: int, key: str) -> Path:
    """Write down the key of an engine on a port of this machine's loopback, for this user alone; returns the file."""
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
            f"the key of an engine's control routes cannot be kept in {path} ({cause.strerror}): name a folder that "
            f"can be written to in XDG_CACHE_HOME, or give a key in {ENGINE_KEY_VARIABLE}"
        ) from cause
    return path


def forget_key(port: int, key: str) -> None:
    """Delete that file, unless another engine has written its own key there since."""
    if kept_key(port) == key:
        _key_file(port).unlink(missing_ok=True)


def kept_key(port: int) -> str | None:
    """The key that was written down for a port of this machine; None where there is none."""
    try:
        return _key_file(port).read_text().strip() or None
    except (OSError, UnicodeError):
        return None


def _key_file(port: int) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slime" / "engine_keys" / str(port)


if __name__ == "__main__":
    main()
