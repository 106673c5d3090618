"""`gallery`: each user has pictures of their own and is shown some of them; which one to feature?

The paper's first example. A picture is an embedding, as a fixed encoder on the device would give
it. Users like pictures by a taste that they share in part; a picture taken later can be shown only
from then on. Made from a seed, client by client, so that size changes nobody's data.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedbandit.core.errors import refuse
from fedbandit.core.progress import SILENT, ProgressReporter
from fedbandit.core.ragged import Ragged
from fedbandit.core.randomness import Purpose, generator
from fedbandit.data.dataset import Catalogue
from fedbandit.data.writer import DatasetWriter

_WORLD, _USER = 0, 1  # addresses of the random numbers
_SUBJECTS = 12  # people, food, mountains, ...: centres that embeddings gather around
_TRAITS = 6  # what is known of a user beside the pictures: age group, season, ...
_LIKED = 0.25  # of the pictures, on average over everybody


@dataclass(frozen=True)
class _Pictures:
    """Pictures of one user in the order they were taken, and how well the user likes each."""

    embeddings: np.ndarray  # float32 [pictures, dimension]
    liking: np.ndarray  # float64 [pictures]: the probability of a like


def generate(
    out: Path,
    *,
    seed: int = 0,
    users: int = 1000,
    dimension: int = 16,
    shown: int = 8,
    personal: float = 0.5,
    test_fraction: float = 0.2,
    progress: ProgressReporter = SILENT,
) -> Path:
    """Write the data set to the folder `out`: `users` to train on and `test_fraction` as many to test on.

    `dimension` numbers describe a picture (at most 64), up to `shown` of them are candidates at a
    time. `personal` is the share of users' tastes that they do not have in common: 0 is a world
    that one model can learn, 1 is one where nothing is shared.
    """
    refuse(
        (
            not (1 <= dimension <= 64 and shown >= 2 and users >= 1),
            "dimension: 1 to 64, with shown >= 2 and users >= 1",
        ),
        (
            not (0 <= personal <= 1 and 0 <= test_fraction <= 1),
            "personal: from 0 to 1, as test_fraction",
        ),
    )
    rng = generator(seed, Purpose.DATA, _WORLD)
    subjects = rng.standard_normal((_SUBJECTS, dimension))
    common = rng.standard_normal((1 + _TRAITS, dimension)) / np.sqrt(dimension)
    everybody = users + round(test_fraction * users)
    world = [_user(seed, user, subjects, common, shown, personal) for user in range(everybody)]
    starts = np.cumsum([0, *(len(pictures.embeddings) for _, pictures, _ in world)])
    source = {
        "embedded": "gallery", "seed": seed, "users": users, "dimension": dimension,
        "shown": shown, "personal": personal, "test_fraction": test_fraction,
    }  # fmt: skip
    with (
        DatasetWriter(
            out,
            name="gallery",
            kind="dense",
            shape=(_TRAITS,),
            multilabel=True,
            catalogue=Catalogue(np.concatenate([p.embeddings for _, p, _ in world])),
            source=source,
        ) as writer,
        progress.task("Taking pictures", everybody) as advance,
    ):
        for user, (traits, _, visits) in enumerate(world):
            candidates, labels = zip(*visits, strict=True)
            writer.add_many(
                [f"user{user:06d}"] * len(visits),
                np.repeat(traits[None].astype(np.float32), len(visits), axis=0),
                Ragged.from_rows([list(row) for row in labels]),
                split="train" if user < users else "test",
                candidates=Ragged.from_rows([list(starts[user] + row) for row in candidates]),
            )
            advance(1)
        return writer.finish(progress)


def _user(
    seed: int, user: int, subjects: np.ndarray, common: np.ndarray, shown: int, personal: float
) -> tuple[np.ndarray, _Pictures, list[tuple[np.ndarray, np.ndarray]]]:
    """Traits of a user, their pictures, and for each visit which were shown and liked (by place)."""
    rng = generator(seed, Purpose.DATA, _USER, user)
    traits = rng.standard_normal(_TRAITS)
    shared = common[0] + (traits @ common[1:]) / np.sqrt(_TRAITS)
    own = rng.standard_normal(subjects.shape[1]) / np.sqrt(subjects.shape[1]) * np.sqrt(2)
    taste = np.sqrt(1 - personal) * shared + np.sqrt(personal) * own
    count = shown + int(rng.lognormal(3.0, 0.7))
    favourites = rng.dirichlet(np.full(len(subjects), 0.4))
    centres = subjects[rng.choice(len(subjects), count, p=favourites)]
    embeddings = centres + 0.7 * rng.standard_normal(centres.shape)
    appeal = 2.0 * (embeddings @ taste)
    liking = 1 / (1 + np.exp(-(appeal - np.log((1 - _LIKED) / _LIKED))))
    pictures = _Pictures(embeddings.astype(np.float32), liking)
    return traits, pictures, list(_visits(rng, pictures, shown))


def _visits(
    rng: np.random.Generator, pictures: _Pictures, shown: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """A visit after every few pictures, with older ones more rarely shown than new ones."""
    count = len(pictures.liking)
    for taken in np.sort(rng.integers(shown, count + 1, max(4, count // 2))):
        age = taken - np.arange(taken)
        weights = 1 / (5.0 + age)
        size = int(rng.integers(max(2, shown // 2), shown + 1))
        listed = rng.choice(taken, size, replace=False, p=weights / weights.sum())
        liked = np.flatnonzero(rng.random(size) < pictures.liking[listed])
        yield listed, liked
