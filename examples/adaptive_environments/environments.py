"""Fourteen environments that make problems of any difficulty and check any right answer.

An `Environment` makes a question of a level (1, 2, 3, ...), knows one right answer to it, and says whether an answer is
right. The check reads the question and the answer and nothing else: where several answers are right (shortest paths,
orders, assignments, subsets), it accepts every one of them. A prompt is the environment's letter, the question and `=`.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter, deque
from itertools import pairwise, product
from typing import ClassVar

LETTERS = "abcdefghij"


class Environment(ABC):
    """Problems of one kind."""

    name: str
    letter: str

    @abstractmethod
    def question(self, level: int, rng: random.Random) -> str:
        """A problem of a level; the higher, the harder."""

    @abstractmethod
    def solve(self, question: str) -> str:
        """One right answer."""

    def verify(self, question: str, answer: str) -> bool:
        """Whether an answer is right; where there is only one, it is that one."""
        return answer == self.solve(question)

    def prompt(self, question: str) -> str:
        """What the model reads."""
        return f"{self.letter}{question}="


class Addition(Environment):
    """`3+11`: two numbers below 4 + 4 level."""

    name, letter = "addition", "A"

    def question(self, level: int, rng: random.Random) -> str:
        return "+".join(str(rng.randrange(4 + 4 * level)) for _ in range(2))

    def solve(self, question: str) -> str:
        return str(sum(map(int, question.split("+"))))


class Modulo(Environment):
    """`17%5`: the rest, of numbers below 6 + 6 level."""

    name, letter = "modulo", "M"

    def question(self, level: int, rng: random.Random) -> str:
        return f"{rng.randrange(6 + 6 * level)}%{rng.randrange(2, 6)}"

    def solve(self, question: str) -> str:
        number, by = map(int, question.split("%"))
        return str(number % by)


class Binary(Environment):
    """`11`: in base two, `1011`; numbers below 2^(level + 1)."""

    name, letter = "binary", "B"

    def question(self, level: int, rng: random.Random) -> str:
        return str(rng.randrange(2 ** (level + 1)))

    def solve(self, question: str) -> str:
        return f"{int(question):b}"


class Sorting(Environment):
    """`3142`: the digits in order, level + 1 of them."""

    name, letter = "sorting", "S"

    def question(self, level: int, rng: random.Random) -> str:
        return "".join(rng.choices("0123456789", k=level + 1))

    def solve(self, question: str) -> str:
        return "".join(sorted(question))


class Counting(Environment):
    """`c:abccab`: how often the letter stands in a text of 2 level letters."""

    name, letter = "counting", "C"

    def question(self, level: int, rng: random.Random) -> str:
        return f"{rng.choice('abc')}:{''.join(rng.choices('abc', k=2 * level))}"

    def solve(self, question: str) -> str:
        wanted, text = question.split(":")
        return str(text.count(wanted))


class Editing(Environment):
    """`b:abcb`: the text of level + 1 letters without that letter, `ac`; an empty one is written `.`."""

    name, letter = "editing", "E"

    def question(self, level: int, rng: random.Random) -> str:
        text = "".join(rng.choices("abcd", k=level + 1))
        return f"{rng.choice(text)}:{text}"

    def solve(self, question: str) -> str:
        gone, text = question.split(":")
        return text.replace(gone, "") or "."


class Brackets(Environment):
    """`([`: whatever makes it balanced; level brackets are open, and some are closed already."""

    name, letter = "brackets", "P"
    pairs: ClassVar = {"(": ")", "[": "]", "{": "}"}

    def question(self, level: int, rng: random.Random) -> str:
        text = ""
        for _ in range(level):
            if rng.random() < 0.25:
                left = rng.choice("([{")
                text += left + self.pairs[left]
            text += rng.choice("([{")
        return text

    def solve(self, question: str) -> str:
        return "".join(self.pairs[left] for left in reversed(self._open(question) or []))

    def verify(self, question: str, answer: str) -> bool:
        return bool(answer) and self._open(question + answer) == []

    def _open(self, text: str) -> list[str] | None:
        """The brackets that are still open; None if one is closed that was not, or anything else stands there."""
        open_: list[str] = []
        for mark in text:
            if mark in self.pairs:
                open_.append(mark)
            elif not open_ or self.pairs[open_.pop()] != mark:
                return None
        return open_


class ShortestPath(Environment):
    """`ab,bc,ac:ac`: nodes from the first to the last one named, along edges, as few as can be; level + 2 nodes."""

    name, letter = "shortest path", "G"

    def question(self, level: int, rng: random.Random) -> str:
        nodes = LETTERS[: min(level + 2, len(LETTERS))]
        order = rng.sample(nodes, len(nodes))
        edges = {tuple(sorted(pair)) for pair in pairwise(order)}  # connected
        edges |= {tuple(sorted(rng.sample(nodes, 2))) for _ in range(level // 2)}
        start, end = rng.sample(nodes, 2)
        shown = rng.sample(sorted(edges), len(edges))
        return ",".join("".join(edge) for edge in shown) + f":{start}{end}"

    def solve(self, question: str) -> str:
        edges, (start, end) = self._read(question)
        paths = deque([start])
        while True:
            path = paths.popleft()
            if path[-1] == end:
                return path
            paths += (path + node for node in LETTERS if frozenset((path[-1], node)) in edges and node not in path)

    def verify(self, question: str, answer: str) -> bool:
        edges, ends = self._read(question)
        walks = all(frozenset(step) in edges for step in pairwise(answer))
        return walks and answer[:1] + answer[-1:] == ends and len(answer) == len(self.solve(question))

    def _read(self, question: str) -> tuple[set[frozenset[str]], str]:
        edges, ends = question.split(":")
        return {frozenset(edge) for edge in edges.split(",")}, ends


class Maze(Environment):
    """`s.#/..g`: steps `r l u d` from s to g that enter no wall; two rows, level + 1 columns. Any way will do."""

    name, letter = "maze", "Z"
    steps: ClassVar = {"r": (0, 1), "l": (0, -1), "d": (1, 0), "u": (-1, 0)}

    def question(self, level: int, rng: random.Random) -> str:
        width = level + 1
        while True:
            cells = [[rng.choice("...#") for _ in range(width)] for _ in range(2)]
            cells[rng.randrange(2)][0] = "s"
            cells[rng.randrange(2)][-1] = "g"
            text = "/".join("".join(row) for row in cells)
            if self._way(text) is not None:
                return text

    def solve(self, question: str) -> str:
        way = self._way(question)
        assert way, "mazes have a way through"
        return way

    def verify(self, question: str, answer: str) -> bool:
        rows = question.split("/")
        row, column = self._find(rows, "s")
        for step in answer:
            if step not in self.steps:
                return False
            row, column = row + self.steps[step][0], column + self.steps[step][1]
            if not (0 <= row < len(rows) and 0 <= column < len(rows[0])) or rows[row][column] == "#":
                return False
        return rows[row][column] == "g"

    def _way(self, text: str) -> str | None:
        rows = text.split("/")
        begin = self._find(rows, "s")
        seen, ways = {begin}, deque([(begin, "")])
        while ways:
            (row, column), way = ways.popleft()
            if rows[row][column] == "g":
                return way
            for step, (down, right) in self.steps.items():
                place = row + down, column + right
                inside = 0 <= place[0] < len(rows) and 0 <= place[1] < len(rows[0])
                if inside and place not in seen and rows[place[0]][place[1]] != "#":
                    seen.add(place)
                    ways.append((place, way + step))
        return None

    def _find(self, rows: list[str], mark: str) -> tuple[int, int]:
        return next((number, row.index(mark)) for number, row in enumerate(rows) if mark in row)


class Intersection(Environment):
    """`abc&bcd`: the letters that both sets of level + 1 have, in any order; `.` where there are none."""

    name, letter = "intersection", "I"

    def question(self, level: int, rng: random.Random) -> str:
        size = min(level + 1, len(LETTERS))
        pool = LETTERS[: min(size + 3, len(LETTERS))]
        return "&".join("".join(rng.sample(pool, size)) for _ in range(2))

    def solve(self, question: str) -> str:
        left, right = question.split("&")
        return "".join(letter for letter in left if letter in right) or "."

    def verify(self, question: str, answer: str) -> bool:
        return sorted(answer) == sorted(self.solve(question))


class Sequence(Environment):
    """`2,5,8`: the number that comes next; steps of at most level + 1."""

    name, letter = "sequence", "Q"

    def question(self, level: int, rng: random.Random) -> str:
        first, step = rng.randrange(3 + level), rng.randrange(1, level + 2)
        return ",".join(str(first + place * step) for place in range(3))

    def solve(self, question: str) -> str:
        *_, before, last = map(int, question.split(","))
        return str(last + last - before)


class Satisfy(Environment):
    """`a+B,b+c`: a bit for each letter so that every clause has a true literal; capitals are negated. Any will do."""

    name, letter = "satisfy", "T"

    def question(self, level: int, rng: random.Random) -> str:
        names = LETTERS[: min(2 + level // 2, 6)]
        while True:
            clauses = ["+".join(self._literal(name, rng) for name in rng.sample(names, 2)) for _ in range(level)]
            text = f"{len(names)}:{','.join(clauses)}"
            if self._first(text) is not None:
                return text

    def solve(self, question: str) -> str:
        found = self._first(question)
        assert found, "formulas can be satisfied"
        return found

    def verify(self, question: str, answer: str) -> bool:
        count, clauses = question.split(":")
        if len(answer) != int(count) or set(answer) - {"0", "1"}:
            return False
        return all(any(self._holds(one, answer) for one in clause.split("+")) for clause in clauses.split(","))

    def _literal(self, name: str, rng: random.Random) -> str:
        return rng.choice((name, name.upper()))

    def _holds(self, literal: str, bits: str) -> bool:
        return (bits[LETTERS.index(literal.lower())] == "1") == literal.islower()

    def _first(self, question: str) -> str | None:
        bits = map("".join, product("01", repeat=int(question.split(":")[0])))
        return next((one for one in bits if self.verify(question, one)), None)


class Ordering(Environment):
    """`b<a,c<b`: all letters in an order that the clues allow; level + 1 letters. Any such order will do."""

    name, letter = "ordering", "O"

    def question(self, level: int, rng: random.Random) -> str:
        names = LETTERS[: min(level + 1, len(LETTERS))]
        order = rng.sample(names, len(names))
        clues = list(pairwise(order))
        return ",".join(f"{low}<{high}" for low, high in rng.sample(clues, max(1, len(clues) - level // 3)))

    def solve(self, question: str) -> str:
        clues = self._clues(question)
        left, order = sorted({name for clue in clues for name in clue}), ""
        while left:
            first = next(name for name in left if not any(high == name and low in left for low, high in clues))
            left.remove(first)
            order += first
        return order

    def verify(self, question: str, answer: str) -> bool:
        clues = self._clues(question)
        if Counter(answer) != Counter({name for clue in clues for name in clue}):
            return False
        return all(answer.index(low) < answer.index(high) for low, high in clues)

    def _clues(self, question: str) -> list[tuple[str, str]]:
        return [(clue[0], clue[2]) for clue in question.split(",")]


class SubsetSum(Environment):
    """`359:8`: some of the digits, each used once, that add up to the number; level + 1 digits. Any choice will do."""

    name, letter = "subset sum", "K"

    def question(self, level: int, rng: random.Random) -> str:
        digits = rng.choices("123456789", k=level + 1)
        chosen = rng.sample(digits, rng.randrange(1, min(level, 3) + 1))
        return f"{''.join(digits)}:{sum(map(int, chosen))}"

    def solve(self, question: str) -> str:
        digits, total = question.split(":")
        choices = product((0, 1), repeat=len(digits))
        texts = ("".join(d for d, take in zip(digits, choice, strict=True) if take) for choice in choices)
        return next(text for text in sorted(texts, key=len) if sum(map(int, text)) == int(total))

    def verify(self, question: str, answer: str) -> bool:
        digits, total = question.split(":")
        if not answer or not answer.isascii() or not answer.isdigit() or Counter(answer) - Counter(digits):
            return False
        return sum(map(int, answer)) == int(total)


ENVIRONMENTS: dict[str, Environment] = {
    one.name: one
    for one in (
        Addition(),
        Modulo(),
        Binary(),
        Sorting(),
        Counting(),
        Editing(),
        Brackets(),
        ShortestPath(),
        Maze(),
        Intersection(),
        Sequence(),
        Satisfy(),
        Ordering(),
        SubsetSum(),
    )
}
