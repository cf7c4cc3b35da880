"""What rooms and trains cost: a hash of city and day, so that nobody can know it without asking the server."""

from __future__ import annotations

import hashlib
import random

CITIES = ("Bern", "Bonn", "Brno", "Cork", "Gent", "Graz", "Kiel", "Linz", "Lyon", "Nice", "Oslo", "Pisa", "Riga",
          "Rome", "Turin", "Ulm", "Vaasa", "York")  # fmt: skip
DAYS = range(1, 25)
OFFERS = {"hotels": range(31, 43), "trains": range(43, 55)}
"""What rooms cost, and what trains cost."""
FREE = 3


def prices(kind: str, city: str, day: int) -> list[int]:
    """What the offers cost that are still free, no two the same."""
    digest = hashlib.sha256(f"{kind} {city} {day}".encode()).digest()
    return random.Random(digest).sample(OFFERS[kind], FREE)


def offered(kind: str, city: str, day: int) -> str:
    """The offers as the tool tells them."""
    return " ".join(map(str, prices(kind, city, day)))
