"""Secure sums against a server that acts: each attempt to single a device out ends in its refusal."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

pytest.importorskip("cryptography")

from masked_round import MaskedRound, some_vectors
from network_builders import a_deployment, values
from transports import SECURE, in_process, step_of

from fedbandit.core.errors import ConfigError, DataError
from fedbandit.deploy.device.device_identity import Limits, read_card
from fedbandit.deploy.masking import primitives as wire
from fedbandit.deploy.masking.announcements import (
    SURVIVORS,
    CommonTask,
    cohort_of,
    in_order,
    statement,
    task_digest,
)
from fedbandit.deploy.masking.masked_sum import (
    masked,
    own_mask_seed,
    pair_mask_seed,
    places_of,
    reveal,
    share,
    sign_of,
    vouch,
)
from fedbandit.deploy.masking.primitives import add_mask, recovered, unpacked
from fedbandit.deploy.secure_sums import MODULUS, SecureMinimum
from fedbandit.deploy.server import secure_gathering
from fedbandit.deploy.server.secure_gathering import SecureSums

PRIVATE = {"mechanism": "dp-fedavg", "noise_multiplier": 1e-6, "sampling": "fixed"}


def secure_site(folder, number, *, private=False, limits=None, **rules):
    given = values(**SECURE, **rules)
    if private:
        given = values(**SECURE, **rules, population=number, min_reach=0.0)
        given |= {"privacy": PRIVATE, "clients_per_round": number}
    return in_process(folder, number, given, limits=limits)


def other_rate(facts):
    learning = facts["learning"]
    client = {**learning["client"], "learning_rate": 1e-30}
    return {**facts, "learning": {**learning, "client": client}}


def other_norm(facts):
    return {**facts, "clip_norm": 1e6}


@pytest.fixture
def tasks(monkeypatch):
    """Every request to train that a server has made a common task of, with its weights."""
    made, digest = [], secure_gathering.task_digest

    def noted(facts, arrays):
        made.append((facts, arrays))
        return digest(facts, arrays)

    monkeypatch.setattr(secure_gathering, "task_digest", noted)
    return made


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize(("change", "singled_out"), [(other_rate, 1), (other_norm, 19)])
def test_devices_that_are_sent_different_tasks_refuse_before_anything_is_sent(
    tmp_path, caplog, tasks, change, singled_out, private
):
    """19 of 20 would learn next to nothing, or one would fill the sum: it would be one update.

    The server even has each device sign the task that it will get. Devices see what the others
    have signed, and send no vector.
    """
    site = secure_site(tmp_path, 20, private=private)
    changed = set(site.nodes[singled_out:])

    def send(request):
        if request.node in changed and step_of(request) == wire.SHARES:
            facts, arrays = tasks[-1]
            task = task_digest(change(facts), arrays)
            return replace(request, sealed={**request.sealed, wire.TASK: task})
        if request.node in changed and step_of(request) == wire.VECTOR:
            return replace(request, facts=change(request.facts))
        return request

    site.transport.change = send
    assert site.server().attempt() is None
    assert "of another task, cohort or threshold than this device" in caplog.text
    assert caplog.text.count("another task, cohort or threshold") >= 20
    vectors = [reply for _, step, reply in site.transport.received if step == wire.VECTOR]
    assert len(vectors) >= 20
    assert not any(reply.sealed for reply in vectors)


@pytest.mark.parametrize("change", [other_rate, other_norm])
def test_a_task_that_devices_have_not_signed_is_not_trained_on(tmp_path, caplog, change):
    """The server shows one task to all, and sends another to one device: it is in no sum."""
    site = secure_site(tmp_path, 5)
    victim = site.nodes[0]

    def send(request):
        if (request.node, step_of(request)) == (victim, wire.VECTOR):
            return replace(request, facts=change(request.facts))
        return request

    site.transport.change = send
    assert site.server().attempt()["clients"] == 4
    assert "the task is not the one that the devices of this sum have signed" in caplog.text


def test_weights_rewards_bounds_and_round_are_part_of_the_task(tmp_path, caplog):
    site = secure_site(tmp_path, 5)
    weights, courier = site.deployment.initial + np.float32(1), site.server()._poller
    for number, change in enumerate(
        (
            lambda request: {"arrays": {"weights": weights}},
            lambda request: {"facts": {**request.facts, "bounds": {"events": 1, "reward": 1.0}}},
            lambda request: {"facts": {**request.facts, "round": 9}},
            lambda request: {"facts": {**request.facts, "settled": ["another"]}},
            lambda request: {"facts": {**request.facts, "more": 1}},
        )
    ):
        victim = site.nodes[number]

        def send(request, victim=victim, change=change):
            if (request.node, step_of(request)) == (victim, wire.VECTOR):
                return replace(request, **change(request))
            return request

        site.transport.change = send
        state = site.deployment.start()
        SecureSums(site.deployment, courier).gather(state, number + 1, site.nodes, lambda _: {})
        assert caplog.text.count("the task is not the one that") == 2 * (number + 1)


def test_another_model_on_a_device_keeps_it_out_of_the_sum(tmp_path, caplog):
    """Weights that training leaves alone come with the installed model, not with the task."""
    site = secure_site(tmp_path, 5)
    site.transport.change = lambda request: (
        replace(request, facts={**request.facts, "model": "0" * 32})
        if step_of(request) == wire.VECTOR
        else request
    )
    site.deployment.__dict__["untrained"] = "0" * 32
    assert site.server().attempt() is None
    assert caplog.text.count("the model on this device is not the one that the task is for") == 10


def test_masks_under_different_tasks_do_not_cancel():
    """Even devices that would not look at each other's statements send nothing that adds up."""
    round_ = MaskedRound(some_vectors(5, 2000, first=1))
    round_.run()
    other = replace(round_.common, task=bytes(32))
    kept, _, _ = share(round_.own[1], other, round_.introduced(1), None, SecureMinimum())
    vectors = {**round_.seen, 1: masked(kept, round_.held[1], round_.vectors[1])}
    total = sum(unpacked(vector).astype(np.uint64) for vector in vectors.values())
    own = sum(unpacked(vector).astype(np.uint64) for vector in round_.seen.values())
    left = (total - own) % np.uint64(MODULUS) / MODULUS
    counts, _ = np.histogram(left, bins=8, range=(0, 1))
    assert ((counts - 250) ** 2).sum() / 250 < 45  # chi-square of 7 degrees: one in ten million


