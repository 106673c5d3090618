"""`catalogue`: a shop's items with words and numbers, users with tastes, made from a seed.

Items are as unequally popular as in a real shop; new ones appear during the year and others vanish.
What users like depends on what the features say, in part by tastes that users share, so that an
item nobody has met can be scored. Made user by user, so that size changes nobody's data.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedbandit.core.errors import refuse
from fedbandit.core.progress import SILENT, ProgressReporter
from fedbandit.core.ragged import Ragged
from fedbandit.core.randomness import Purpose, generator
from fedbandit.data.dataset import Catalogue
from fedbandit.data.embedded.topics import cumulative, invent_words, zipf_mandelbrot
from fedbandit.data.encoder import Cells, Column, Encoder
from fedbandit.data.text import BagOfWords
from fedbandit.data.writer import DatasetWriter

_WORLD, _USER = 10, 11  # addresses of the random numbers
_CATEGORIES = ("books", "garden", "games", "kitchen", "music", "office", "sports", "toys")
_COUNTRIES = ("north", "east", "south", "west")
_WORDS = 240  # of titles: the first are said of anything, the others of one category each
_COMMON_WORDS = 40
_POPULARITY = 0.9  # exponent of Zipf's law
_FROM_THE_START = 0.6  # share of items; the others appear at any time of the year
_LIFETIME = 0.8  # years, on average
_LIKED = 0.2  # of the candidates, on average
_YEAR = 365 * 86_400.0
_FIRST_DAY = 1_704_067_200.0  # 2024-01-01, in seconds
_ITEMS = Encoder(
    (
        Column(name="category", kind="category", values=_CATEGORIES),
        Column(name="price", kind="number", log=True, mean=2.6, deviation=0.8),
        Column(name="stars", kind="number", mean=3.5, deviation=0.7),
    ),
    ("title",),
    _WORDS,
)
_USERS = Encoder(
    (
        Column(name="age", kind="number", mean=42.0, deviation=15.0),
        Column(name="country", kind="category", values=_COUNTRIES),
    )
)


@dataclass(frozen=True)
class _Shop:
    """All items: what is shown of each, how popular it is, and when it can be bought."""

    features: Ragged
    names: list[str]
    popularity: np.ndarray  # float64 [items]: running sums that end at 1
    since: np.ndarray  # float64 [items], in years
    until: np.ndarray
    traits: np.ndarray  # float64 [items, traits]: what tastes go by, told by the features
    hidden: np.ndarray  # float64 [items]: an appeal that no feature tells


def generate(
    out: Path,
    *,
    seed: int = 0,
    users: int = 1500,
    items: int = 2000,
    shown: int = 8,
    personal: float = 0.3,
    test_fraction: float = 0.2,
    progress: ProgressReporter = SILENT,
) -> Path:
    """Write the data set to the folder `out`: `users` to train on, `test_fraction` as many to test.

    Up to `shown` of `items` are candidates at a time. `personal` is the share of users' tastes that
    they do not have in common.
    """
    refuse(
        (
            not (items >= 4 * shown and shown >= 2 and users >= 1),
            "items: at least four times shown, with shown >= 2 and users >= 1",
        ),
        (
            not (0 <= personal <= 1 and 0 <= test_fraction <= 1),
            "personal: from 0 to 1, as test_fraction",
        ),
    )
    shop, tastes = _shop(seed, items)
    everybody = users + round(test_fraction * users)
    source = {
        "embedded": "catalogue", "seed": seed, "users": users, "items": items, "shown": shown,
        "personal": personal, "test_fraction": test_fraction,
    }  # fmt: skip
    with (
        DatasetWriter(
            out,
            name="catalogue",
            kind="sparse",
            shape=(_USERS.width,),
            multilabel=True,
            encoder=_USERS,
            catalogue=Catalogue(
                shop.features,
                np.array([name.encode() for name in shop.names], dtype=bytes),
                since=_FIRST_DAY + _YEAR * shop.since,
            ),
            item_encoder=_ITEMS,
            item_vocabulary=_vocabulary(),
            timed=True,
            source=source,
        ) as writer,
        progress.task("Drawing users", everybody, unit="users") as advance,
    ):
        for user in range(everybody):
            context, times, lists, liked = _user(seed, user, shop, tastes, shown, personal)
            writer.add_many(
                [f"user{user:06d}"] * len(times),
                context.take(np.zeros(len(times), np.int64)),
                Ragged.from_rows(liked),
                split="train" if user < users else "test",
                candidates=Ragged.from_rows(lists),
                times=_FIRST_DAY + _YEAR * times,
            )
            advance(1)
        return writer.finish(progress)


def _vocabulary() -> list[str]:
    """The words of titles: common ones first, then those of each category."""
    return invent_words(_WORDS, set(_CATEGORIES))


def _shop(seed: int, count: int) -> tuple[_Shop, np.ndarray]:
    """The items, and the tastes of each country and age: float64 [countries + 1, traits]."""
    rng = generator(seed, Purpose.DATA, _WORLD)
    words = _vocabulary()
    per_category = (_WORDS - _COMMON_WORDS) // len(_CATEGORIES)
    category = rng.choice(len(_CATEGORIES), count, p=rng.dirichlet(np.full(len(_CATEGORIES), 4.0)))
    log_price = rng.normal(2.6, 0.8, count) + np.linspace(-0.5, 0.5, len(_CATEGORIES))[category]
    stars = np.clip(rng.normal(3.5, 0.7, count), 1, 5).round(1)
    own = cumulative(zipf_mandelbrot(per_category))
    common = cumulative(zipf_mandelbrot(_COMMON_WORDS))
    titles, told = [], np.zeros((count, _WORDS))
    for item in range(count):
        said = rng.random((int(rng.integers(3, 7)), 2))
        first = _COMMON_WORDS + per_category * category[item]
        places = np.where(
            said[:, 0] < 0.3,
            np.searchsorted(common, said[:, 1], side="right"),
            first + np.searchsorted(own, said[:, 1], side="right"),
        )
        titles.append([words[place] for place in places])
        told[item, np.unique(places)] = 1 / np.sqrt(len(np.unique(places)))
    cells: dict[str, Cells] = {
        "category": [_CATEGORIES[one] for one in category],
        "price": np.exp(log_price),
        "stars": stars,
    }
    in_category = np.eye(len(_CATEGORIES))[category]
    numbers = np.stack([(log_price - 2.6) / 0.8, (stars - 3.5) / 0.7], axis=1)
    popularity = zipf_mandelbrot(count, 2.0, _POPULARITY)[rng.permutation(count)]
    appears = rng.random(count)
    since = np.where(rng.random(count) < _FROM_THE_START, 0.0, appears)
    shop = _Shop(
        _ITEMS.sparse(BagOfWords(words).encode(titles), cells),
        [f"{titles[item][0]}-{item:05d}" for item in range(count)],
        cumulative(popularity),
        since,
        since + 0.05 + rng.exponential(_LIFETIME, count),
        np.hstack([in_category, numbers, told]),
        0.4 * rng.standard_normal(count),
    )
    scale = np.array([0.9] * len(_CATEGORIES) + [0.5, 0.6] + [1.4] * _WORDS)
    return shop, rng.standard_normal((1 + len(_COUNTRIES), len(scale))) * scale


def _user(
    seed: int, user: int, shop: _Shop, tastes: np.ndarray, shown: int, personal: float
) -> tuple[Ragged, np.ndarray, list[list[int]], list[list[int]]]:
    """Context of a user, and of each visit its time, the items shown and those that were liked."""
    rng = generator(seed, Purpose.DATA, _USER, user)
    age, country = float(rng.normal(42, 15)), int(rng.integers(len(_COUNTRIES)))
    common = tastes[1 + country] + np.clip((age - 42) / 15, -2, 2) * tastes[0]
    own = rng.standard_normal(tastes.shape[1]) * tastes.std(axis=0) * np.sqrt(2)
    taste = np.sqrt(1 - personal) * common + np.sqrt(personal) * own
    visits = 4 + int(rng.lognormal(2.8, 0.8))
    times = np.sort(rng.random(visits))
    lists, liked = [], []
    for now in times.tolist():
        size = int(rng.integers(max(2, shown // 2), shown + 1))
        listed = _listed(rng, shop, now, size)
        appeal = shop.traits[listed] @ taste + shop.hidden[listed]
        likes = rng.random(size) < 1 / (1 + np.exp(np.log((1 - _LIKED) / _LIKED) - appeal))
        lists.append(listed.tolist())
        liked.append(np.flatnonzero(likes).tolist())
    cells: dict[str, Cells] = {"age": np.array([age]), "country": [_COUNTRIES[country]]}
    return _USERS.sparse(None, cells), times, lists, liked


def _listed(rng: np.random.Generator, shop: _Shop, now: float, size: int) -> np.ndarray:
    """Different items that can be bought now, the popular ones more often: int64 [size]."""
    found, tries = np.empty(0, np.int64), 0
    while len(found) < size:
        drawn = np.searchsorted(shop.popularity, rng.random(4 * size), side="right")
        alive = (shop.since[drawn] <= now) & (now < shop.until[drawn])
        found = np.concatenate([found, drawn[alive | (tries > 100)]])  # a tiny shop is never empty
        tries += 1
        _, first = np.unique(found, return_index=True)
        found = found[np.sort(first)]
    return found[:size]
