"""Bags of words, label encoding and the hold-out, against plain definitions."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbandit.core.errors import ConfigError
from fedbandit.core.ragged import Ragged
from fedbandit.data.importers import HoldOut
from fedbandit.data.text import (
    EMNIST_ACTIONS,
    BagOfWords,
    FrequencyCounter,
    LabelEncoder,
    case_map,
    in_natural_order,
    split_labels,
    tokenise,
)

WORDS = [f"w{i}" for i in range(8)]
SENTENCES = st.lists(st.lists(st.sampled_from([*WORDS, "unknown"]), max_size=12), max_size=8)
ROWS = st.lists(st.lists(st.integers(0, 99), max_size=6), max_size=8)


@given(SENTENCES)
def test_a_bag_is_counts_over_their_norm(sentences):
    bags = BagOfWords(WORDS).encode(sentences)
    assert len(bags) == len(sentences)
    for row, sentence in enumerate(sentences):
        counts = Counter(word for word in sentence if word in WORDS)
        total = sum(counts.values())
        shares = {
            WORDS.index(word): n / total for word, n in counts.items()
        }  # counts over their sum, then L2
        norm = math.sqrt(sum(share**2 for share in shares.values()))
        bag = bags.slice(row, row + 1)
        assert bag.ids.tolist() == sorted(shares)
        np.testing.assert_allclose(
            bag.values, [shares[i] / norm for i in sorted(shares)], rtol=1e-6
        )


@given(ROWS, st.data())
def test_ragged_take_and_slice_are_list_indexing(rows, data):
    ragged = Ragged.from_rows(rows)
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10)) if rows else []
    taken = ragged.take(np.array(chosen, np.int64))
    assert [taken.slice(i, i + 1).ids.tolist() for i in range(len(taken))] == [
        rows[i] for i in chosen
    ]
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    part = ragged.slice(start, stop)
    assert part.ids.tolist() == [value for row in rows[start:stop] for value in row]
    assert part.row_of_entry().tolist() == [
        i for i, row in enumerate(rows[start:stop]) for _ in row
    ]


def test_tokenise_keeps_the_names_programmers_use():
    assert tokenise("How do I use C++, C# and ASP.NET? Don't (re-)try!") == (
        ["how", "do", "i", "use", "c++", "c#", "and", "asp.net", "don't", "re", "try"]
    )
    assert tokenise("Größe ÉTÉ\n") == ["größe", "été"]
    assert tokenise(" ...") == []


def test_the_most_frequent_come_first_and_ties_are_alphabetical():
    counter = FrequencyCounter()
    counter.add(["b", "a", "c", "c"])
    assert counter.top(2) == ["c", "a"]
    assert counter.top() == ["c", "a", "b"]


def test_counting_forgets_rare_words_to_stay_small():
    counter = FrequencyCounter(most_distinct=100)
    for i in range(1000):
        counter.add([f"rare{i}", "often", "frequent", "frequent"])
    assert counter.top(2) == ["frequent", "often"]
    assert len(counter.top()) <= 100


def test_labels_that_are_no_action_are_dropped_and_repeats_count_once():
    encoded = LabelEncoder(["x", "y"]).encode([["y", "z", "x", "y"], [], ["z"]])
    assert encoded.offsets.tolist() == [0, 2, 2, 2]
    assert encoded.ids.tolist() == [0, 1]
    assert split_labels(" a | b||", "|") == ["a", "b"]


def test_orders_of_names():
    assert in_natural_order(["10", "9", "1"]) == ["1", "9", "10"]
    assert in_natural_order(["b", "a", "10"]) == ["10", "a", "b"]
    assert in_natural_order(sorted(EMNIST_ACTIONS, reverse=True)) == list(EMNIST_ACTIONS)
    assert case_map(EMNIST_ACTIONS)[EMNIST_ACTIONS.index("Q")] == EMNIST_ACTIONS.index("q")
    assert case_map(["a", "b"]) == {}


def test_holding_out_by_client_is_all_or_nothing_and_fixed():
    clients = [f"user{i}" for i in range(2000)]
    first = HoldOut(0.1, by_client=True).is_test(clients)
    again = HoldOut(0.1, by_client=True).is_test(clients[::-1])[::-1]
    np.testing.assert_array_equal(first, again)
    assert 0.08 < first.mean() < 0.12
    # The split is part of published results: these may never change.
    assert [client for client, is_test in zip(clients, first, strict=True) if is_test][
        :3
    ] == FIRST_HELD_OUT


FIRST_HELD_OUT = ["user1", "user3", "user10"]


def test_holding_out_by_example_leaves_everybody_something_to_train_on():
    clients = [f"writer{i % 50}" for i in range(5000)]
    whole = HoldOut(0.1, by_client=False).is_test(clients)
    assert 0.08 < whole.mean() < 0.12
    assert not whole[:50].any()
    in_parts = HoldOut(0.1, by_client=False)
    parts = [in_parts.is_test(clients[start : start + 77]) for start in range(0, 5000, 77)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_a_fraction_outside_its_range_is_refused(fraction):
    with pytest.raises(ConfigError, match="test-fraction"):
        HoldOut(fraction, by_client=True)
