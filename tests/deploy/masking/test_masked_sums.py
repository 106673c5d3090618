"""Both halves of the protocol: sums are exact, whoever drops out, and a device refuses to tell more."""

import json
import logging
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cryptography")

from masked_round import TASK, TOKEN, MaskedRound, node_key, roster_of, some_vectors

from fedbandit.core.errors import DataError
from fedbandit.deploy.masking.announcements import TASK as TASK_SIGNED
from fedbandit.deploy.masking.announcements import (
    Announcement,
    CommonTask,
    cohort_of,
    in_order,
    statement,
)
from fedbandit.deploy.masking.masked_sum import (
    Announced,
    Held,
    MaskedSum,
    Shared,
    Sharing,
    accept,
    announce,
    reveal,
    share,
    vouch,
)
from fedbandit.deploy.masking.primitives import public_of, unpacked
from fedbandit.deploy.secure_sums import MODULUS, SecureMinimum


def summed(vectors, nodes):
    return np.sum([vectors[node] for node in nodes], axis=0) % MODULUS


@pytest.mark.parametrize(
    ("number", "shares"),
    [(3, 25), (4, 3), (5, 5), (6, 5), (7, 5), (12, 5), (25, 25), (26, 25), (60, 9)],
)
@pytest.mark.parametrize("lost", [0, 1])
def test_sums_are_exact_for_many_graphs(number, shares, lost):
    vectors = some_vectors(number, seed=number)
    rng = np.random.default_rng(number)
    gone = {
        int(node)
        for node in rng.choice(list(vectors), lost if min(number, shares) > 3 else 0, replace=False)
    }
    round_ = MaskedRound(vectors, shares, 2 / 3, lost_before_vectors=gone)
    np.testing.assert_array_equal(round_.run(), summed(vectors, vectors.keys() - gone))
    assert round_.seen.keys() == vectors.keys() - gone


@pytest.mark.parametrize("seed", range(6))
def test_sums_are_exact_when_devices_drop_out_at_every_step(seed):
    vectors = some_vectors(40, seed=seed)
    order = [int(node) for node in np.random.default_rng(seed).permutation(list(vectors))]
    before, during, after = set(order[:2]), set(order[2:4]), set(order[4:6])
    round_ = MaskedRound(vectors, 21, 2 / 3, None, None, before, during, after)
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
        (5, 25, 2 / 3, (5, 4)),
        (6, 25, 2 / 3, (6, 4)),
        (100, 25, 2 / 3, (25, 17)),
        (100, 24, 0.8, (23, 19)),
        (3, 3, 1, (3, 3)),
    ],
)
def test_terms(devices, shares, threshold, expected):
    terms = Sharing.of(devices, shares, threshold)
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


def shares(round_, neighbours, threshold=None):
    """What device 1 answers to these neighbours, of a cohort with nobody else."""
    own, roster = round_.own[1], round_.roster
    cohort = cohort_of({1: round_.announced[1], **neighbours})
    least = SecureMinimum()
    need = threshold or least.shares_of(len(neighbours) + 1)
    return share(own, CommonTask(TOKEN, TASK, need, cohort), neighbours, roster, least)


def test_a_device_refuses_terms_that_hide_it_badly():
    round_ = signed_round()
    known = round_.introduced(1)
    few = {node: known[node] for node in (2, 3)}
    for threshold, neighbours, why in (
        (2, {2: known[2]}, "2 devices are too few"),
        (1, {}, "1 devices are too few"),
        (1, few, "1 of 3 shares would unmask: this device asks for at least 2"),
        (4, few, "at most 3"),
        (3, known, "3 of 5 shares would unmask: this device asks for at least 4"),
        (3, {**few, 1: round_.announced[1]}, "as its own neighbour"),
    ):
        with pytest.raises(DataError, match=why):
            shares(round_, neighbours, threshold)
    shares(round_, few, 2)


def test_a_key_in_two_places_is_refused():
    """One node under two numbers, a key of this device's own, or one key for masks and packets."""
    round_ = signed_round()
    known = round_.introduced(1)
    twice = announce(TOKEN, 6, round_.keys[2])[1]
    stolen = Announcement(round_.announced[1].mask, *_rest(known[2])).signed(
        TOKEN, 2, round_.keys[2]
    )
    single = Announcement(known[2].mask, known[2].mask, *_rest(known[2])[1:]).signed(
        TOKEN, 2, round_.keys[2]
    )
    for neighbours in (
        {**known, 6: twice},
        {**known, 2: stolen},
        {**known, 2: single},
        {**known, 7: known[2]},
    ):
        with pytest.raises(DataError, match="one key stands for two things or two nodes"):
            shares(round_, neighbours)


def _rest(said):
    return said.seal, said.sign, said.commitment


def test_an_invalid_public_key_is_refused():
    round_ = signed_round()
    for nothing in ("mask", "seal"):
        keys = {
            "mask": round_.announced[2].mask,
            "seal": round_.announced[2].seal,
            nothing: b"\x01" + bytes(31),
        }
        said = Announcement(keys["mask"], keys["seal"], bytes(32), bytes(32))
        said = said.signed(TOKEN, 2, round_.keys[2])
        with pytest.raises(DataError, match="invalid public key"):
            shares(round_, {**round_.introduced(1), 2: said})


