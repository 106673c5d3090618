"""Both halves of the protocol: sums are exact, whoever drops out, and a device refuses to tell more."""

import json
import logging
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cryptography")

from masked_round import TOKEN, MaskedRound, node_key, roster_of, some_vectors

from fedbandit.core.errors import DataError
from fedbandit.deploy.masking.announcements import Announcement
from fedbandit.deploy.masking.device import Announced, Held, Shared, accept, announce, reveal, share
from fedbandit.deploy.masking.primitives import public_of, unpacked
from fedbandit.deploy.masking.server import MaskedSum, Terms
from fedbandit.deploy.secure_sums import MODULUS


def summed(vectors, nodes):
    return np.sum([vectors[node] for node in nodes], axis=0) % MODULUS


@pytest.mark.parametrize(
    ("number", "shares"),
    [(3, 25), (4, 3), (5, 5), (6, 5), (7, 4), (12, 5), (25, 25), (26, 25), (60, 9)],
)
@pytest.mark.parametrize("lost", [0, 1])
def test_sums_are_exact_for_many_graphs(number, shares, lost):
    vectors = some_vectors(number, seed=number)
    rng = np.random.default_rng(number)
    gone = {
        int(node)
        for node in rng.choice(list(vectors), lost if min(number, shares) > 4 else 0, replace=False)
    }
    round_ = MaskedRound(vectors, shares, 0.51, lost_before_vectors=gone)
    np.testing.assert_array_equal(round_.run(), summed(vectors, vectors.keys() - gone))
    assert round_.seen.keys() == vectors.keys() - gone


@pytest.mark.parametrize("seed", range(6))
def test_sums_are_exact_when_devices_drop_out_at_every_step(seed):
    vectors = some_vectors(40, seed=seed)
    order = [int(node) for node in np.random.default_rng(seed).permutation(list(vectors))]
    before, during, after = set(order[:2]), set(order[2:6]), set(order[6:8])
    round_ = MaskedRound(vectors, 21, 0.51, None, None, before, during, after)
    np.testing.assert_array_equal(round_.run(), summed(vectors, vectors.keys() - before - during))


def test_sums_are_exact_with_signatures_and_entries_that_wrap():
    vectors = {node: np.array([0, 1, 2**40 - 1, 2**39]) for node in (1, 2, 2**64 - 1)}
    keys = {node: node_key() for node in vectors}
    round_ = MaskedRound(vectors, keys=keys, roster=roster_of(*keys.values()))
    assert round_.run().tolist() == [0, 3, 2**40 - 3, 2**39]


def test_one_masked_vector_tells_nothing_and_no_two_rounds_are_alike():
    vectors = dict.fromkeys((1, 2, 3), np.zeros(20_000, np.int64))
    seen = []
    for _ in range(2):
        round_ = MaskedRound(vectors)
        assert not round_.run().any()
        seen += [unpacked(vector) / MODULUS for vector in round_.seen.values()]
    for vector in seen:
        counts, _ = np.histogram(vector, bins=16, range=(0, 1))
        assert (
            (counts - 1250) ** 2
        ).sum() / 1250 < 60  # chi-square of 15 degrees: fewer than one in a million
    between = np.corrcoef(seen)[np.triu_indices(6, 1)]
    assert np.abs(between).max() < 6 / np.sqrt(20_000)


@pytest.mark.parametrize(
    ("devices", "shares", "threshold", "expected"),
    [
        (5, 25, 0.6, (5, 3)),
        (5, 25, 0.51, (5, 3)),
        (100, 25, 0.6, (25, 15)),
        (100, 24, 0.6, (23, 14)),
        (3, 3, 1, (3, 3)),
    ],
)
def test_terms(devices, shares, threshold, expected):
    terms = Terms.of(devices, shares, threshold)
    assert (terms.shares, terms.threshold) == expected
    neighbours = terms.neighbours(list(range(devices)))
    assert all(len(found) == terms.shares and node in found for node, found in neighbours.items())
    assert all(node in neighbours[other] for node, found in neighbours.items() for other in found)