def gathered(site, cohorts, *, inside=False):
    """Sums over several cohorts in one round: one after the other, or all before any is unmasked."""
    courier, state, found = site.server()._poller, site.deployment.start(), []

    class Nested(SecureSums):
        def _step(self, attempt, what, *args, **more):
            if what == "survivors" and inside and cohorts:
                ask(cohorts.pop(0))
            return super()._step(attempt, what, *args, **more)

    def ask(nodes):
        found.append(Nested(site.deployment, courier).gather(state, 1, nodes, lambda _: {}))

    while cohorts:
        ask(cohorts.pop(0))
    return [one for one in found if one is not None and one.accepted]


@pytest.mark.parametrize("inside", [False, True])
def test_four_cohorts_of_three_in_one_round_give_one_sum(tmp_path, caplog, inside):
    """Four sums over four devices would be every single update."""
    site = secure_site(tmp_path, 4)
    [found] = gathered(site, [list(c) for c in combinations(site.nodes, 3)], inside=inside)
    assert found.accepted == 3
    summed = [read_card(p.agent.folder / "device.json").summed for p in site.participants.values()]
    assert summed.count(1) >= 3
    why = "is not due" if inside else "takes part in one sum of each round"
    assert caplog.text.count(why) >= 3


def test_a_device_that_is_killed_keeps_to_one_sum_a_round(tmp_path, caplog):
    """It is on record before the device signs who is in the sum; what it keeps in memory is lost."""
    site = secure_site(tmp_path, 3)
    site.transport.lost = {(node, wire.SURVIVORS) for node in site.nodes}
    server = site.server()
    assert server.attempt() is None
    again = in_process(tmp_path / "again", 3, values(**SECURE))
    for node, participant in zip(again.nodes, site.participants.values(), strict=True):
        again.participants[node].agent.close()
        again.participants[node].__init__(type(participant.agent)(participant.agent.folder))
        again.participants[node]._identity = participant._identity
    assert not gathered(again, [again.nodes])
    assert caplog.text.count("a second sum in round 1: this device has been in the sum") >= 3


@pytest.mark.parametrize(("population", "cohort", "sums"), [(5, 3, 2), (6, 3, 3), (6, 4, 2)])
def test_no_combination_of_one_rounds_sums_is_one_update(population, cohort, sums):
    """All choices of cohorts in which those who unmask a sum unmask no other one.

    A device's vector may be in several, as an attempt that fails is repeated.
    """
    need = SecureMinimum().shares_of(cohort)
    checked = 0
    for members in combinations(combinations(range(population), cohort), sums):
        if not _unmaskable(members, need):
            continue
        rows = np.zeros((sums, population))
        for row, nodes in zip(rows, members, strict=True):
            row[list(nodes)] = 1
        rank = np.linalg.matrix_rank(rows)
        for one in np.eye(population):
            assert np.linalg.matrix_rank(np.vstack([rows, one])) > rank
        checked += 1
    assert checked > 10


def _unmaskable(members, need, used=frozenset()):
    if not members:
        return True
    free = [node for node in members[0] if node not in used]
    return any(
        _unmaskable(members[1:], need, used | set(helpers)) for helpers in combinations(free, need)
    )


