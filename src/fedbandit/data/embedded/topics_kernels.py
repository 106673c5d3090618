"""Drawing the sentences of `topics`, compiled: for many users."""

import numba
import numpy as np

import fedbandit.core.kernels  # noqa: F401 - loads numba without scipy
from fedbandit.core.randomness import GOLDEN, scramble

_scramble = numba.njit(nogil=True, cache=True, inline="always")(scramble)


@numba.njit(nogil=True, cache=True)
def _uniform(state):  # type: ignore[no-untyped-def]
    """The next number in [0, 1) of the splitmix64 stream whose position stands in `state[0]`."""
    state[0] += GOLDEN
    return (_scramble(state[0]) >> np.uint64(11)) * 2.0**-53


@numba.njit(nogil=True, cache=True)
def _find(sums, u):  # type: ignore[no-untyped-def]
    """The first place whose running sum is above `u`."""
    low, high = 0, len(sums) - 1
    while low < high:
        middle = (low + high) // 2
        if sums[middle] > u:
            high = middle
        else:
            low = middle + 1
    return low


@numba.njit(nogil=True, cache=True)
def _draw_tag(state, members, share, loyalty, counts):  # type: ignore[no-untyped-def]
    """One of `members`: earlier choices add to its weight. Over many draws this is a Dirichlet
    preference.
    """
    total, seen = 0.0, 0.0
    for tag in members:
        total += share[tag]
        seen += counts[tag]
    left = _uniform(state) * (loyalty + seen)
    for tag in members:
        left -= loyalty * share[tag] / total + counts[tag]
        if left < 0:
            return tag
    return members[-1]


@numba.njit(nogil=True, cache=True)
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
    """User after user: their words, sorted and normalised, and their tags."""
    family_loyalty, tag_loyalty, related, topicality_power, own_share = habits
    families = len(family_start) - 1
    family_share = np.zeros(families)
    for tag in range(len(tag_share)):
        family_share[family_of[tag]] += tag_share[tag]
    all_families = np.arange(families)
    nothing_seen = np.zeros(len(tag_share))
    state = np.zeros(1, np.uint64)
    example, word_end, tag_end = 0, 0, 0
    for user in range(len(keys)):
        state[0] = keys[user]
        family_counts = np.zeros(families)
        tag_counts = np.zeros(len(tag_share))
        for _ in range(sizes[user]):
            family = _draw_tag(state, all_families, family_share, family_loyalty, family_counts)
            members = tag_order[family_start[family] : family_start[family + 1]]
            first = _draw_tag(state, members, tag_share, tag_loyalty, tag_counts)
            family_counts[family] += 1
            tag_counts[first] += 1

            tag_start = tag_end
            tag_ids[tag_end] = first
            tag_end += 1
            further = _find(tags_per_sentence, _uniform(state))
            while tag_end - tag_start <= further:
                candidates = members if _uniform(state) < related else tag_order
                tag = _draw_tag(state, candidates, tag_share, 1.0, nothing_seen)
                if tag not in tag_ids[tag_start:tag_end]:
                    tag_ids[tag_end] = tag
                    tag_end += 1

            topicality = _uniform(state) ** topicality_power
            word_start = word_end
            for _ in range(1 + _find(lengths, _uniform(state))):
                if _uniform(state) >= topicality:
                    word = _find(background, _uniform(state))
                elif _uniform(state) < own_share:
                    about = tag_ids[tag_start + int(_uniform(state) * (tag_end - tag_start))]
                    word = tag_words[about, _find(tag_word_sums, _uniform(state))]
                else:
                    word = family_words[family, _find(family_word_sums, _uniform(state))]
                word_end = _count_word(word, word_ids, word_values, word_start, word_end)
            norm = 0.0
            for i in range(word_start, word_end):
                norm += word_values[i] ** 2
            for i in range(word_start, word_end):
                word_values[i] /= np.sqrt(norm)
            example += 1
            word_offsets[example] = word_end
            tag_offsets[example] = tag_end


@numba.njit(nogil=True, cache=True)
def _count_word(word, ids, counts, start, end):  # type: ignore[no-untyped-def]
    """Add a word to the sorted row `start:end`; returns the row's new end."""
    place = start
    while place < end and ids[place] < word:
        place += 1
    if place < end and ids[place] == word:
        counts[place] += 1
        return end
    for i in range(end, place, -1):
        ids[i], counts[i] = ids[i - 1], counts[i - 1]
    ids[place], counts[place] = word, 1
    return end + 1