def signed_round(number=5):
    keys = {node: node_key() for node in range(1, number + 1)}
    vectors = some_vectors(number, 4, first=1)
    return MaskedRound(vectors, keys=keys, roster=roster_of(*keys.values()))


def test_a_device_shares_with_registered_neighbours_alone():
    round_ = signed_round()
    round_.announced[3] = announce(TOKEN, 3, None)[1]
    with pytest.raises(DataError, match="keys of node 3 are not signed"):
        round_.share(1)
    round_.announced[3] = announce(TOKEN, 3, node_key())[1]
    with pytest.raises(
        DataError, match="keys of node 3 are signed by a node that is not on the roster"
    ):
        round_.share(1)
    round_.announced[3] = announce("yesterday", 3, round_.keys[3])[1]
    with pytest.raises(DataError, match="keys of node 3 have a signature that is not for them"):
        round_.share(1)
    round_.own[3], round_.announced[3] = announce(TOKEN, 3, round_.keys[3])
    round_.run()


def test_a_device_refuses_terms_that_hide_it_badly():
    round_ = signed_round()
    own, known, roster = round_.own[1], round_.introduced(1), round_.roster
    two = dict(list(known.items())[:1])
    few = {node: known[node] for node in (2, 3)}
    for threshold, neighbours, why in (
        (2, two, "2 devices are too few"),
        (1, {}, "1 devices are too few"),
        (1, few, "not more than half"),
        (4, few, "more than there are"),
        (2, known, "not more than half"),
        (3, {**few, 1: round_.announced[1]}, "as its own neighbour"),
    ):
        with pytest.raises(DataError, match=why):
            share(own, threshold, neighbours, roster)
    share(own, 2, few, roster)


def test_a_key_in_two_places_is_refused():
    """One node under two numbers, a key of this device's own, or one key for masks and packets."""
    round_ = signed_round()
    own, known, roster = round_.own[1], round_.introduced(1), round_.roster
    twice = announce(TOKEN, 6, round_.keys[2])[1]
    stolen = Announcement(round_.announced[1].mask, *_rest(known[2])).signed(
        TOKEN, 2, round_.keys[2]
    )
    single = Announcement(known[2].mask, known[2].mask, known[2].commitment).signed(
        TOKEN, 2, round_.keys[2]
    )
    for neighbours in (
        {**known, 6: twice},
        {**known, 2: stolen},
        {**known, 2: single},
        {**known, 7: known[2]},
    ):
        with pytest.raises(DataError, match="one key stands for two things or two nodes"):
            share(own, 4, neighbours, roster)


def _rest(said):
    return said.seal, said.commitment


def test_a_key_that_agrees_on_nothing_is_refused():
    round_ = signed_round()
    for nothing in ("mask", "seal"):
        keys = {
            "mask": round_.announced[2].mask,
            "seal": round_.announced[2].seal,
            nothing: b"\x01" + bytes(31),
        }
        said = Announcement(keys["mask"], keys["seal"], bytes(32)).signed(TOKEN, 2, round_.keys[2])
        with pytest.raises(DataError, match="agrees on nothing"):
            share(round_.own[1], 3, {**round_.introduced(1), 2: said}, round_.roster)


def test_packets_have_to_come_from_living_neighbours():
    round_ = signed_round()
    round_.run()
    shared, packets = round_.shared[1], round_.packets_for(1)
    accept(shared, packets)
    for wrong, why in (
        ({**packets, 2: bytes(len(packets[2]))}, "did not seal"),
        ({**packets, 2: packets[3]}, "did not seal"),
        ({**packets, 2: round_.packets[2][3]}, "did not seal"),
        ({**packets, 9: packets[2]}, "others than its neighbours"),
        ({2: packets[2]}, "2 devices are too few"),
    ):
        with pytest.raises(DataError, match=why):
            accept(shared, wrong)


def test_a_recording_of_a_neighbour_cannot_seal_for_new_keys():
    """Old announcements pass their check if the server uses a token again; packets of then do not open now."""
    before, now = signed_round(), signed_round()
    before.run()
    now.keys, now.roster = before.keys, before.roster
    own, said = announce(TOKEN, 1, before.keys[1])
    now.own[1], now.announced = own, {**before.announced, 1: said}
    shared, _ = now.share(1)
    with pytest.raises(DataError, match="did not seal"):
        accept(shared, before.packets_for(1))


