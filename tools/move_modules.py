"""Moves, merges and renames modules and their names, and rewrites every reference.

    python tools/move_modules.py MOVES.tsv [--names NAMES.tsv] [--dry-run]

A row of MOVES.tsv is `new <tab> old, old, ...`: paths of Python files from the repository root. Several old files are
merged into the new one: imports first, then the bodies in the order of their imports. A row of NAMES.tsv is
`path:name <tab> new name`, with the path as it is before the move; `path:Class.method` renames the method in every
class that defines it and wherever an attribute has that name. A file that moves to a folder `compat/` keeps its dotted
name.

References are rewritten in every text file that git tracks: import statements, uses of imported modules, dotted paths
and file paths in strings and documents. Names that two merged files define are made distinct and printed.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import re
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path.cwd()
TEXT = {".py", ".md", ".toml", ".sh", ".yaml", ".yml", ".json", ".jinja", ".txt", ".pyi", ".tsv", ""}
Edit = tuple[int, int, str]


def dotted(path: str) -> str:
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split(
        "\n"
    )
    return [name for name in listed if name and Path(name).suffix in TEXT and (ROOT / name).is_file()]


class Moves:
    def __init__(self, rows: list[tuple[str, list[str]]], names: dict[tuple[str, str], str]) -> None:
        self.rows = [(new, olds) for new, olds in rows if [new] != olds]
        self.paths = {old: new for new, olds in self.rows for old in olds}
        self.modules = {dotted(old): dotted(new) for old, new in self.paths.items() if "/compat/" not in new}
        self.names = names  # (old module, name) -> new name
        self.notes: list[str] = []

    @property
    def renamed_in(self) -> set[str]:
        return {module for module, _ in self.names}

    def words(self) -> set[str]:
        """Words of which a text has at least one if a move or a new name concerns it."""
        found = {module.rpartition(".")[2] for module in self.modules}
        return found | {Path(old).stem for old in self.paths} | {name.split(".")[-1] for _, name in self.names}

    def methods(self) -> dict[str, str]:
        return {name.split(".")[1]: new for (_, name), new in self.names.items() if "." in name}

    def module(self, name: str) -> str:
        return self.modules.get(name, name)


# ---------------------------------------------------------------------- positions in a source
class Source:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.lines = text.splitlines(keepends=True)

    def at(self, line: int, column: int) -> int:
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)


BOUND: dict[ast.AST, set[str]] = {}


def bound_in(function: ast.AST) -> set[str]:
    """Names that a function binds itself: parameters, targets, imports and inner definitions."""
    if function in BOUND:
        return BOUND[function]
    BOUND[function] = found_in = _bound_in(function)
    return found_in


def _bound_in(function: ast.AST) -> set[str]:
    found: set[str] = set()
    declared: set[str] = set()
    arguments = getattr(function, "args", None)
    if isinstance(arguments, ast.arguments):
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        found |= {a.arg for a in [*every, *filter(None, [arguments.vararg, arguments.kwarg])]}
    body = function.body if isinstance(function.body, list) else [function.body]
    stack = list(body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        if isinstance(node, ast.Global | ast.Nonlocal):
            declared |= set(node.names)
        if isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(a.asname or a.name).split(".")[0] for a in node.names}
        if isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
            found.add(node.name)
        if isinstance(node, ast.MatchMapping) and node.rest:
            found.add(node.rest)
        stack.extend(ast.iter_child_nodes(node))
    return found - declared


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def uses(source: Source, name: str, below: ast.AST | None = None) -> Iterator[tuple[ast.Name, list[ast.AST]]]:
    """Every `Name` node that means the module-level `name` (or, with `below`, the name that this function binds)."""

    def walk(node: ast.AST, parents: list[ast.AST]) -> Iterator[tuple[ast.Name, list[ast.AST]]]:
        if node is not below:
            if isinstance(node, FUNCTIONS) and name in bound_in(node):
                outer = [*node.args.defaults, *[d for d in node.args.kw_defaults if d]]
                if not isinstance(node, ast.Lambda):
                    every = [
                        *node.args.posonlyargs,
                        *node.args.args,
                        *node.args.kwonlyargs,
                        node.args.vararg,
                        node.args.kwarg,
                    ]
                    outer += [
                        *node.decorator_list,
                        *filter(None, [node.returns]),
                        *[a.annotation for a in every if a and a.annotation],
                    ]
                for child in outer:
                    yield from walk(child, [*parents, node])
                return
            if isinstance(node, COMPREHENSIONS):
                targets = {n.id for g in node.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)}
                if name in targets:
                    yield from walk(node.generators[0].iter, [*parents, node])
                    return
        if isinstance(node, ast.Name) and node.id == name:
            yield node, parents
        for child in ast.iter_child_nodes(node):
            yield from walk(child, [*parents, node])

    yield from walk(below if below is not None else source.tree, [])


def in_fstring(parents: list[ast.AST]) -> ast.JoinedStr | None:
    return next((p for p in parents if isinstance(p, ast.JoinedStr)), None)


def attribute_span(source: Source, use: ast.Name, attribute: ast.Attribute, parents: list[ast.AST]) -> tuple[int, int]:
    """Where `module.name` is; in an f-string, where positions are wrong, the first place with these words."""
    outer = in_fstring(parents)
    if outer is None:
        return source.span(attribute)
    start, end = source.span(outer)
    found = re.search(rf"(?<![\w.]){use.id}\.{attribute.attr}\b", source.text[start:end])
    assert found, f"line {use.lineno}: {use.id}.{attribute.attr}"
    return start + found.start(), start + found.end()


def rename_uses(source: Source, old: str, new: str, below: ast.AST | None = None) -> Iterator[Edit]:
    strings: set[int] = set()
    for node, parents in uses(source, old, below):
        outer = in_fstring(parents)
        if outer is None:
            yield (*source.span(node), new)
        elif id(outer) not in strings:  # before Python 3.12 positions within f-strings are wrong
            strings.add(id(outer))
            start, end = source.span(outer)
            for found in re.finditer(rf"(?<![\w.\"'=]){re.escape(old)}\b(?!\s*=[^=])", source.text[start:end]):
                before = source.text[start : start + found.start()]
                if before.count("{") > before.count("}"):
                    yield start + found.start(), start + found.end(), new


def module_level_names(tree: ast.Module) -> dict[str, ast.AST]:
    found: dict[str, ast.AST] = {}

    def take(nodes: list[ast.stmt]) -> None:
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.setdefault(node.name, node)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    found.setdefault((alias.asname or alias.name).split(".")[0], node)
            elif isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
                for block in ("body", "orelse", "finalbody"):
                    take(getattr(node, block, []))
                for handler in getattr(node, "handlers", []):
                    take(handler.body)
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                        found.setdefault(inner.id, node)

    take(tree.body)
    return found


def name_of_definition(source: Source, node: ast.AST, old: str) -> tuple[int, int]:
    """Where a `def` or `class` statement has its name."""
    line = source.at(node.lineno, node.col_offset)
    found = re.compile(rf"(?:async\s+def|def|class)\s+({re.escape(old)})\b").search(source.text, line)
    assert found
    return found.start(1), found.end(1)


# ---------------------------------------------------------------------- one file
def resolve(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parents = module.split(".")
    above = parents[: len(parents) - node.level + is_package]
    return ".".join([*above, *([node.module] if node.module else [])])


def enclosing(tree: ast.Module) -> dict[int, ast.AST]:
    """The innermost function or module around every statement."""
    found: dict[int, ast.AST] = {}

    def walk(node: ast.AST, scope: ast.AST) -> None:
        found[id(node)] = scope
        inner = node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else scope
        for child in ast.iter_child_nodes(node):
            walk(child, inner)

    walk(tree, tree)
    return found


def rewrite_python(path: str, text: str, moves: Moves, known: set[str]) -> str:
    source = Source(text)
    module, is_package = dotted(path), path.endswith("__init__.py")
    target = moves.module(module)
    edits: list[Edit] = []
    covered: list[tuple[int, int]] = []
    scopes = enclosing(source.tree)
    level = module_level_names(source.tree)
    for old, new in [(n, v) for (m, n), v in moves.names.items() if m == module]:  # this file's own names
        if "." in old:
            continue
        node = level.get(old)
        if node is None:
            moves.notes.append(f"{path}: has no {old}")
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            edits.append((*name_of_definition(source, node, old), new))
        edits += rename_uses(source, old, new)
        for inner in ast.walk(source.tree):
            if isinstance(inner, ast.Global) and old in inner.names:
                start, end = source.span(inner)
                edits += [
                    (start + f.start(), start + f.end(), new) for f in re.finditer(rf"\b{old}\b", text[start:end])
                ]
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        start, end = source.span(node)
        covered.append((start, end))
        base = resolve(node, module, is_package)
        if base.split(".")[0] != "slime" and not base.startswith("tests"):
            continue
        scope = scopes[id(node)]
        below = None if isinstance(scope, ast.Module | ast.ClassDef) else scope
        lines: dict[str, list[str]] = defaultdict(list)
        changed = False
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            if inner in known:  # a module from its package
                new = moves.module(inner)
                if new == target:  # merged into this very file: uses `module.name` become `name`
                    changed = True
                    for use, parents in uses(source, alias.asname or alias.name, below):
                        parent = parents[-1] if parents else None
                        if isinstance(parent, ast.Attribute):
                            renamed = moves.names.get((inner, parent.attr), parent.attr)
                            edits.append((*attribute_span(source, use, parent, parents), renamed))
                        else:
                            moves.notes.append(f"{path}:{use.lineno}: uses {alias.name} as a value")
                    continue
                package, _, last = new.rpartition(".")
                if node.level and package == ".".join(target.split(".")[:-1]):
                    package = "." * node.level + (node.module or "")
                changed |= new != inner
                if new == inner and node.level:
                    lines["." * node.level + (node.module or "")].append(shown(alias.name, alias.asname))
                    old_use = alias.asname or alias.name
                elif alias.asname or last == alias.name:
                    lines[package].append(shown(last, alias.asname if alias.asname != last else None))
                    old_use = alias.asname or alias.name
                else:
                    taken = (
                        last in level
                        or any(isinstance(n, ast.Name) and n.id == last for n in ast.walk(scope))
                        or any(isinstance(n, ast.arg) and n.arg == last for n in ast.walk(scope))
                    )
                    clash = taken or hasattr(builtins, last) or rebound(source, alias.name, node)
                    if clash:
                        lines[package].append(f"{last} as {alias.name}")
                        moves.notes.append(f"{path}:{node.lineno}: {new} keeps the name {alias.name} here")
                    else:
                        lines[package].append(last)
                        edits += rename_uses(source, alias.name, last, below)
                    old_use = alias.name
                for use, parents in uses(source, old_use, below) if inner in moves.renamed_in else ():
                    parent = parents[-1] if parents else None
                    if isinstance(parent, ast.Attribute) and (inner, parent.attr) in moves.names:
                        _, stop = attribute_span(source, use, parent, parents)
                        edits.append((stop - len(parent.attr), stop, moves.names[inner, parent.attr]))
                        changed = True
            else:
                new = moves.module(base)
                renamed = moves.names.get((base, alias.name), alias.name)
                changed |= new != base or renamed != alias.name
                if renamed != alias.name and alias.asname is None:
                    edits += rename_uses(source, alias.name, renamed, below)
                if new == target and moves.modules.get(base):
                    changed = True
                    if alias.asname:
                        edits += rename_uses(source, alias.asname, renamed, below)
                    continue
                spelled = new
                if node.level and new == base:
                    spelled = "." * node.level + (node.module or "")
                lines[spelled].append(shown(renamed, alias.asname if alias.asname != renamed else None))
        if changed:
            indent = " " * node.col_offset
            comment = ""
            rest = text[end : text.find("\n", end)]
            statements = [statement(package, names) for package, names in lines.items()]
            edits.append((start, end, f"\n{indent}".join(statements) + comment if statements else "pass  # merged"))
            if rest.strip() and len(statements) > 1:
                moves.notes.append(f"{path}:{node.lineno}: comment {rest.strip()!r} after a split import")
    for node in ast.walk(source.tree):  # `import slime.a.b` and uses `slime.a.b.name`, names renamed
        if isinstance(node, ast.Attribute):
            chain = attribute_chain(node)
            if chain and (chain.rpartition(".")[0], node.attr) in moves.names and chain.startswith("slime."):
                stop = source.span(node)[1]
                edits.append((stop - len(node.attr), stop, moves.names[chain.rpartition(".")[0], node.attr]))
    methods = {method: new for method, new in moves.methods().items() if method in text}
    for node in ast.walk(source.tree) if methods else ():
        if isinstance(node, ast.Attribute) and node.attr in methods:
            stop = source.span(node)[1]
            if source.text[stop - len(node.attr) : stop] == node.attr:
                edits.append((stop - len(node.attr), stop, methods[node.attr]))
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.name in methods:
                    edits.append((*name_of_definition(source, inner, inner.name), methods[inner.name]))
    ranges = sorted(covered)
    edits += [
        (start, end, new) for start, end, new in text_edits(text, moves) if not any(a <= start < b for a, b in ranges)
    ]
    return apply(text, edits, path)


def rebound(source: Source, name: str, imported: ast.AST) -> bool:
    for node in ast.walk(source.tree):
        if node is imported:
            continue
        if isinstance(node, ast.Import | ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names):
            continue
        if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load):
            return True
        if isinstance(node, ast.Global) and name in node.names:
            return True
    return False


def attribute_chain(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = attribute_chain(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def shown(name: str, alias: str | None) -> str:
    return f"{name} as {alias}" if alias else name


def statement(package: str, names: list[str]) -> str:
    line = f"from {package} import {', '.join(sorted(set(names)))}"
    return line if len(line) < 110 else f"from {package} import (\n    " + ",\n    ".join(sorted(set(names))) + ",\n)"


def text_edits(text: str, moves: Moves) -> Iterator[Edit]:
    for found in re.finditer(r"(?<![\w./-])slime((?:\.\w+)+)", text):
        words = found.group(0).split(".")
        for count in range(len(words), 1, -1):
            old = ".".join(words[:count])
            new = moves.modules.get(old)
            if count < len(words) and (old, words[count]) in moves.names:
                yield (
                    found.start(),
                    found.start() + len(old) + 1 + len(words[count]),
                    f"{new or old}.{moves.names[old, words[count]]}",
                )
                break
            if new:
                yield found.start(), found.start() + len(old), new
                break
    for found in re.finditer(r"(?<![\w.-])((?:\w+/)*\w+\.py)\b", text):
        name = found.group(1)
        for prefix in ("", "slime/"):
            if prefix + name in moves.paths and ("/" in name or name in {"driver.py", "turns.py"}):
                yield found.start(1), found.end(1), moves.paths[prefix + name].removeprefix(prefix)
                break


def apply(text: str, edits: list[Edit], path: str) -> str:
    done = len(text)
    for start, end, new in sorted(set(edits), key=lambda edit: (edit[0], edit[1]), reverse=True):
        if end > done:
            raise SystemExit(f"{path}: overlapping edits at {text[start:end]!r} -> {new!r}")
        text = text[:start] + new + text[end:]
        done = start
    return text


# ---------------------------------------------------------------------- merging
def collisions(olds: list[str], moves: Moves) -> None:
    """Names that more than one of the merged files has get distinct ones; notes say which."""
    seen: dict[str, tuple[str, ast.AST, str]] = {}
    for old in olds:
        text = (ROOT / old).read_text()
        source = Source(text)
        for name, node in module_level_names(source.tree).items():
            name = moves.names.get((dotted(old), name), name)
            mine = ast.get_source_segment(text, node) or ""
            if name not in seen:
                seen[name] = (old, node, mine)
                continue
            other, twin, theirs = seen[name]
            both_imports = isinstance(node, ast.Import | ast.ImportFrom) and isinstance(
                twin, ast.Import | ast.ImportFrom
            )
            if both_imports and same_import(node, twin, name):
                continue
            internal = {dotted(o) for o in olds}
            if isinstance(node, ast.ImportFrom) and node.module in internal:
                continue
            if isinstance(twin, ast.ImportFrom) and twin.module in internal:
                seen[name] = (old, node, mine)
                continue
            stem = Path(old).stem
            new = f"{name}_{stem}"
            if mine == theirs and isinstance(node, ast.Assign | ast.AnnAssign):
                moves.notes.append(f"{old}: {name} is defined as in {other} (twice in the merged file)")
                continue
            if isinstance(node, ast.Import | ast.ImportFrom):
                moves.notes.append(f"CLASH {old}: import {name} and a name of {other}")
                continue
            if isinstance(twin, ast.Import | ast.ImportFrom):
                moves.notes.append(f"CLASH {old}: {name} is an import in {other}")
            if name.startswith("__"):
                continue
            moves.names[dotted(old), name] = new
            moves.notes.append(f"{old}: {name} -> {new} ({other} has one)")


def same_import(one: ast.AST, two: ast.AST, name: str) -> bool:
    def meaning(node: ast.AST) -> set[tuple[str, str]]:
        base = getattr(node, "module", "") or ""
        return {(base, alias.name) for alias in node.names if (alias.asname or alias.name).split(".")[0] == name}

    return meaning(one) == meaning(two)


def merge(new: str, olds: list[str], texts: dict[str, str]) -> str:
    order = by_imports(olds)
    head = Source(texts[olds[0]])
    docstring = (
        ast.get_source_segment(head.text, head.tree.body[0]) if ast.get_docstring(head.tree) is not None else '""""""'
    )
    imports: list[str] = []
    bodies: list[str] = []
    given: set[str] = set()  # assignments of the files before
    for old in order:
        source = Source(texts[old])
        cut: list[tuple[int, int]] = []
        note = ""
        for index, node in enumerate(source.tree.body):
            start, end = source.span(node)
            stop = source.text.find("\n", end) + 1 or len(source.text)
            if (
                index == 0
                and isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                if old != olds[0]:
                    note = commented(ast.get_docstring(source.tree) or "")
                cut.append((start, stop))
            elif isinstance(node, ast.Import | ast.ImportFrom):
                if getattr(node, "module", "") != "__future__":
                    imports.append(source.text[start:stop].rstrip("\n"))
                cut.append((start, stop))
            elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                imports.append(source.text[start:stop].rstrip("\n"))
                cut.append((start, stop))
            elif (isinstance(node, ast.Assign) and source.text[start:stop].strip() in given) or (
                isinstance(node, ast.Pass) and "# merged" in source.text[start:stop]
            ):
                cut.append((start, stop))
        text = source.text
        for start, stop in reversed(cut):
            text = text[:start] + text[stop:]
        given |= {ast.get_source_segment(source.text, n) or "" for n in source.tree.body if isinstance(n, ast.Assign)}
        bodies.append((f"{note}\n\n" if note else "") + text.strip("\n") + "\n")
    typed = [text for text in imports if text.startswith("if ")]
    plain = [text for text in imports if not text.startswith("if ") and text.strip() != "pass  # merged"]
    guarded = "if TYPE_CHECKING:\n" + "\n".join(t.split("\n", 1)[1] for t in typed) if typed else ""
    parts = [docstring, "from __future__ import annotations", "\n".join(plain), guarded, *bodies]
    return "\n\n".join(part for part in parts if part.strip())


def commented(text: str) -> str:
    """A docstring as comment lines; paragraphs without indented lines are filled again."""
    lines: list[str] = []
    for paragraph in text.split("\n\n"):
        rows = paragraph.split("\n")
        is_plain = not any(row.startswith((" ", "-", "*", "|")) for row in rows)
        rows = textwrap.wrap(" ".join(rows), 117, break_long_words=False, break_on_hyphens=False) if is_plain else rows
        lines += [*(f"# {row}".rstrip() for row in rows), "#"]
    return "\n".join(lines[:-1])


def by_imports(olds: list[str]) -> list[str]:
    needs: dict[str, set[str]] = {}
    for old in olds:
        tree = ast.parse((ROOT / old).read_text())
        names: set[str] = set()
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and not node.level:
                names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
            if isinstance(node, ast.ImportFrom) and node.level:
                base = resolve(node, dotted(old), old.endswith("__init__.py"))
                names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        needs[old] = {other for other in olds if other != old and dotted(other) in names}
    order: list[str] = []

    def put(old: str) -> None:
        for other in olds:
            if other in needs[old] and other not in order:
                put(other)
        if old not in order:
            order.append(old)

    for old in olds:
        put(old)
    return order


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("moves", type=Path)
    parser.add_argument("--names", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    flags = parser.parse_args()
    lines = [line.rstrip("\n") for line in flags.moves.read_text().splitlines() if line.strip() and line[0] != "#"]
    rows = [(line.split("\t")[0].strip(), [o.strip() for o in line.split("\t")[-1].split(",")]) for line in lines]
    names: dict[tuple[str, str], str] = {}
    for line in flags.names.read_text().splitlines() if flags.names else []:
        if line.strip() and line[0] != "#":
            where, new = line.split("\t")
            path, _, old = where.partition(":")
            names[dotted(path), old] = new.strip()
    moves = Moves(rows, names)
    missing = [old for old in moves.paths if not (ROOT / old).exists()]
    if missing:
        raise SystemExit(f"no such files: {missing}")
    for _, olds in moves.rows:
        if len(olds) > 1:
            collisions(olds, moves)
    files = tracked()
    known = {dotted(name) for name in files if name.endswith(".py")}
    words = moves.words()
    after: dict[str, str] = {}
    for name in files:
        if name in {"tools/move_modules.py"}:
            continue
        text = (ROOT / name).read_text()
        if name not in moves.paths and words.isdisjoint(re.findall(r"\w+", text)):
            after[name] = text
        elif name.endswith(".py"):
            after[name] = rewrite_python(name, text, moves, known)
        else:
            after[name] = apply(text, list(text_edits(text, moves)), name)
    if flags.dry_run:
        print("\n".join(moves.notes))
        return 0
    for new, _ in moves.rows:
        (ROOT / new).parent.mkdir(parents=True, exist_ok=True)
    results = {new: merge(new, olds, after) if len(olds) > 1 else after[olds[0]] for new, olds in moves.rows}
    staged: list[tuple[str, str]] = []
    for new, olds in moves.rows:  # over temporary names: one file may take the place of another that moves
        temporary = f"{olds[0]}.moving"
        subprocess.run(["git", "mv", olds[0], temporary], check=True, cwd=ROOT)
        staged.append((temporary, new))
        for old in olds[1:]:
            subprocess.run(["git", "rm", "-qf", old], check=True, cwd=ROOT)
    for temporary, new in staged:
        subprocess.run(["git", "mv", temporary, new], check=True, cwd=ROOT)
    for name, text in after.items():
        if name not in moves.paths and text != (ROOT / name).read_text():
            (ROOT / name).write_text(text)
    for new, text in results.items():
        (ROOT / new).write_text(text)
    print("\n".join(moves.notes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
