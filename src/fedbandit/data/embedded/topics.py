"""`topics`: short texts with tags by synthetic users, each with own preferences, made from
a seed.

The language is made up: tags in families, words, and how likely each word is where.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedbandit.core.errors import ConfigError, refuse
from fedbandit.core.progress import SILENT, ProgressReporter
from fedbandit.core.ragged import Ragged
from fedbandit.core.randomness import GOLDEN, Purpose, bits, generator, scramble, uniforms
from fedbandit.data.text import count_words
from fedbandit.data.writer import DatasetWriter

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


TAG_SHIFT = 0.5  # share of the tag of rank r is proportional to (r + shift)^-skew


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
    """Everything the sentences are drawn from. Word ids are sorted by expected frequency, most
    frequent first.
    """

    vocabulary: list[str]
    tags: list[str]
    tag_share: np.ndarray  # float64 [tags]: how often each is the first tag of a sentence
    family: np.ndarray  # int32 [tags]
    background: (
        np.ndarray
    )  # float64 [words]: cumulative distribution of words that say nothing about the tags
    tag_words: (
        np.ndarray
    )  # int32 [tags, n]: a tag's own words, most telling first; the first is its name
    family_words: np.ndarray  # int32 [families, m]: words that related tags share


def make_language(
    seed: int,
    words: int,
    words_per_tag: int,
    words_per_family: int,
    topical: float,
    own: float,
    tag_skew: float,
) -> Language:
    """The language of one seed: tags in families, words, and which words speak for which tag.

    Tags have `words_per_tag` words of their own, families `words_per_family` that their tags share;
    the most frequent words belong to none. `topical` and `own` are the shares of topical words, and
    of the tag's own among these, which decide how frequent each word is overall: words are numbered
    by it, as in a vocabulary that was counted.
    """
    rng = generator(seed, Purpose.DATA, 0)
    families = len(_FAMILIES)
    names = [(tag, family) for family, members in enumerate(_FAMILIES) for tag in members]
    order = _popularity_order(rng, names)
    tags = [names[i][0] for i in order]
    family = np.array([names[i][1] for i in order], np.int32)
    tag_share = zipf_mandelbrot(len(tags), TAG_SHIFT, tag_skew)
    frequency = zipf_mandelbrot(words, WORD_SHIFT, WORD_SKEW)

    name_words = rng.choice(np.arange(_FUNCTION_WORDS, words // 2), len(tags), replace=False)
    others = np.setdiff1d(np.arange(_FUNCTION_WORDS, words), name_words)
    tag_words = np.stack([rng.choice(others, words_per_tag, replace=False) for _ in tags])
    tag_words[:, 0] = name_words
    family_words = np.stack(
        [rng.choice(others, words_per_family, replace=False) for _ in range(families)]
    )

    overall = (1 - topical) * frequency
    np.add.at(
        overall, tag_words, topical * own * tag_share[:, None] * zipf_mandelbrot(words_per_tag)
    )
    family_share = np.bincount(family, tag_share)
    np.add.at(
        overall,
        family_words,
        topical * (1 - own) * family_share[:, None] * zipf_mandelbrot(words_per_family),
    )
    by_frequency = np.argsort(-overall, kind="stable")
    new_id = np.empty(words, np.int32)
    new_id[by_frequency] = np.arange(words, dtype=np.int32)

    vocabulary = invent_words(words, set(tags))
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
    return _shares((np.arange(1, n + 1) + shift) ** -skew)


def _shares(weights: np.ndarray) -> np.ndarray:
    """Weights over their sum."""
    return np.asarray(weights / weights.sum())


def cumulative(probabilities: np.ndarray) -> np.ndarray:
    """Running sums whose last entry is exactly 1, so that a uniform draw below 1 always finds a
    place.
    """
    sums = np.cumsum(probabilities)
    sums[-1] = 1.0
    return sums


def _popularity_order(rng: np.random.Generator, names: list[tuple[str, int]]) -> np.ndarray:
    """Families are led by a language and followed by its libraries: heads first, the rest shuffled
    behind them.
    """
    heads = [i for i, (tag, family) in enumerate(names) if tag == _FAMILIES[family][0]]
    rest = [i for i in range(len(names)) if i not in heads]
    return np.concatenate([rng.permutation(heads), rng.permutation(rest)])


def invent_words(count: int, taken: set[str]) -> list[str]:
    """Readable words in a fixed order, shorter ones first, as frequent words are shorter in every
    language.
    """
    syllables = _syllables(
        np.random.Generator(np.random.Philox(key=1))
    )  # the same words for every seed
    words: list[str] = []
    seen = set(taken)
    while len(words) < count:
        rank = len(words)
        word = "".join([next(syllables) for _ in range(1 + (rank >= 150) + (rank >= 2500))])
        if word not in seen:
            seen.add(word)
            words.append(word)
    return words


def _syllables(rng: np.random.Generator) -> Iterator[str]:
    """One after the other, drawn some thousands at a time, which takes a tenth of the time."""
    parts = (_ONSETS, _VOWELS, _CODAS)
    while True:
        for onset, vowel, coda in rng.integers(
            [len(part) for part in parts], size=(4096, 3)
        ).tolist():
            yield _ONSETS[onset] + _VOWELS[vowel] + _CODAS[coda]


TOPICALITY_POWER = (
    1.6  # a sentence's share of topical words is u^power, u uniform: many sentences say little
)


MEAN_TOPICALITY = 1 / (TOPICALITY_POWER + 1)


OWN_SHARE = 0.6  # of the topical words, how many belong to the tag itself rather than to its family


_TAGS_PER_SENTENCE = (0.65, 0.28, 0.07)  # probabilities of one, two and three tags


_RELATED = 0.7  # a further tag comes from the family of the first this often, else from anywhere


_FAMILY_LOYALTY, _TAG_LOYALTY = (
    1.5,
    1.5,
)  # the smaller, the more a user repeats earlier families and tags


_MEAN_LENGTH, _LENGTH_SPREAD, _MAX_LENGTH = 9.3, 3.7, 30  # words per sentence


@dataclass(frozen=True)
class _Choices:
    """Lists to draw from; earlier choices add to the weight of a member.

    Over many draws this is a Dirichlet preference. Shorter lists are filled up with number K of K
    members, which weighs nothing.
    """

    members: np.ndarray  # int64 [lists, longest]
    weights: np.ndarray  # float64 [lists, longest]: of members that were never chosen before
    last: np.ndarray  # int64 [lists]
    loyalty: float  # the sum of a list's weights

    @classmethod
    def of(cls, lists: list[np.ndarray], share: np.ndarray, loyalty: float) -> "_Choices":
        """Members of the lists, weighted by their shares."""
        shape = len(lists), max(map(len, lists))
        members, weights = np.full(shape, len(share)), np.zeros(shape)
        for row, listed in enumerate(lists):
            total = np.cumsum(share[listed])[-1]  # added one by one, which `sum` does not promise
            members[row, : len(listed)] = listed
            weights[row, : len(listed)] = loyalty * share[listed] / total
        return cls(members, weights, np.array([listed[-1] for listed in lists]), loyalty)

    def draw(
        self, lists: np.ndarray, uniform: np.ndarray, counts: np.ndarray | None = None
    ) -> np.ndarray:
        """A member of each list, int64 [n]; `counts` float64 [n, K + 1] are earlier choices."""
        members, weights, total = self.members[lists], self.weights[lists], self.loyalty
        if counts is not None:
            seen = np.take_along_axis(counts, members, axis=1)
            weights, total = weights + seen, total + seen.sum(axis=1)
        steps = np.column_stack([uniform * total, weights])
        passed = np.subtract.accumulate(steps, axis=1)[:, 1:] < 0
        chosen = members[np.arange(len(members)), passed.argmax(axis=1)]
        return np.asarray(np.where(passed.any(axis=1), chosen, self.last[lists]))


def draw(keys: np.ndarray, sizes: np.ndarray, language: Language) -> tuple[Ragged, Ragged]:
    """Sentences as L2-normalised word counts and their tags, user after user; `keys` are 64 random
    bits per user.

    Everybody's first sentence is drawn, then everybody's second, and so on. Each user has a
    splitmix64 stream, so that nothing depends on who else is drawn.
    """
    states, first_row, examples = keys.copy(), np.cumsum(sizes) - sizes, int(sizes.sum())

    def uniform(who: np.ndarray) -> np.ndarray:
        """The next number in [0, 1) of the streams of these users."""
        states[who] += GOLDEN
        return _as_uniforms(states[who])

    by_family = [np.flatnonzero(language.family == one) for one in np.unique(language.family)]
    any_tag = len(by_family)  # the list of all tags, behind those of the families
    family_share = np.bincount(language.family, language.tag_share)
    families = _Choices.of([np.arange(len(by_family))], family_share, _FAMILY_LOYALTY)
    own_tags = _Choices.of(by_family, language.tag_share, _TAG_LOYALTY)
    lists = [*by_family, np.concatenate(by_family)]
    further_tags = _Choices.of(lists, language.tag_share, 1.0)
    number_sums, length_sums = _sums(np.array(_TAGS_PER_SENTENCE)), _sums(_length_distribution())
    tag_sums = _sums(zipf_mandelbrot(language.tag_words.shape[1]))
    family_sums = _sums(zipf_mandelbrot(language.family_words.shape[1]))
    family_counts = np.zeros((len(sizes), len(family_share) + 1))
    tag_counts = np.zeros((len(sizes), len(language.tags) + 1))
    tags = np.full((examples, len(_TAGS_PER_SENTENCE)), -1, np.int32)
    said: list[tuple[np.ndarray, np.ndarray]] = []  # sentences, and a word of each
    for written in range(int(sizes.max(initial=0))):
        who = np.flatnonzero(sizes > written)
        rows = first_row[who] + written
        family = families.draw(np.zeros_like(who), uniform(who), family_counts[who])
        tags[rows, 0] = first = own_tags.draw(family, uniform(who), tag_counts[who])
        family_counts[who, family] += 1
        tag_counts[who, first] += 1

        wanted = 1 + np.searchsorted(number_sums, uniform(who), side="right")
        count = np.ones_like(wanted)
        while len(at := np.flatnonzero(count < wanted)):
            related = uniform(who[at]) < _RELATED
            tag = further_tags.draw(np.where(related, family[at], any_tag), uniform(who[at]))
            new = (tags[rows[at]] != tag[:, None]).all(axis=1)
            tags[rows[at[new]], count[at[new]]] = tag[new]
            count[at[new]] += 1

        # Python's own power: numpy's differs in the last bit between processors.
        topicality = np.array([u**TOPICALITY_POWER for u in uniform(who).tolist()])
        length = 1 + np.searchsorted(length_sums, uniform(who), side="right")
        longest_first = np.argsort(-length, kind="stable")
        who, rows, family, count, topicality, length = (
            each[longest_first] for each in (who, rows, family, count, topicality, length)
        )
        now = states[who]
        for n in np.cumsum(np.bincount(length)[::-1])[-2::-1]:  # sentences with one more word
            u = _as_uniforms(now[:n, None] + GOLDEN * np.arange(1, 5, dtype=np.uint64))
            topical, own = u[:, 0] < topicality[:n], u[:, 1] < OWN_SHARE
            about = tags[rows[:n], (u[:, 2] * count[:n]).astype(np.int64)]
            of_tag = language.tag_words[about, np.searchsorted(tag_sums, u[:, 3], side="right")]
            place = np.searchsorted(family_sums, u[:, 2], side="right")
            of_family = language.family_words[family[:n], place]
            of_any = np.searchsorted(language.background[:-1], u[:, 1], side="right")
            word = np.where(topical, np.where(own, of_tag, of_family), of_any)
            said.append((rows[:n], word))
            now[:n] += GOLDEN * (2 + topical * (1 + own)).astype(np.uint64)  # numbers it has used
        states[who] = now
    rows, words = (np.concatenate(parts) for parts in zip(*said, strict=True))
    order = np.argsort(rows, kind="stable")
    offsets = np.searchsorted(rows[order], np.arange(examples + 1))
    given = tags >= 0
    labels = Ragged(np.concatenate([[0], np.cumsum(given.sum(axis=1))]), tags[given])
    return count_words(offsets, words[order].astype(np.int32), len(language.vocabulary)), labels


def _as_uniforms(states: np.ndarray) -> np.ndarray:
    """The float64 in [0, 1) at these positions of splitmix64 streams."""
    return (scramble(states) >> np.uint64(11)) * 2.0**-53


def _sums(probabilities: np.ndarray) -> np.ndarray:
    """Running sums without the last: a search finds the first above a number, else the last place."""
    return cumulative(probabilities)[:-1]


def _length_distribution() -> np.ndarray:
    """Probabilities of 1, 2, … words: a normal bell on a logarithmic axis, cut off at the longest
    sentence.
    """
    lengths = np.arange(1, _MAX_LENGTH + 1)
    variance = np.log(1 + (_LENGTH_SPREAD / _MEAN_LENGTH) ** 2)
    centre = np.log(_MEAN_LENGTH) - variance / 2
    return _shares(np.exp(-((np.log(lengths) - centre) ** 2) / (2 * variance)) / lengths)


@dataclass(frozen=True)
class Shape:
    """Sizes of users and skew of tags: how much users write, and how unequal tags are: `least`
    sentences and a log-normal number more, up to `most`.
    """

    least: int
    median: float
    spread: float
    most: int
    tag_skew: float
    test_fraction: float  # test users for every training user
    block: int  # users drawn at a time: about 400,000 sentences


# "stackoverflow": users of the published data have at least 100 sentences and 397 on average, of which a run uses at
# most 256, so no more are made; its most frequent tag is 4.88 times as frequent as its 50th. The first one is the
# embedded data set, much smaller and more unequal.
SHAPES = {
    "topics": Shape(
        least=0, median=17.0, spread=1.04, most=500, tag_skew=0.85, test_fraction=0.2, block=16_384
    ),
    "stackoverflow": Shape(
        least=100, median=82.6, spread=1.6, most=256, tag_skew=0.492, test_fraction=0.01, block=2048
    ),
}


_WORDS_PER_TAG, _WORDS_PER_FAMILY = 200, 400


_USER_KEYS, _USER_SIZES = 1, 2  # addresses of the random numbers; 0 is the language


def generate(
    out: Path,
    *,
    seed: int = 0,
    users: int = 2000,
    words: int = 10_000,
    test_fraction: float | None = None,
    like: str = "topics",
    block: int | None = None,
    progress: ProgressReporter = SILENT,
) -> Path:
    """Write the data set to the folder `out`: `users` to train on and `test_fraction` as many more
    to test on.

    `like` names the shape of the population. Memory grows with `block`, the number of users drawn
    at a time, and with a few bytes a user; the result does not depend on it.
    """
    if like not in SHAPES:
        raise ConfigError(f"like: should be {' or '.join(SHAPES)}, not {like!r}")
    shape = SHAPES[like]
    test_fraction = shape.test_fraction if test_fraction is None else test_fraction
    block = shape.block if block is None else block
    refuse(
        (users < 1, f"users: must be at least 1, got {users}"),
        (block < 1, f"block: must be at least 1, got {block}"),
        (words < 1000, f"words: must be at least 1000, got {words}"),
        (not 0 <= test_fraction <= 1, f"test_fraction: must be from 0 to 1, got {test_fraction}"),
    )
    language = make_language(
        seed, words, _WORDS_PER_TAG, _WORDS_PER_FAMILY, MEAN_TOPICALITY, OWN_SHARE, shape.tag_skew
    )
    everybody = users + round(test_fraction * users)
    source = {
        "embedded": "topics",
        "seed": seed,
        "users": users,
        "words": words,
        "test_fraction": test_fraction,
    }
    with DatasetWriter(
        out,
        name="topics" if like == "topics" else f"topics-like-{like}",
        kind="sparse",
        shape=(words,),
        actions=language.tags,
        multilabel=True,
        vocabulary=language.vocabulary,
        source=source if like == "topics" else {**source, "like": like},
    ) as writer:
        with progress.task("Drawing users", everybody, unit="users") as advance:
            for split, first, last in (("train", 0, users), ("test", users, everybody)):
                for start in range(first, last, block):
                    who = np.arange(start, min(start + block, last))
                    sizes = _sizes(seed, who, shape)
                    ids = np.repeat(np.array([f"user{user:07d}" for user in who]), sizes)
                    keys = bits(seed, Purpose.DATA, _USER_KEYS, who)
                    writer.add_many(ids, *draw(keys, sizes, language), split=split)
                    advance(len(who))
        return writer.finish(progress)


def _sizes(seed: int, users: np.ndarray, shape: Shape) -> np.ndarray:
    """Sentences of each user, int64 [users]: a few, with a long tail."""
    u, v = (uniforms(seed, Purpose.DATA, _USER_SIZES, users, part) for part in (0, 1))
    normal = np.sqrt(-2 * np.log1p(-u)) * np.cos(2 * np.pi * v)
    more = np.rint(shape.median * np.exp(shape.spread * normal))
    return np.asarray(np.clip(shape.least + more, 1, shape.most), np.int64)