def test_a_device_tells_one_share_of_each_neighbour():
    round_ = signed_round()
    round_.run()
    held = round_.held[1]
    told = reveal(held, {1, 2, 3, 4}, {5})
    assert told == {
        1: held.share,
        **{node: held.shares[node][1] for node in (2, 3, 4)},
        5: held.shares[5][0],
    }
    for active, dropped, why in (
        ({1, 2, 3, 4, 5}, {5}, "both secrets"),
        ({2, 3, 4, 5}, {1}, "as if this device had dropped out"),
        ({1, 2, 3, 4}, set(), "about others"),
        ({1, 2, 3, 4}, {5, 6}, "about others"),
        ({1, 2}, {3, 4, 5}, "2 devices are too few"),
    ):
        with pytest.raises(DataError, match=why):
            reveal(held, active, dropped)


def test_fewer_neighbours_than_the_threshold_get_nothing():
    """A server that has lost so many could not unmask the sum; it has no honest reason to ask."""
    round_ = MaskedRound(some_vectors(5, 4, first=1), threshold=0.8)
    round_.run()
    with pytest.raises(DataError, match="3 devices are too few"):
        reveal(round_.held[1], {1, 2, 3}, {4, 5})


def test_wrong_shares_are_noticed():
    for about in (2, 5):
        round_ = MaskedRound(some_vectors(5, 4, first=1), lost_before_vectors={5})
        round_.run()
        held = round_.held[3].shares[about]
        wrong = tuple(bytes([*share[:-1], share[-1] ^ 1]) for share in held)
        changed = round_.held[3].model_copy(
            update={"shares": {**round_.held[3].shares, about: wrong}}
        )
        told = {
            node: reveal(kept, {1, 2, 3, 4}, {5})
            for node, kept in {**round_.held, 3: changed}.items()
        }
        kept = {
            node: {keeper: known[node] for keeper, known in told.items()} for node in round_.shared
        }
        total = MaskedSum(TOKEN, 4)
        for node, vector in round_.seen.items():
            total.add(node, vector)
        with pytest.raises(
            DataError, match=f"the shares of node {about}'s secret do not recover it"
        ):
            total.unmasked(
                kept, round_.terms.threshold, round_.announced, round_.neighbours, round_.shared
            )


def test_a_vector_of_another_length_or_a_second_one_is_refused():
    total = MaskedSum(TOKEN, 4)
    total.add(1, bytes(20))
    for node, vector, why in (
        (2, bytes(19), "of 19 bytes, expected 20"),
        (1, bytes(20), "a second masked vector"),
    ):
        with pytest.raises(DataError, match=why):
            total.add(node, vector)
    assert total.nodes == {1}


def test_what_a_device_keeps_survives_as_json_and_forgets_its_secrets():
    round_ = signed_round()
    round_.run()
    own, shared, held = round_.own[1], round_.shared[1], round_.held[1]
    for kept in (own, shared, held):
        assert type(kept).model_validate_json(kept.model_dump_json()) == kept
    assert public_of(own.mask) == round_.announced[1].mask
    assert (type(own), type(shared), type(held)) == (Announced, Shared, Held)
    left, before = held.model_dump_json(), json.loads(shared.model_dump_json())["own"]
    for secret in ("mask", "seal", "seed"):
        assert len(before[secret]) == 44
        assert before[secret] not in left


def test_the_script_that_measures_the_cost_sums_rightly(monkeypatch, capsys, caplog):
    caplog.set_level(logging.ERROR, "fedbandit")  # as the script does; undone after the test
    script = Path(__file__).parents[3] / "scripts" / "secure_sum_cost.py"
    monkeypatch.setattr(
        sys, "argv", [str(script), "--devices", "12", "--weights", "200", "--lost", "0.2"]
    )
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().out
    assert ended.value.code == 0, said
    assert "in the sum           10 of 12 devices, 200 weights each" in said
    assert "yes  the sum is right" in said
