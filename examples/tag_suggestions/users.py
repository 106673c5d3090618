"""Synthetic users: each writes about what they care for, and uses a suggested tag when it is the right one."""

import random
from dataclasses import dataclass

TOPICS = {
    "cooking": "recipe oven flour butter dinner spice soup knife pan salt",
    "travel": "flight hotel train passport beach map luggage ticket island tour",
    "music": "song guitar concert album drum melody band piano chorus singer",
    "garden": "soil seed tomato water sun weed flower hedge compost rose",
    "money": "bank rent tax salary loan budget price saving bill invoice",
    "health": "doctor sleep run pulse vitamin gym diet pain rest clinic",
}
TAGS = tuple(TOPICS)
FILLER = ("the", "a", "my", "for", "with", "again", "today", "new", "some", "about")
VOCABULARY = tuple(
    sorted({word for words in TOPICS.values() for word in words.split()} | set(FILLER))
)


@dataclass(frozen=True)
class User:
    """Somebody with tastes: how often they write about each topic."""

    number: int

    def tastes(self) -> list[float]:
        """Two favourite topics, and now and then any other."""
        favourites = {self.number % len(TAGS), (self.number * 2 + 1) % len(TAGS)}
        return [5.0 if i in favourites else 1.0 for i in range(len(TAGS))]

    def write(self, chance: random.Random) -> tuple[str, str]:
        """A sentence, and the tag that they would use for it."""
        tag = chance.choices(TAGS, self.tastes())[0]
        words = chance.sample(TOPICS[tag].split(), 3) + chance.sample(FILLER, 3)
        chance.shuffle(words)
        return " ".join(words), tag
