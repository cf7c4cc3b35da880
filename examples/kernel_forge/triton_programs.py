"""Kernels in Triton as the pupil writes them: a way to go through the matrix, and perhaps a mistake.

A text is a Python module with `kernel`, the constants it is compiled with, and its GRID: how many programs run for a
matrix of n rows and m columns. Every line is a fragment or two of a small vocabulary, as in `c_programs.py`.
"""

from __future__ import annotations

from c_programs import Draft
from problems import Problem

HEAD = "@triton.jit\ndef kernel(n, m, a, b, x, w, y):"
_MAP = r"v \*[^\n]*|tl\.where\(v[^\n]*|tl\.abs\(v\)"
WORDS = rf"{_MAP}|for \w+ in [^\n:]*|:?\n|(?:(?!{_MAP}|for )[^\n])*\n|row sums|column sums|product| of |n=\d+ m=\d+"
"""Fragments: the map, loop heads and the ends of their lines (with a colon or without), other lines as a whole, the
words of a problem; what is left of a line is one, too."""
STYLES = {
    "row sums": ("plain", "columns first", "blocks"),
    "column sums": ("plain", "blocks"),
    "product": ("plain", "blocks"),
}
"""The first is the naive way, which speed is measured against: one number at a time. The last is the fast one."""
MAPS = {
    "relu": "tl.where(v > 0, v, 0.0)",
    "square": "v * v",
    "magnitude": "tl.abs(v)",
    "leak": "tl.where(v > 0, v, v / 8)",
    "cube": "v * v * v",
    "ramp": "tl.where(v > 1, 1.0, v)",
}
"""Of a number v, in Triton."""


def asked(problem: Problem) -> str:
    """What the model is asked for."""
    return f"{problem.kind} of {MAPS[problem.map]}"


def write(problem: Problem, draft: Draft) -> str:
    """The text of a kernel.

    Mistakes: the colon after a loop head is missing (no Python), the loop over columns or its mask goes one too far
    (wrong), or something is left out that some sizes need: the mask, or the fraction in the type of the sum.
    """
    colon = "" if draft.mistake == "semicolon" else ":"
    over = " + 1" if draft.mistake == "bound" else ""
    grid, lines = _WRITERS[problem.kind, draft.style](MAPS[problem.map], over, draft.mistake == "omission")
    body = [f"    {line}".replace("@", colon) for line in lines]
    return "\n".join([f"GRID = lambda n, m: {grid}", HEAD, *body])


Program = tuple[str, list[str]]
"""The grid, and the lines of a body; `@` stands for the colon that may be missing."""


def _rows_plain(f: str, over: str, omits: bool) -> Program:
    return "(n,)", [
        "i = tl.program_id(0)",
        "s = tl.cast(0, tl.int32)" if omits else "s = tl.cast(0, tl.float32)",
        f"for j in range(m{over})@",
        "    v = a * tl.load(x + i * m + j) + b",
        f"    u = {f}",
        "    s += tl.cast(u, tl.int32)" if omits else "    s += u",
        "tl.store(y + i, s)",
    ]


def _rows_columns_first(f: str, over: str, omits: bool) -> Program:
    mask = "i < n + 32" if omits else "i < n"
    return "((n + 31) // 32,)", [
        "i = tl.program_id(0) * 32 + tl.arange(0, 32)",
        "s = tl.zeros([32], tl.float32)",
        f"for j in range(m{over})@",
        f"    v = a * tl.load(x + i * m + j, mask={mask}, other=0.0) + b",
        f"    u = {f}",
        "    s += u",
        f"tl.store(y + i, s, mask={mask})",
    ]


def _rows_blocks(f: str, over: str, omits: bool) -> Program:
    return "(n,)", [
        "i = tl.program_id(0)",
        "s = tl.zeros([1024], tl.float32)",
        "for k in range(0, m, 1024)@",
        "    j = k + tl.arange(0, 1024)",
        f"    v = a * tl.load(x + i * m + j, mask=j < m{over}, other=0.0) + b",
        f"    u = {f}",
        "    s += u" if omits else f"    s += tl.where(j < m{over}, u, 0.0)",
        "tl.store(y + i, tl.sum(s))",
    ]


def _columns_plain(f: str, over: str, omits: bool) -> Program:
    return f"(m{over},)", [
        "j = tl.program_id(0)",
        "s = tl.cast(0, tl.int32)" if omits else "s = tl.cast(0, tl.float32)",
        "for i in range(n)@",
        "    v = a * tl.load(x + i * m + j) + b",
        f"    u = {f}",
        "    s += tl.cast(u, tl.int32)" if omits else "    s += u",
        "tl.store(y + j, s)",
    ]


def _columns_blocks(f: str, over: str, omits: bool) -> Program:
    mask = "j < m + 32" if omits else f"j < m{over}"
    return "((m + 31) // 32,)", [
        "j = tl.program_id(0) * 32 + tl.arange(0, 32)",
        "s = tl.zeros([32], tl.float32)",
        "for i in range(n)@",
        f"    v = a * tl.load(x + i * m + j, mask={mask}, other=0.0) + b",
        f"    u = {f}",
        "    s += u",
        f"tl.store(y + j, s, mask={mask})",
    ]


def _product_plain(f: str, over: str, omits: bool) -> Program:
    return "(n, m)", [
        "i = tl.program_id(0)",
        "j = tl.program_id(1)",
        "s = tl.cast(0, tl.int32)" if omits else "s = tl.cast(0, tl.float32)",
        f"for k in range(m{over})@",
        "    v = a * tl.load(x + i * m + k) + b",
        f"    u = {f}",
        "    u *= tl.load(w + k * m + j)",
        "    s += tl.cast(u, tl.int32)" if omits else "    s += u",
        "tl.store(y + i * m + j, s)",
    ]


def _product_blocks(f: str, over: str, omits: bool) -> Program:
    mask = "j < m + 64" if omits else "j < m"
    return "(n, (m + 63) // 64)", [
        "i = tl.program_id(0)",
        "j = tl.program_id(1) * 64 + tl.arange(0, 64)",
        "s = tl.zeros([64], tl.float32)",
        f"for k in range(m{over})@",
        "    v = a * tl.load(x + i * m + k) + b",
        f"    u = {f}",
        f"    s += u * tl.load(w + k * m + j, mask={mask}, other=0.0)",
        f"tl.store(y + i * m + j, s, mask={mask})",
    ]


_WRITERS = {
    ("row sums", "plain"): _rows_plain,
    ("row sums", "columns first"): _rows_columns_first,
    ("row sums", "blocks"): _rows_blocks,
    ("column sums", "plain"): _columns_plain,
    ("column sums", "blocks"): _columns_blocks,
    ("product", "plain"): _product_plain,
    ("product", "blocks"): _product_blocks,
}
