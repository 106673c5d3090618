"""The made-up language of the topics data set: tags in families, words, and how likely each word is where.

Tables only, all derived from the sizes and the seed; nothing here knows of users or sentences.
"""

from dataclasses import dataclass

import numpy as np

from fedbandit.core.randomness import Purpose, generator

_FAMILIES = (
    ("quillscript", "quill-dom", "quill-forms", "quill-charts", "sprig"),
    ("ferrolang", "ferro-web", "ferro-query", "ferro-desktop", "ferro-cloud", "ferro-tests"),
    ("javelin", "javelin-server", "javelin-beans", "javelin-build", "javelin-ui"),
    ("pollen", "pollen-arrays", "pollen-web", "pollen-plots"),
    ("tidal-db", "query-plans", "stored-calls", "indexing", "replication"),
    ("pagecraft", "stylesheets", "layouts", "browsers", "animations", "page-forms"),
    ("handset", "handset-views", "handset-maps", "push-messages"),
    ("orchard", "orchard-views", "orchard-store", "touch-input"),
    ("c-minus", "memory", "linking", "templates-x", "threads"),
    ("shell", "patterns", "revisions", "packaging", "scheduling", "text-files"),
)
TAG_SKEW, TAG_SHIFT = 0.85, 0.5  # share of the tag of rank r is proportional to (r + shift)^-skew
WORD_SKEW, WORD_SHIFT = 1.15, 2.0  # the same law for the background frequency of words
_FUNCTION_WORDS = 100  # the most frequent words say nothing about tags
_ONSETS = [
    "b",
    "br",
    "c",
    "ch",
    "d",
    "dr",
    "f",
    "fl",
    "g",
    "gr",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "pl",
    "qu",
    "r",
    "s",
    "st",
    "sh",
    "t",
    "tr",
    "v",
    "w",
    "y",
    "z",
]
_VOWELS = ["a", "e", "i", "o", "u", "ai", "ea", "ee", "oa", "ou"]
_CODAS = ("", "", "", "n", "r", "s", "t", "l", "m", "ck", "nd", "rt")


@dataclass(frozen=True)
class Language:
    """Everything the sentences are drawn from. Word ids are sorted by expected frequency, most frequent first."""

    vocabulary: list[str]
    tags: list[str]
    tag_share: np.ndarray  # float64 [tags]: how often each is the first tag of a sentence
    family: np.ndarray  # int32 [tags]
    background: np.ndarray  # float64 [words]: cumulative distribution of words that say nothing about the tags
    tag_words: np.ndarray  # int32 [tags, n]: a tag's own words, most telling first; the first is its name
    family_words: np.ndarray  # int32 [families, m]: words that related tags share


def make_language(
    seed: int, words: int, words_per_tag: int, words_per_family: int, topical: float, own: float
) -> Language:
    """The language of one seed; `topical` and `own` are the shares that decide how frequent each word is overall."""
    rng = generator(seed, Purpose.DATA, 0)
    families = len(_FAMILIES)
    names = [(tag, family) for family, members in enumerate(_FAMILIES) for tag in members]
    order = _popularity_order(rng, names)
    tags = [names[i][0] for i in order]
    family = np.array([names[i][1] for i in order], np.int32)
    tag_share = zipf_mandelbrot(len(tags), TAG_SHIFT, TAG_SKEW)
    frequency = zipf_mandelbrot(words, WORD_SHIFT, WORD_SKEW)

    name_words = rng.choice(np.arange(_FUNCTION_WORDS, words // 2), len(tags), replace=False)
    others = np.setdiff1d(np.arange(_FUNCTION_WORDS, words), name_words)
    tag_words = np.stack([rng.choice(others, words_per_tag, replace=False) for _ in tags])
    tag_words[:, 0] = name_words
    family_words = np.stack([rng.choice(others, words_per_family, replace=False) for _ in range(families)])

    overall = (1 - topical) * frequency
    np.add.at(overall, tag_words, topical * own * tag_share[:, None] * zipf_mandelbrot(words_per_tag))
    family_share = np.bincount(family, tag_share)
    np.add.at(overall, family_words, topical * (1 - own) * family_share[:, None] * zipf_mandelbrot(words_per_family))
    by_frequency = np.argsort(-overall, kind="stable")
    new_id = np.empty(words, np.int32)
    new_id[by_frequency] = np.arange(words, dtype=np.int32)

    vocabulary = _invent_words(words, set(tags))
    for tag, word in enumerate(new_id[name_words]):
        vocabulary[word] = tags[tag]
    return Language(
        vocabulary,
        tags,
        tag_share,
        family,
        cumulative(frequency[by_frequency]),
        new_id[tag_words],
        new_id[family_words],
    )


def zipf_mandelbrot(n: int, shift: float = 0.0, skew: float = 1.0) -> np.ndarray:
    """Probabilities proportional to (rank + shift)^-skew: float64 [n]."""
    weights = (np.arange(1, n + 1) + shift) ** -skew
    shares: np.ndarray = weights / weights.sum()
    return shares


def cumulative(probabilities: np.ndarray) -> np.ndarray:
    """Running sums whose last entry is exactly 1, so that a uniform draw below 1 always finds a place."""
    sums = np.cumsum(probabilities)
    sums[-1] = 1.0
    return sums


def _popularity_order(rng: np.random.Generator, names: list[tuple[str, int]]) -> np.ndarray:
    """Families are led by a language and followed by its libraries: heads first, the rest shuffled behind them."""
    heads = [i for i, (tag, family) in enumerate(names) if tag == _FAMILIES[family][0]]
    rest = [i for i in range(len(names)) if i not in heads]
    return np.concatenate([rng.permutation(heads), rng.permutation(rest)])


def _invent_words(count: int, taken: set[str]) -> list[str]:
    """Readable words in a fixed order, shorter ones first, as frequent words are shorter in every language."""
    rng = np.random.Generator(np.random.Philox(key=1))  # the same words for every seed
    words: list[str] = []
    seen = set(taken)
    while len(words) < count:
        rank = len(words)
        syllables = 1 + (rank >= 150) + (rank >= 2500)
        word = "".join(
            _ONSETS[rng.integers(len(_ONSETS))]
            + _VOWELS[rng.integers(len(_VOWELS))]
            + _CODAS[rng.integers(len(_CODAS))]
            for _ in range(syllables)
        )
        if word not in seen:
            seen.add(word)
            words.append(word)
    return words
