"""The embedded text data set: users who write short tagged sentences about what they care for, made from a seed.

Users are drawn one by one from random numbers of their own, in blocks, so any number of them fits in memory.
The statistics and where they come from are in docs/embedded-data.md; nothing here knows of policies or models.
"""

from pathlib import Path

import numpy as np

from fedbandit.data import topic_sentences
from fedbandit.data.ragged import Ragged
from fedbandit.data.topic_words import Language, make_language
from fedbandit.data.writer import DatasetWriter
from fedbandit.errors import ConfigError
from fedbandit.randomness import Purpose, bits, uniforms

_SIZE_MEDIAN, _SIZE_SPREAD, _SIZE_MAX = 17.0, 1.04, 500  # sentences per user: log-normal, cut off at the top
_WORDS_PER_TAG, _WORDS_PER_FAMILY = 200, 400
_USER_KEYS, _USER_SIZES = 1, 2  # addresses of the random numbers; 0 is the language


def generate(
    out: Path, *, seed: int = 0, users: int = 2000, words: int = 10_000, test_fraction: float = 0.2, block: int = 4096
) -> Path:
    """Write the data set to the folder `out`: `users` to train on and `test_fraction` as many more to test on.

    Memory grows with `block`, the number of users drawn at a time; the result does not depend on it.
    """
    if users < 1 or block < 1:
        raise ConfigError(f"users: must be at least 1, and so must block; got {users} and {block}")
    if words < 1000:
        raise ConfigError(f"words: must be at least 1000, got {words}")
    if not 0 <= test_fraction <= 1:
        raise ConfigError(f"test_fraction: must be between 0 and 1, got {test_fraction}")
    language = make_language(
        seed, words, _WORDS_PER_TAG, _WORDS_PER_FAMILY, topic_sentences.MEAN_TOPICALITY, topic_sentences.OWN_SHARE
    )
    everybody = users + round(test_fraction * users)
    with DatasetWriter(
        out,
        name="topics",
        kind="sparse",
        shape=(words,),
        actions=language.tags,
        multilabel=True,
        vocabulary=language.vocabulary,
        source={"embedded": "topics", "seed": seed, "users": users, "words": words, "test_fraction": test_fraction},
    ) as writer:
        for split, first, last in (("train", 0, users), ("test", users, everybody)):
            for start in range(first, last, block):
                who = np.arange(start, min(start + block, last))
                ids, sentences, labels = _draw(seed, who, language)
                writer.add_many(ids, sentences, labels, split=split)
        return writer.finish()


def _draw(seed: int, users: np.ndarray, language: Language) -> tuple[np.ndarray, Ragged, Ragged]:
    """All sentences of the given users: the user's id for each, its words, its tags."""
    sizes = _sizes(seed, users)
    keys = bits(seed, Purpose.DATA, _USER_KEYS, users)
    sentences, labels = topic_sentences.draw(keys, sizes, language)
    ids = np.array([f"user{user:07d}" for user in users])
    return np.repeat(ids, sizes), sentences, labels


def _sizes(seed: int, users: np.ndarray) -> np.ndarray:
    """How many sentences each user writes: a few, with a long tail."""
    u, v = (uniforms(seed, Purpose.DATA, _USER_SIZES, users, part) for part in (0, 1))
    normal = np.sqrt(-2 * np.log1p(-u)) * np.cos(2 * np.pi * v)
    return np.clip(np.rint(_SIZE_MEDIAN * np.exp(_SIZE_SPREAD * normal)), 1, _SIZE_MAX).astype(np.int64)
