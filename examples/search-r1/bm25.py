"""BM25 over a small collection, with an inverted index: a query costs what its words' documents cost."""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

K1, B = 1.2, 0.75
_WORD = re.compile(r"\w+")


def words_of(text: str) -> list[str]:
    return _WORD.findall(text.lower())


class Bm25:
    """An index of documents; `search` finds those that a query's words are most telling of."""

    def __init__(self, documents: Sequence[str]) -> None:
        self.documents = list(documents)
        counts = [Counter(words_of(document)) for document in self.documents]
        lengths = [sum(count.values()) for count in counts]
        mean = sum(lengths) / max(1, len(lengths))
        holders: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for number, count in enumerate(counts):
            for word, times in count.items():
                holders[word].append((number, times))
        self._weights: dict[str, list[tuple[int, float]]] = {}
        for word, found in holders.items():
            rarity = math.log(1 + (len(counts) - len(found) + 0.5) / (len(found) + 0.5))
            self._weights[word] = [
                (number, rarity * times * (K1 + 1) / (times + K1 * (1 - B + B * lengths[number] / mean)))
                for number, times in found
            ]

    def search(self, query: str, top: int) -> list[tuple[float, str]]:
        """The best documents with their scores, best first; of equals the earlier one."""
        scores: dict[int, float] = defaultdict(float)
        for word in set(words_of(query)):
            for number, weight in self._weights.get(word, ()):
                scores[number] += weight
        best = heapq.nsmallest(top, scores.items(), key=lambda item: (-item[1], item[0]))
        return [(score, self.documents[number]) for number, score in best]
