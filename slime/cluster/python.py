"""`python -m slime...` for child processes that must run this very package.

Invariant: a child started with `module_command` imports `slime` from where this file is, whatever else has that name in
its working folder, in PYTHONPATH or among the installed packages. The working folder is where the starting process has
it on its search path, first or last, so that a user's modules are found by parent and child alike.

Executed on its own (`python -P python.py [--here-first] MODULE ARGS...`), so it imports only the standard library.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
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


if __name__ == "__main__":
    main()
