"""The actor class that runs on a node before the node is known to have this package.

Invariant: the class refers to nothing outside its own body, so a node without slime, or with a different one, can run
it.
"""

from __future__ import annotations

from pathlib import Path


def agent_class() -> type:
    """Return the class of the actor that a run has on each node.

    It first checks the node (`survey`), receives this package if needed (`unpack`), and then acts as the package's
    `NodeAgent` (`begin`, `call`).
    """

    class SlimeNodeAgent:
        def survey(self, package: str, needed: tuple[str, ...]) -> dict[str, object]:
            """Report the node's copy of the package, missing packages, its Python and its cores."""
            import hashlib
            import importlib.util
            import os
            import sys
            from pathlib import Path

            spec = importlib.util.find_spec(package)
            digest, parent = "", ""
            if spec is not None and spec.origin is not None:
                folder = Path(spec.origin).resolve().parent
                parent = str(folder.parent)
                summing = hashlib.sha256()
                for path in sorted(folder.rglob("*")):
                    if path.is_file() and "__pycache__" not in path.parts:
                        summing.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
                        summing.update(path.read_bytes())
                digest = summing.hexdigest()
            return {
                "digest": digest,
                "parent": parent,
                "python": sys.executable,
                "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
                "missing": [name for name in needed if importlib.util.find_spec(name) is None],
            }

        def unpack(self, data: bytes, digest: str, package: str) -> str:
            """Unpack the package into the node's cache, completely or not at all; return its parent folder."""
            import io
            import os
            import shutil
            import tempfile
            import zipfile
            from pathlib import Path

            home = os.environ.get("SLIME_NODE_CACHE") or Path.home() / ".cache" / "slime" / "node"
            final = Path(home) / f"{package}-{digest[:24]}"
            if not final.is_dir():
                final.parent.mkdir(parents=True, exist_ok=True)
                partial = tempfile.mkdtemp(prefix=".package-", dir=final.parent)
                with zipfile.ZipFile(io.BytesIO(data)) as archive:
                    archive.extractall(partial)
                try:
                    os.rename(partial, final)
                except OSError:  # another process was first
                    shutil.rmtree(partial, ignore_errors=True)
                    if not final.is_dir():
                        raise
            return str(final)

        def begin(self, parent: str, working_folder: str) -> None:
            """Create the `NodeAgent` of the package in this folder."""
            import importlib
            import sys

            sys.path.insert(0, parent)
            importlib.invalidate_caches()
            from slime.cluster.remote.agent import NodeAgent

            self.agent = NodeAgent(working_folder)

        def call(self, method: str, *args: object) -> object:
            return self.agent.call(method, *args)

    return SlimeNodeAgent


def package_digest(package: Path) -> str:
    """Return the digest that `survey` reports for this package."""
    return str(agent_class()().survey(package.name, ())["digest"])