def test_a_server_that_lowers_the_threshold_is_refused(tmp_path, caplog):
    site = secure_site(tmp_path, 25)
    site.transport.change = lambda request: (
        replace(request, sealed={**request.sealed, wire.THRESHOLD: 13})
        if step_of(request) == wire.SHARES
        else request
    )
    assert site.server().attempt() is None
    assert caplog.text.count("13 of 25 shares would unmask: this device asks for at least 17") == 50
    with pytest.raises(ConfigError, match="secure_threshold"):
        a_deployment(tmp_path, values(**SECURE, secure_threshold=0.6))


def test_an_app_asks_for_a_larger_cohort_and_threshold_than_the_server(tmp_path, caplog):
    limits = Limits(secure=SecureMinimum(cohort=7, threshold=0.9))
    site = secure_site(tmp_path, 5, limits=limits)
    assert site.server().attempt() is None
    assert "5 devices are too few to hide among: this device asks for at least 7" in caplog.text
    larger = secure_site(tmp_path / "larger", 8, limits=limits)
    assert larger.server().attempt() is None
    assert "6 of 8 shares would unmask: this device asks for at least 8" in caplog.text
    meant = secure_site(tmp_path / "meant", 8, limits=limits, secure_threshold=0.9)
    assert meant.server().attempt()["clients"] == 8


