"""What rooms and trains cost: a hash of city and day, so that nobody can know it without asking the server."""

from __future__ import annotations

import hashlib
import random

CITIES = ("Bern", "Bonn", "Brno", "Cork", "Gent", "Graz", "Kiel", "Linz", "Lyon", "Nice", "Oslo", "Pisa", "Riga",
          "Rome", "Turin", "Ulm", "Vaasa", "York")  # fmt: skip
DAYS = range(1, 25)
OFFERS = {"hotels": ("Astor", "Bristol", "Carlton"), "trains": ("dawn", "noon", "dusk")}
MOST = 4


def prices(kind: str, city: str, day: int) -> dict[str, int]:
    """What each offer of a kind costs: whole numbers from 1 to 4, no two alike."""
    digest = hashlib.sha256(f"{kind} {city} {day}".encode()).digest()
    drawn = random.Random(digest).sample(range(1, MOST + 1), len(OFFERS[kind]))
    return dict(zip(OFFERS[kind], drawn, strict=True))


def offered(kind: str, city: str, day: int) -> str:
    """The offers as the tool tells them."""
    return " ".join(f"{name} {price}" for name, price in prices(kind, city, day).items())
