"""Kernels in C as the pupil writes them: a way to go through the matrix, and perhaps a mistake.

Every line is a fragment of a small vocabulary, or three, so that a tiny model writes a kernel in 9 to 20 tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from problems import MAPS, Problem

HEAD = "void kernel(int n, int m, float a, float b, const float *x, const float *w, float *y) {"
WORDS = r"v [<>*][^;\n]*|;?\n|(?:(?!v [<>*])[^\n])*\n|row sums|column sums|product| of |n=\d+ m=\d+"
"""Fragments: the map, the end of its line (with a semicolon or without), whole lines, the words of a problem; what is
left of a line is one, too."""
STYLES = {
    "row sums": ("plain", "columns first", "lanes"),
    "column sums": ("plain", "rows first"),
    "product": ("plain", "rows of w"),
}
"""The first is the naive way, which speed is measured against; the last is the fast one."""
MISTAKES = ("semicolon", "bound", "omission")


class Draft(NamedTuple):
    """What the pupil decides before it writes."""

    style: str
    mistake: str | None
    forgets: int | None = None
    """Which line of the body is left out altogether."""

    @property
    def is_right(self) -> bool:
        return self.mistake is None and self.forgets is None


def asked(problem: Problem) -> str:
    """What the model is asked for."""
    return f"{problem.kind} of {MAPS[problem.map][0]}"


def write(problem: Problem, draft: Draft) -> str:
    """The text of a kernel.

    Mistakes: the semicolon after the map is missing (does not compile), the loop over columns goes one too far (wrong),
    or something is left out that some sizes need: the rest of a row after whole lanes, setting y to 0 first, or the
    fraction in the type of the sum.
    """
    semicolon = "" if draft.mistake == "semicolon" else ";"
    below = "<=" if draft.mistake == "bound" else "<"
    omits = draft.mistake == "omission"
    lines = _WRITERS[problem.kind, draft.style](MAPS[problem.map][0], below, omits)
    return "\n".join([HEAD, *(line.replace("@", semicolon) for line in lines), "}"])


def _rows_plain(f: str, below: str, omits: bool) -> list[str]:
    return [
        "for (int i = 0; i < n; i++) {",
        "int s = 0;" if omits else "float s = 0;",
        f"for (int j = 0; j {below} m; j++) {{",
        "float v = a * x[i * m + j] + b;",
        f"s += {f}@",
        "}",
        "y[i] = s;",
        "}",
    ]


def _rows_columns_first(f: str, below: str, omits: bool) -> list[str]:
    return [
        *([] if omits else ["for (int i = 0; i < n; i++)", "y[i] = 0;"]),
        f"for (int j = 0; j {below} m; j++)",
        "for (int i = 0; i < n; i++) {",
        "float v = a * x[i * m + j] + b;",
        f"y[i] += {f}@",
        "}",
    ]


def _rows_lanes(f: str, below: str, omits: bool) -> list[str]:
    rest = [  # with an index of its own: written twice it counts twice, which tests tell
        "for (int k = m / 8 * 8; k < m; k++) {",
        "float v = a * x[i * m + k] + b;",
        f"s[0] += {f};",
        "}",
    ]
    return [
        "for (int i = 0; i < n; i++) {",
        "float s[8] = {0};",
        f"for (int j = 0; j + 7 {below} m; j += 8)",
        "for (int u = 0; u < 8; u++) {",
        "float v = a * x[i * m + j + u] + b;",
        f"s[u] += {f}@",
        "}",
        *([] if omits else rest),
        "y[i] = s[0] + s[1] + s[2] + s[3] + s[4] + s[5] + s[6] + s[7];",
        "}",
    ]


def _columns_plain(f: str, below: str, omits: bool) -> list[str]:
    return [
        f"for (int j = 0; j {below} m; j++) {{",
        "int s = 0;" if omits else "float s = 0;",
        "for (int i = 0; i < n; i++) {",
        "float v = a * x[i * m + j] + b;",
        f"s += {f}@",
        "}",
        "y[j] = s;",
        "}",
    ]


def _columns_rows_first(f: str, below: str, omits: bool) -> list[str]:
    return [
        *([] if omits else ["for (int j = 0; j < m; j++)", "y[j] = 0;"]),
        "for (int i = 0; i < n; i++)",
        f"for (int j = 0; j {below} m; j++) {{",
        "float v = a * x[i * m + j] + b;",
        f"y[j] += {f}@",
        "}",
    ]


def _product_plain(f: str, below: str, omits: bool) -> list[str]:
    return [
        "for (int i = 0; i < n; i++)",
        "for (int j = 0; j < m; j++) {",
        "int s = 0;" if omits else "float s = 0;",
        f"for (int k = 0; k {below} m; k++) {{",
        "float v = a * x[i * m + k] + b;",
        f"float u = {f}@",
        "s += u * w[k * m + j];",
        "}",
        "y[i * m + j] = s;",
        "}",
    ]


def _product_rows_of_w(f: str, below: str, omits: bool) -> list[str]:
    return [
        "for (int i = 0; i < n; i++) {",
        *([] if omits else ["for (int j = 0; j < m; j++)", "y[i * m + j] = 0;"]),
        f"for (int k = 0; k {below} m; k++) {{",
        "float v = a * x[i * m + k] + b;",
        f"float u = {f}@",
        "for (int j = 0; j < m; j++)",
        "y[i * m + j] += u * w[k * m + j];",
        "}",
        "}",
    ]


_WRITERS = {
    ("row sums", "plain"): _rows_plain,
    ("row sums", "columns first"): _rows_columns_first,
    ("row sums", "lanes"): _rows_lanes,
    ("column sums", "plain"): _columns_plain,
    ("column sums", "rows first"): _columns_rows_first,
    ("product", "plain"): _product_plain,
    ("product", "rows of w"): _product_rows_of_w,
}