@pytest.mark.parametrize("wrong", [{"cohort": 2}, {"threshold": 0.6}, {"threshold": 1.1}])
def test_no_app_can_ask_for_less_than_the_protocol_needs(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SecureMinimum(**wrong)


def test_half_of_the_devices_cannot_be_told_of_other_survivors():
    """With 13 of 25 shares and one colluder such views gave the server every mask of a victim."""
    vectors = some_vectors(25, 4, first=1)
    round_ = MaskedRound(vectors)
    round_.run()
    first, second = in_order(range(1, 25)), in_order(range(2, 26))
    views = {node: first if node < 13 else second for node in range(2, 25)}
    both = {node: vouch(round_.held[node], view) for node, view in views.items()}
    for node, (kept, _) in both.items():
        said = {other: signed for other, (_, signed) in both.items() if other != node}
        with pytest.raises(
            DataError, match=r"has told node .* of other survivors than this device"
        ):
            reveal(kept, said)
        alike = {other: signed for other, signed in said.items() if views[other] == views[node]}
        with pytest.raises(DataError, match="devices have signed who is in the sum, 17 needed"):
            reveal(kept, alike)
        forged = {other: kept.survivors + signed[32:] for other, signed in said.items()}
        with pytest.raises(DataError, match="has not signed what the server relays in its name"):
            reveal(kept, forged)


def test_who_is_in_the_sum_is_said_once(tmp_path, caplog):
    """A device that has signed one set of survivors is asked about another."""
    site = secure_site(tmp_path, 5)
    server = site.server()
    requests = []

    def send(request):
        requests.append(request)
        return request

    site.transport.change = send
    assert server.attempt()["clients"] == 5
    again = next(r for r in requests if step_of(r) == wire.SURVIVORS)
    fewer = replace(again, sealed={**again.sealed, wire.SURVIVORS: in_order(site.nodes[:4])})
    for request in (again, fewer):
        reply = site.participants[request.node].reply(request)
        assert "is not due" in reply.facts["problem"]


def test_colluders_fewer_than_a_third_cannot_have_both_secrets_of_a_device():
    """Each honest device reveals one of two shares; the colluders both. Neither kind is enough twice."""
    for number in range(3, 60):
        need = SecureMinimum().shares_of(number)
        colluders = 2 * need - number - 1
        assert 3 * (colluders + 1) >= number
        honest = number - colluders
        assert not any(
            one + colluders >= need and honest - one + colluders >= need
            for one in range(honest + 1)
        )


def test_devices_do_not_tell_a_private_server_who_has_nothing_to_send(tmp_path):
    """Among devices that send zeros a sum would be one update: who they are is not for asking."""
    site = secure_site(tmp_path, 4, private=True)
    assert site.server().attempt()["clients"] == 4
    own = site.participants[site.nodes[0]]
    probe = {"token": "t", "round": 2, "space": site.deployment.space}
    answered, _ = own.answer("ready", probe, {})
    assert (
        "a round without privacy, and this device agreed to a private plan" in answered["problem"]
    )
    plain = secure_site(tmp_path / "plain", 4)
    other = plain.participants[plain.nodes[0]]
    answered, _ = other.answer("ready", {**probe, "zeros": True}, {})
    assert "the server asks for zeros in a round without privacy" in answered["problem"]


def test_a_private_round_whose_sum_was_lost_ends_without_one_and_is_charged(tmp_path, caplog):
    """The server is killed between unmasking and checkpoint: no device is in a second sum."""
    site = secure_site(tmp_path, 4, private=True)
    server = site.server()
    server._gathering.gather(server.state, 1, site.nodes, lambda _: {})
    metrics = server.attempt()
    assert (metrics["round"], metrics["clients"]) == (1, 0)
    assert metrics["epsilon"] == site.deployment.ledger.epsilon(1)
    assert "its sum was unmasked before, and is lost" in caplog.text
    assert server.attempt()["clients"] == 4
    cards = [read_card(p.agent.folder / "device.json") for p in site.participants.values()]
    assert [(card.private.taken, card.summed) for card in cards] == [(2, 2)] * 4


def test_what_a_server_can_still_do_choose_the_rounds(tmp_path):
    """Two rounds whose devices differ by one: the sums differ by its update, as the docs say."""
    site = secure_site(tmp_path, 4)
    sums = SecureSums(site.deployment, site.server()._poller)
    state = site.deployment.start()
    whole = sums.gather(state, 1, site.nodes, lambda _: {})
    rest = sums.gather(state, 2, site.nodes[1:], lambda _: {})
    task = {"token": "t", "round": 3, "clip_norm": 1.0, "space": site.deployment.space}
    task |= {"counted": None, "learning": site.deployment.learning}
    task["bounds"] = site.deployment.rules.bounds.to_json()
    own = site.participants[site.nodes[0]]
    own._secure_only = False
    _, arrays = own.answer("train", task, {"weights": state.server_state["weights"]})
    np.testing.assert_allclose(whole.total - rest.total, arrays["update"], atol=1e-5)


def test_what_a_server_can_still_do_with_as_many_colluders_as_the_threshold():
    """Five of seven hold enough shares of both secrets of a device; four of them do not."""
    round_ = MaskedRound(some_vectors(7, 50, first=1))
    round_.run()
    places = places_of(round_.neighbours[1])

    def unmasked(colluders):
        held = {places[node]: round_.held[node].shares[1] for node in colluders}
        key, seed = (recovered({place: pair[i] for place, pair in held.items()}) for i in (0, 1))
        left = unpacked(round_.seen[1]).astype(np.uint64)
        add_mask(left, own_mask_seed(round_.common.digest, 1, seed), -1)
        for node in range(2, 8):
            pair = pair_mask_seed(round_.common.digest, key, round_.announced[node].mask)
            add_mask(left, pair, -sign_of(1, node))
        return left % np.uint64(MODULUS)

    assert round_.terms.threshold == 5
    np.testing.assert_array_equal(unmasked([2, 3, 4, 5, 6]), round_.vectors[1])
    assert not (unmasked([2, 3, 4, 5]) == round_.vectors[1]).any()


def test_what_a_server_can_still_do_with_a_third_of_the_neighbours():
    """9 of 25 sign two lists of survivors: half of the rest say that device 1 has dropped out."""
    round_ = MaskedRound(some_vectors(25, 50, first=1))
    round_.run()
    places, colluders = places_of(round_.neighbours[1]), range(17, 26)

    def told(survivors, honest):
        both = {node: vouch(round_.held[node], survivors) for node in honest}
        signed = {node: said for node, (_, said) in both.items()}
        digest = next(iter(both.values()))[0].survivors
        for node in colluders:
            signed[node] = statement(round_.own[node].sign, SURVIVORS, digest)
        others = {node: {o: s for o, s in signed.items() if o != node} for node in honest}
        return {places[node]: reveal(kept, others[node])[1] for node, (kept, _) in both.items()}

    def recovered_with(shares, kind):
        more = {places[node]: round_.held[node].shares[1][kind] for node in colluders}
        return recovered(shares | more)

    of_seed = told(in_order(range(1, 26)), range(1, 9))
    of_key = told(in_order(range(2, 26)), range(9, 17))
    assert recovered_with(of_seed, 1) == round_.own[1].seed
    assert recovered_with(of_key, 0) == round_.own[1].mask


def test_a_cohort_without_the_keys_of_a_device_and_its_neighbours_is_refused():
    round_ = MaskedRound(some_vectors(5, 4, first=1))
    own, known = round_.own[1], round_.introduced(1)
    right = round_.common
    missing = {node: said for node, said in round_.announced.items() if node != 3}
    swapped = {**round_.announced, 3: round_.announced[4], 4: round_.announced[3]}
    for cohort, why in (
        (cohort_of(missing), "not with the keys"),
        (cohort_of(swapped), "not with the keys"),
        (right.cohort[:-1], "not a list of nodes"),
        (right.cohort[40:] + right.cohort[:40], "not a list of nodes"),
        (right.cohort + right.cohort[-40:], "not a list of nodes"),
    ):
        common = CommonTask(right.token, right.task, right.threshold, cohort)
        with pytest.raises(DataError, match=why):
            share(own, common, known, None, SecureMinimum())