def test_packets_have_to_come_from_living_neighbours():
    round_ = signed_round()
    round_.run()
    shared, packets = round_.shared[1], round_.packets_for(1)
    signed = {**round_.signed, 9: bytes(96)}
    round_.accept(1)
    for wrong, why in (
        ({**packets, 2: bytes(len(packets[2]))}, "did not seal"),
        ({**packets, 2: packets[3]}, "did not seal"),
        ({**packets, 2: round_.packets[2][3]}, "did not seal"),
        ({**packets, 9: packets[2]}, "others than its neighbours"),
        ({2: packets[2]}, "2 devices are too few"),
    ):
        with pytest.raises(DataError, match=why):
            accept(shared, wrong, {node: signed[node] for node in wrong})


def test_a_recording_of_a_neighbour_cannot_seal_for_new_keys():
    """Old announcements pass their check if the server uses a token again; packets of then do not open now."""
    before, now = signed_round(), signed_round()
    before.run()
    now.keys, now.roster = before.keys, before.roster
    own, said = announce(TOKEN, 1, before.keys[1])
    now.own[1], now.announced = own, {**before.announced, 1: said}
    shared, _, _ = now.share(1)
    packets = before.packets_for(1)
    alike = {node: statement(before.own[node].sign, TASK_SIGNED, shared.common) for node in packets}
    with pytest.raises(DataError, match="did not seal"):  # even if they could sign
        accept(shared, packets, alike)
    with pytest.raises(DataError, match="another task, cohort or threshold"):
        accept(shared, packets, {node: before.signed[node] for node in packets})


def test_a_device_tells_one_share_of_each_neighbour():
    round_ = signed_round()
    round_.run()
    held = round_.held[1]
    kept, _ = vouch(held, in_order({1, 2, 3, 4}))
    others = {node: vouch(round_.held[node], in_order({1, 2, 3, 4}))[1] for node in (2, 3, 4)}
    assert reveal(kept, others) == {
        1: held.share,
        **{node: held.shares[node][1] for node in (2, 3, 4)},
        5: held.shares[5][0],
    }
    for survivors, why in (
        (in_order({2, 3, 4, 5}), "as if this device had dropped out"),
        (in_order({1, 2, 3}), "3 devices are too few"),
        (in_order({1, 2, 3, 4})[:-1], "survivors: not a list of nodes"),
        (in_order({2, 3, 4}) + in_order({1}), "survivors: not a list of nodes"),
    ):
        with pytest.raises(DataError, match=why):
            vouch(held, survivors)


def test_fewer_neighbours_than_the_threshold_get_nothing():
    """A server that has lost too many could not unmask the sum; it has no honest reason to ask."""
    round_ = MaskedRound(some_vectors(5, 4, first=1), threshold=0.8)
    round_.run()
    with pytest.raises(DataError, match="3 devices are too few"):
        vouch(round_.held[1], in_order({1, 2, 3}))
    few = dict(list(round_.statements_for(1).items())[:2])
    with pytest.raises(DataError, match="3 devices have signed who is in the sum, 4 needed"):
        reveal(round_.vouched[1], few)


def test_wrong_shares_are_noticed():
    for about in (2, 5):
        round_ = MaskedRound(some_vectors(5, 4, first=1), lost_before_vectors={5})
        round_.run()
        told = {node: dict(kept.shares) for node, kept in round_.vouched.items()}
        told[3][about] = bytes([*told[3][about][:-1], told[3][about][-1] ^ 1])
        kept = {
            node: {keeper: known[node] for keeper, known in told.items()} for node in round_.shared
        }
        total = MaskedSum(round_.common, 4)
        for node, vector in round_.seen.items():
            total.add(node, vector)
        with pytest.raises(
            DataError, match=f"the shares of node {about}'s secret do not recover it"
        ):
            total.unmasked(kept, round_.announced, round_.neighbours, round_.shared)


def test_a_vector_of_another_length_or_a_second_one_is_refused():
    total = MaskedSum(CommonTask(TOKEN, TASK, 2, b""), 4)
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
    for kept in (own, shared, held, round_.vouched[1]):
        assert type(kept).model_validate_json(kept.model_dump_json()) == kept
    assert public_of(own.mask) == round_.announced[1].mask
    assert (type(own), type(shared), type(held)) == (Announced, Shared, Held)
    left, before = (
        held.model_dump_json() + round_.vouched[1].model_dump_json(),
        json.loads(shared.model_dump_json())["own"],
    )
    for secret in ("mask", "seal", "seed"):
        assert len(before[secret]) == 44
        assert before[secret] not in left


@pytest.mark.parametrize("noise", [[], ["--noise"]])
def test_the_script_that_measures_the_cost_sums_rightly(
    monkeypatch, capsys, caplog, tmp_path, noise
):
    caplog.set_level(logging.ERROR, "fedbandit")  # as the script does; undone after the test
    script = Path(__file__).parents[3] / "scripts" / "secure_sum_cost.py"
    kept = tmp_path / "cost.json"
    kept.write_text('{"other": 1}')
    given = ["--devices", "12", "--weights", "200", "--lost", "0.17", "--out", str(kept), *noise]
    monkeypatch.setattr(sys, "argv", [str(script), *given])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().out
    assert ended.value.code == 0, said
    assert "in the sum           10 of 12 devices, 200 weights each" in said
    assert "yes  the sum is right" in said
    assert ("of it, noise" in said) == bool(noise)
    rows = json.loads(kept.read_text())
    assert rows.pop("other") == 1
    (cost,) = rows.values()
    assert (cost["in_the_sum"], cost["right"]) == (10, True)
    assert (cost["of_it_noise_seconds"] > 0) == bool(noise)
