"""Drawing the sentences of `topics` without numba, with the same bits: for the embedded data set."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import chain
from math import sqrt

import numpy as np

from fedbandit.core.randomness import GOLDEN, scramble


def draw_users(  # type: ignore[no-untyped-def]
    keys,
    sizes,
    habits,
    tag_share,
    family_of,
    tag_order,
    family_start,
    tags_per_sentence,
    lengths,
    background,
    tag_words,
    tag_word_sums,
    family_words,
    family_word_sums,
    word_offsets,
    word_ids,
    word_values,
    tag_offsets,
    tag_ids,
):
    """As the compiled form, over lists, which Python reads faster than arrays."""
    family_loyalty, tag_loyalty, related, topicality_power, own_share = habits
    family_share = np.zeros(len(family_start) - 1)
    np.add.at(family_share, family_of, tag_share)
    families = _Choice(range(len(family_share)), family_share, family_loyalty)
    by_family = np.split(tag_order, family_start[1:-1])
    own_tags = [_Choice(part.tolist(), tag_share, tag_loyalty) for part in by_family]
    related_tags = [_Choice(part.tolist(), tag_share, 1.0) for part in by_family]
    any_tags = _Choice(tag_order.tolist(), tag_share, 1.0)
    nothing_seen = [0] * len(tag_share)
    numbers, lengths, background = _sums(tags_per_sentence), _sums(lengths), _sums(background)
    tag_words, tag_word_sums = tag_words.tolist(), _sums(tag_word_sums)
    family_words, family_word_sums = family_words.tolist(), _sums(family_word_sums)
    all_words: list[int] = []
    all_values: list[float] = []
    all_tags: list[int] = []
    example = 0
    for key, size in zip(keys, sizes.tolist(), strict=True):
        uniform = chain.from_iterable(_uniforms(key)).__next__
        family_counts, tag_counts = [0] * len(family_share), [0] * len(tag_share)
        for written in range(size):
            family = families.draw(uniform(), written, family_counts)
            first = own_tags[family].draw(uniform(), family_counts[family], tag_counts)
            family_counts[family] += 1
            tag_counts[first] += 1

            tags = [first]
            further = bisect_right(numbers, uniform())
            while len(tags) <= further:
                candidates = related_tags[family] if uniform() < related else any_tags
                tag = candidates.draw(uniform(), 0, nothing_seen)
                if tag not in tags:
                    tags.append(tag)

            topicality = uniform() ** topicality_power
            words: dict[int, int] = {}
            for _ in range(1 + bisect_right(lengths, uniform())):
                if uniform() >= topicality:
                    word = bisect_right(background, uniform())
                elif uniform() < own_share:
                    about = tags[int(uniform() * len(tags))]
                    word = tag_words[about][bisect_right(tag_word_sums, uniform())]
                else:
                    word = family_words[family][bisect_right(family_word_sums, uniform())]
                words[word] = words.get(word, 0) + 1
            norm = sqrt(sum([count * count for count in words.values()]))
            in_order = sorted(words)
            all_words += in_order
            all_values += [words[word] / norm for word in in_order]
            all_tags += tags
            example += 1
            word_offsets[example], tag_offsets[example] = len(all_words), len(all_tags)
    word_ids[: len(all_words)], word_values[: len(all_values)] = all_words, all_values
    tag_ids[: len(all_tags)] = all_tags


class _Choice:
    """Tags to draw from: earlier choices add to a tag's weight. Over many draws this is a Dirichlet
    preference.
    """

    def __init__(self, members: Iterable[int], share: np.ndarray, loyalty: float) -> None:
        self.members, self.loyalty = list(members), loyalty
        shares, total = share[self.members].tolist(), 0.0
        for one in shares:  # `sum` would round otherwise, from Python 3.12 on
            total += one
        self.weighted = [
            (tag, loyalty * one / total) for tag, one in zip(self.members, shares, strict=True)
        ]

    def draw(self, uniform: float, seen: int, counts: list[int]) -> int:
        """One of them; `counts` of each tag, of which these have been `seen` in all."""
        left = uniform * (self.loyalty + seen)
        for tag, weight in self.weighted:
            left -= weight + counts[tag]
            if left < 0:
                return tag
        return self.members[-1]


def _uniforms(key: np.uint64) -> Iterator[list[float]]:
    """The numbers in [0, 1) of the splitmix64 stream that begins at the key, some hundreds at a
    time.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is the point
        steps = GOLDEN * np.arange(1, 513, dtype=np.uint64)
        while True:
            states = key + steps
            yield ((scramble(states) >> np.uint64(11)) * 2.0**-53).tolist()
            key = states[-1]


def _sums(running: np.ndarray) -> list[float]:
    """Running sums for `bisect_right`, which then finds the first that is above a number, or else
    the last place.
    """
    sums: list[float] = running[:-1].tolist()
    return sums
