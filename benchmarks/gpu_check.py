"""Whether the kernels are right on this GPU: every one against the same computation spelled out in torch.

Each module of `gpu_checks` yields (what, error, bound). Exits with 1 when an error is above its bound, or a check
raises; the others run all the same.

    python benchmarks/gpu_check.py
    python benchmarks/gpu_check.py attention sampling        # only these modules
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import time
import traceback

import gpu_checks
import torch


def run(module: str) -> int:
    """How many checks of the module failed."""
    began, failures = time.perf_counter(), 0
    try:
        for what, error, bound in importlib.import_module(f"gpu_checks.{module}").checks():
            is_wrong = not error <= bound  # nan is wrong too
            failures += is_wrong
            print(f"{'WRONG' if is_wrong else 'ok':5} {module}: {what}: {error:.3g} (bound {bound:.3g})", flush=True)
    except Exception:  # noqa: BLE001 - one module that raises is one failure, and the others still run
        traceback.print_exc()
        failures += 1
    print(f"      {module}: {failures} wrong, {time.perf_counter() - began:.1f} s", flush=True)
    return failures


def main() -> int:
    known = sorted(module.name for module in pkgutil.iter_modules(gpu_checks.__path__))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(known)}; all when none is given")
    chosen = parser.parse_args().modules or known
    if unknown := sorted(set(chosen) - set(known)):
        parser.error(f"there is no {unknown[0]} among the checks: choose from {', '.join(known)}")
    if not torch.cuda.is_available():
        print("error: there is no GPU here: the same kernels run on the CPU in tests/engine", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    failures = sum(run(module) for module in chosen)
    print(f"{failures} wrong" if failures else "all right")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
