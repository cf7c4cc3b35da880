"""Import structure: no cycles between files or packages, allowed imports, and limits for code metrics."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
Graph = Mapping[str, set[str]]
CEILINGS = {
    "files": 526,
    "files under 60 lines": 45,
    "files under 60 lines with one importer": 2,
    "public class names in several files, per 1,000": 8,
    "private helpers used once, per 1,000 lines": 6.7,
    "lines with Any, per 1,000": 6.0,
}
BELOW: dict[str, set[str]] = {"http": set(), "sglang": {"http"}, "fleet": {"http", "sglang"}, "embedded": set()}
BELOW["elastic"] = {"http", "fleet"}
"""Package of `slime.engine` -> other packages of it that it may import."""


def modules_of(folder: Path) -> dict[str, Path]:
    """Returns every module below a package by its dotted name."""
    parts = {path: path.relative_to(folder.parent).with_suffix("").parts for path in sorted(folder.rglob("*.py"))}
    return {".".join(part for part in names if part != "__init__"): path for path, names in parts.items()}


@cache
def cached_tree(path: Path, written: int) -> ast.Module:
    return ast.parse(path.read_text())


def parsed(path: Path) -> ast.Module:
    """Returns the syntax tree of a file, cached for all tests."""
    return cached_tree(path, path.stat().st_mtime_ns)


def import_graph(folder: Path) -> dict[str, set[str]]:
    """Maps each module to the modules it imports: at its top, in a function or for type checkers only."""
    modules = modules_of(folder)
    return {
        name: set(imported(parsed(path), name, path.name == "__init__.py", modules)) - {name}
        for name, path in modules.items()
    }


def imported(tree: ast.Module, name: str, is_package: bool, modules: Iterable[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            parents = name.split(".")
            above = parents[: len(parents) - node.level + is_package] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                if inner in modules or source in modules:
                    yield inner if inner in modules else source


def import_cycles(graph: Graph) -> list[list[str]]:
    """Returns the strongly connected components of more than one module, in which each module reaches all others."""
    reaches = {name: reachable(graph, name) for name in graph}
    found = {frozenset(other for other in reaches[name] if name in reaches[other]) for name in graph}
    return sorted(sorted(members) for members in found if len(members) > 1)


def reachable(graph: Graph, start: str) -> set[str]:
    """Returns the modules that `start` imports, directly or not. They include `start` only in a cycle."""
    seen: set[str] = set()
    ahead = [start]
    while ahead:
        new = graph[ahead.pop()] - seen
        seen |= new
        ahead.extend(new)
    return seen


@pytest.fixture(scope="module")
def graph() -> Graph:
    return import_graph(ROOT / "slime")


def test_modules_form_no_import_cycles(graph: Graph) -> None:
    found = import_cycles(graph)
    assert not found, "files that import each other:\n" + "\n".join(" ".join(names) for names in found)


def test_import_graph_covers_every_file(graph: Graph) -> None:
    assert len(graph) == len(list((ROOT / "slime").rglob("*.py")))
    assert {"slime.engine.http.client", "slime.engine.http.errors"} <= graph["slime.engine.http.pool"]


def package_imports(graph: Graph, inside: str) -> dict[str, set[str]]:
    """Returns the imports between the folders directly below a package, without files outside these folders."""
    folders = {path.name for path in (ROOT / inside.replace(".", "/")).iterdir() if path.is_dir()}
    found: dict[str, set[str]] = {folder: set() for folder in folders}
    for name, targets in graph.items():
        room = name.removeprefix(inside + ".").split(".")[0]
        if name.startswith(inside + ".") and room in folders:
            below = {target.removeprefix(inside + ".").split(".")[0] for target in targets if target.startswith(inside)}
            found[room] |= (below & folders) - {room}
    return found


def test_slime_has_15_packages_and_3_top_level_files() -> None:
    folders = {path.parent for path in (ROOT / "slime").rglob("*.py")}
    assert len({path.relative_to(ROOT / "slime").parts[0] for path in folders - {ROOT / "slime"}}) == 15
    assert {path.name for path in (ROOT / "slime").glob("*.py")} == {"__init__.py", "cli.py", "errors.py"}


def test_packages_form_no_import_cycles(graph: Graph) -> None:
    packages = {"slime"} | {".".join(name.split(".")[:depth]) for name in graph for depth in (2, 3, 4)}
    for package in sorted(packages):
        if (ROOT / package.replace(".", "/")).is_dir() and package != "slime.compat":
            rooms = package_imports(graph, package)
            assert not import_cycles(rooms), f"rooms of {package} that import each other: {import_cycles(rooms)}"


def test_no_folder_has_more_than_25_files() -> None:
    counts = Counter(path.parent for path in (ROOT / "slime").rglob("*.py") if path.name != "__init__.py")
    folder, count = counts.most_common(1)[0]
    assert count <= 25, f"{folder} has {count} files"


def test_code_metrics_stay_within_their_limits(graph: Graph) -> None:
    """A change may lower the limits but not raise them: merge small files, inline helpers, rename classes."""
    paths = modules_of(ROOT / "slime")
    sources = {name: path.read_text() for name, path in paths.items()}
    lines = sum(len(text.splitlines()) for text in sources.values())
    small = {n for n, p in paths.items() if p.name != "__init__.py" and len(sources[n].splitlines()) < 60}
    users = Counter(
        target for name, targets in graph.items() if paths[name].name != "__init__.py" for target in targets
    )
    classes: dict[str, set[str]] = {}
    helpers = 0
    for name, path in paths.items():
        tree = parsed(path)
        nodes = list(ast.walk(tree))
        used = Counter(
            node.id if isinstance(node, ast.Name) else node.attr
            for node in nodes
            if isinstance(node, ast.Name | ast.Attribute)
        )
        for node in nodes:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes.setdefault(node.name, set()).add(name)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and re.match("_[^_]", node.name):
                helpers += used[node.name] == 1
    shared = sorted(name for name, owners in classes.items() if len(owners) > 1)
    any_lines = sum(bool(re.search(r"\bAny\b", line)) for text in sources.values() for line in text.splitlines())
    found = {
        "files": len(paths),
        "files under 60 lines": len(small),
        "files under 60 lines with one importer": sum(users[name] == 1 for name in small),
        "public class names in several files, per 1,000": round(1000 * len(shared) / len(classes)),
        "private helpers used once, per 1,000 lines": round(1000 * helpers / lines, 1),
        "lines with Any, per 1,000": round(1000 * any_lines / lines, 1),
    }
    over = {what: f"{value} > {CEILINGS[what]}" for what, value in found.items() if value > CEILINGS[what]}
    assert not over, f"{over}; shared class names: {shared}"


@pytest.mark.parametrize("room", BELOW)
def test_engine_packages_import_only_lower_packages(room: str, graph: Graph) -> None:
    for name, targets in graph.items():
        if name.startswith(f"slime.engine.{room}."):
            others = {target.split(".")[2] for target in targets if target.startswith("slime.engine.")} & BELOW.keys()
            assert others <= BELOW[room] | {room}, f"{name} imports {targets}"


def test_embedded_packages_import_only_what_their_table_allows(graph: Graph) -> None:
    inside = "slime.engine.embedded."
    table = (ROOT / "docs" / "architecture.md").read_text().split("| package of `embedded` |")[1].split("\n\n")[0]
    cells = [line.split("|") for line in table.splitlines()[2:]]
    allowed = {re.findall("`embedded/(.*?)`", row[1])[0]: set(re.findall("`(.*?)`", row[3])) for row in cells}
    folders = {path.name for path in (ROOT / "slime/engine/embedded").iterdir() if (path / "__init__.py").exists()}
    assert allowed.keys() == folders
    for name, targets in graph.items():
        room = name.removeprefix(inside).split(".")[0]
        if name.startswith(inside) and room in allowed:
            others = {target.removeprefix(inside).split(".")[0] for target in targets if target.startswith(inside)}
            assert others & allowed.keys() <= allowed[room] | {room}, f"{name} imports {targets}"


def test_only_the_trainer_module_imports_the_fsdp_backend(graph: Graph) -> None:
    inside = "slime.train.backends.fsdp"
    known = {name for name, targets in graph.items() if any(target.startswith(inside) for target in targets)}
    assert {name for name in known if not name.startswith(inside)} == {"slime.train.trainer"}


def test_megatron_and_its_backend_are_imported_only_when_chosen(graph: Graph) -> None:
    """The trainer module imports the backend in a function, so that a run without Megatron never loads it."""
    own = "slime.train.backends.megatron"
    outside = {"megatron", "transformer_engine"}
    for name, path in modules_of(ROOT / "slime").items():
        tree = parsed(path)
        words = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
        words |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert name.startswith(own) or not outside & {word.split(".")[0] for word in words}, name
    users = {name for name, seen in graph.items() if any(one.startswith(own) for one in seen)}
    assert {name for name in users if not name.startswith(own)} == {"slime.train.trainer"}
    chooses = ast.parse((ROOT / "slime/train/trainer.py").read_text())
    assert not any(isinstance(node, ast.ImportFrom) and own in (node.module or "") for node in chooses.body)


def test_losses_import_no_backend_and_samples_import_no_losses(graph: Graph) -> None:
    for room, above in {
        "losses": ("backends", "checkpoints", "weight_export"),
        "samples": ("backends", "losses"),
    }.items():
        for name, targets in graph.items():
            if name.startswith(f"slime.train.{room}"):
                assert not [t for t in targets if t.startswith(tuple(f"slime.train.{other}" for other in above))], name


@pytest.mark.parametrize(
    "back",
    [
        "from pkg.a import x",
        "import pkg.a",
        "from pkg import a",
        "from .. import a",
        "from ..a import x",
        "def f():\n    from pkg.a import x",
        "class C:\n    def f(self):\n        import pkg.a as y",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pkg.a import X",
        "try:\n    import pkg.a\nexcept ImportError:\n    pass",
    ],
)
def test_every_import_form_is_detected(tmp_path: Path, back: str) -> None:
    package = tmp_path / "pkg"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "inner" / "__init__.py").write_text("")
    (package / "a.py").write_text("from pkg.inner import b\nimport pkg.c\n")
    (package / "c.py").write_text("from pkg import inner\n")
    (package / "inner" / "b.py").write_text("import os\n")
    assert import_cycles(import_graph(package)) == []
    (package / "inner" / "b.py").write_text(back)
    assert import_cycles(import_graph(package)) == [["pkg.a", "pkg.inner.b"]]


def test_package_and_its_own_module_can_form_a_cycle(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("from .a import x\n")
    (package / "a.py").write_text("from . import y\n")
    assert import_cycles(import_graph(package)) == [["pkg", "pkg.a"]]


BACKEND = "slime.train.backends.megatron"


def imported_top_packages(tree: ast.Module) -> Iterator[str]:
    """Yields the top-level package of every absolute import in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def test_no_module_outside_the_backend_imports_megatron() -> None:
    theirs = {"megatron", "transformer_engine"}
    for name, path in modules_of(ROOT / "slime").items():
        if not name.startswith(BACKEND):
            assert not theirs & set(imported_top_packages(parsed(path))), name


def test_only_the_trainer_imports_the_megatron_backend_lazily(graph: Graph) -> None:
    """Only one file outside the backend imports it, in a function."""
    outside = {name: path for name, path in modules_of(ROOT / "slime").items() if not name.startswith(BACKEND)}
    importing = {name for name in outside if any(other.startswith(BACKEND) for other in graph[name])}
    assert importing == {"slime.train.trainer"}
    tree = ast.parse(outside["slime.train.trainer"].read_text())
    tops = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
    assert not [name for name in imported(tops, "slime.train.trainer", False, graph) if name.startswith(BACKEND)]


def names_of(tree: ast.Module) -> set[str]:
    """Returns the names that the statements of a module bind, those in its branches included; "*" for any name."""
    found: set[str] = set()
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        targets = [part for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)]
        found |= {target.id for target in targets}
        pending += [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.stmt)]
    return found


def missing_imports(folders: Iterable[Path], package: Path) -> list[str]:
    """Returns `file: module.name` for each name that files below the folders import from the package and it lacks."""
    modules = modules_of(package)
    for name, path in list(modules.items()):  # the folders of compat are on the path of the packages
        modules.setdefault(name.replace(".compat", "", 1), path)
    missing = []
    for file in sorted(path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(parsed(file)):
            if not isinstance(node, ast.ImportFrom) or node.level or (node.module or "").split(".")[0] != package.name:
                continue
            source = modules.get(node.module or "")
            bound = names_of(parsed(source)) if source is not None else set()
            for alias in node.names:
                known = alias.name == "*" or alias.name in bound or f"{node.module}.{alias.name}" in modules
                lazy = "__getattr__" in bound or "*" in bound
                if not (known or lazy):
                    missing.append(f"{file.name}: {node.module}.{alias.name}")
    return missing


def test_files_outside_the_package_import_names_that_exist() -> None:
    folders = [ROOT / name for name in ("examples", "benchmarks", "tools", "scripts")]
    assert missing_imports(folders, ROOT / "slime") == []


def test_missing_names_are_found(tmp_path: Path) -> None:
    package, user = tmp_path / "package", tmp_path / "user"
    for folder in (package, user):
        folder.mkdir()
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text("def f() -> None: ...\nif True:\n    a = b = 1\n")
    (user / "script.py").write_text("from package.one import a, b, f, gone\nfrom package import one, two\n")
    assert missing_imports([user], package) == ["script.py: package.one.gone", "script.py: package.two"]
