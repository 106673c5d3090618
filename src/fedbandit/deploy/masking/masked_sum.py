"""Both halves of a secure sum: a device's, in pure steps from one small value to the next, and the
server's.

Bonawitz et al. (2017), the variant against servers that act, with the neighbours of Bell et al.
(2020). Masks between neighbours cancel in the sum; a mask of its own protects a vector that comes
after its sender was taken for lost. Each step must be taken once: the caller, who keeps the values,
sees to that. The server adds vectors up as they come, so that it holds one sum and not a thousand
vectors.
"""

import random
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel, ConfigDict

from fedbandit.core.errors import DataError
from fedbandit.deploy.masking.announcements import (
    SURVIVORS,
    TASK,
    Announcement,
    CommonTask,
    Roster,
    Signer,
    check_alike,
    reused,
    statement,
    survivors_of,
)
from fedbandit.deploy.masking.primitives import (
    ENTRY,
    SECRET,
    SHARE,
    add_mask,
    agreed,
    derived,
    digest_of,
    framed,
    new_key,
    new_signing_key,
    opened,
    packed,
    public_of,
    recovered,
    sealed,
    shares_of,
    signing_public_of,
    unpacked,
)
from fedbandit.deploy.secure_sums import LEAST, MODULUS, MOST_SHARES, SecureMinimum

_order = random.SystemRandom()


class _Step(BaseModel):
    """Kept as JSON between two messages."""

    model_config = ConfigDict(
        frozen=True, ser_json_bytes="base64", val_json_bytes="base64", extra="forbid"
    )


class Announced(_Step):
    """After readiness: the secrets behind an announcement."""

    token: str
    node: int
    mask: bytes  # private keys
    seal: bytes
    sign: bytes
    seed: bytes  # of its own mask
    said: bytes  # the announcement


class Shared(_Step):
    """After its secrets were shared: those, its neighbours, and what it has signed."""

    own: Announced
    task: bytes  # the digest of the request to train that may follow
    common: bytes  # the digest of the common task
    cohort: int  # devices in it
    threshold: int
    neighbours: dict[int, tuple[bytes, bytes, bytes]]  # public keys: masks, packets, statements
    share: bytes  # its own, of the seed of its own mask


class Held(_Step):
    """After its vector was masked: shares of others' secrets, and none of its own secrets."""

    token: str
    node: int
    sign: bytes
    common: bytes
    threshold: int
    share: bytes
    shares: dict[int, tuple[bytes, bytes]]  # by neighbour: of its key for masks, and of its seed
    signers: dict[int, bytes]  # public keys of its neighbours' statements
    least: int = 0  # devices in the sum without whose noise this one's would not do


class Vouched(_Step):
    """After it signed who is in the sum: what it will reveal if enough others signed the same."""

    node: int
    threshold: int
    survivors: bytes  # the digest that it signed
    active: list[int]  # itself and those of its neighbours that are in the sum
    signers: dict[int, bytes]
    shares: dict[int, bytes]  # one for each: of the seed of one in the sum, else of the key


def announce(token: str, node: int, signer: Signer | None) -> tuple[Announced, Announcement]:
    """Fresh keys for one attempt at a round, signed with the node's key."""
    mask, seal, sign, seed = new_key(), new_key(), new_signing_key(), secrets.token_bytes(SECRET)
    public = public_of(mask), public_of(seal), signing_public_of(sign)
    said = Announcement(*public, commitment(token, node, seed))
    said = said if signer is None else said.signed(token, node, signer)
    own = Announced(
        token=token, node=node, mask=mask, seal=seal, sign=sign, seed=seed, said=said.to_bytes()
    )
    return own, said


def commitment(token: str, node: int, seed: bytes) -> bytes:
    """A digest that holds a device to the seed of its own mask."""
    return digest_of(b"commitment", token.encode(), node.to_bytes(8, "big"), seed)


def share(
    own: Announced,
    common: CommonTask,
    neighbours: Mapping[int, Announcement],
    roster: Roster | None,
    least: SecureMinimum,
) -> tuple[Shared, dict[int, bytes], bytes]:
    """Share its secrets: the value to keep, a packet for each neighbour, and the signed digest of
    the common task.

    A packet holds a share of the key for masks and one of the seed. Without a roster the server's
    word is taken for who the neighbours are.
    """
    said = Announcement.of(own.said)
    if own.node in neighbours:
        raise DataError("this device as its own neighbour")
    number = len(neighbours) + 1
    _check_hidden(number, common.threshold, least)
    everybody = {own.node: said, **neighbours}
    if reused(everybody.values()):
        raise DataError("one key stands for two things or two nodes")
    for node, announcement in neighbours.items():
        announcement.check(own.token, node, roster)
    common.check_holds(everybody)
    digest = common.digest
    of_key, of_seed = (
        shares_of(secret, number, common.threshold) for secret in (own.mask, own.seed)
    )
    places = places_of(everybody)
    packets = {}
    for node, announcement in neighbours.items():
        place = places[node] - 1
        key = _packet_key(digest, own.seal, announcement.seal, said.seal, announcement.seal)
        packets[node] = sealed(key, of_key[place] + of_seed[place], _between(own.node, node))
    kept = Shared(
        own=own,
        task=common.task,
        common=digest,
        cohort=common.size,
        threshold=common.threshold,
        neighbours={node: (its.mask, its.seal, its.sign) for node, its in neighbours.items()},
        share=of_seed[places[own.node] - 1],
    )
    return kept, packets, statement(own.sign, TASK, digest)


def _check_hidden(number: int, threshold: int, least: SecureMinimum) -> None:
    if number < least.cohort:
        raise DataError(
            f"{number} devices are too few to hide among: this device asks for at least"
            f" {least.cohort}"
        )
    if number > MOST_SHARES:
        raise DataError(f"{number} neighbours are more than {MOST_SHARES}")
    if not least.shares_of(number) <= threshold <= number:
        raise DataError(
            f"{threshold} of {number} shares would unmask: this device asks for at least"
            f" {least.shares_of(number)} and at most {number}"
        )


def accept(shared: Shared, packets: Mapping[int, bytes], signed: Mapping[int, bytes]) -> Held:
    """Open what neighbours have sealed for this device, if all of them signed the same common task.

    A packet that opens was sealed after this device announced its keys: no neighbour is a
    recording.
    """
    own = shared.own
    if not packets.keys() <= shared.neighbours.keys() or packets.keys() != signed.keys():
        raise DataError("packets of others than its neighbours")
    signers = {node: shared.neighbours[node][2] for node in packets}
    check_alike(signed, signers, TASK, shared.common, "another task, cohort or threshold")
    _check_enough(len(packets) + 1, shared.threshold)
    shares, mine = {}, public_of(own.seal)
    for node, packet in packets.items():
        theirs = shared.neighbours[node][1]
        key = _packet_key(shared.common, own.seal, theirs, theirs, mine)
        content = opened(key, packet, _between(node, own.node))
        if len(content) != 2 * SHARE:
            raise DataError(f"node {node} has sealed no shares")
        shares[node] = (content[:SHARE], content[SHARE:])
    return Held(
        token=own.token,
        node=own.node,
        sign=own.sign,
        common=shared.common,
        threshold=shared.threshold,
        share=shared.share,
        shares=shares,
        signers=signers,
    )


def masked(shared: Shared, held: Held, levels: np.ndarray) -> bytes:
    """Points of the grid, int64 [P], under the mask of its own and one with each neighbour."""
    own = shared.own
    total = levels.astype(np.uint64)
    add_mask(total, own_mask_seed(shared.common, own.node, own.seed), 1)
    for node in held.shares:
        seed = pair_mask_seed(shared.common, own.mask, shared.neighbours[node][0])
        add_mask(total, seed, sign_of(own.node, node))
    return packed(total)


def vouch(held: Held, survivors: bytes) -> tuple[Vouched, bytes]:
    """Sign who is in the sum: every node of it, as `in_order` writes them.

    From here on this device knows which one of its two shares of each neighbour it would reveal.
    """
    there = survivors_of(survivors)
    if held.node not in there:
        raise DataError("asked as if this device had dropped out")
    if len(there) < held.least:
        raise DataError(
            f"{len(there)} devices are in the sum: the noise of fewer than {held.least} is less"
            " than this device agreed to"
        )
    active = sorted(there & (held.shares.keys() | {held.node}))
    _check_enough(len(active), held.threshold)
    digest = digest_of(SURVIVORS, held.common, survivors)
    shares = {
        node: of_seed if node in there else of_key
        for node, (of_key, of_seed) in held.shares.items()
    }
    kept = Vouched(
        node=held.node,
        threshold=held.threshold,
        survivors=digest,
        active=active,
        signers=held.signers,
        shares={**shares, held.node: held.share},
    )
    return kept, statement(held.sign, SURVIVORS, digest)


def reveal(vouched: Vouched, signed: Mapping[int, bytes]) -> dict[int, bytes]:
    """One share for each neighbour, if enough of those in the sum signed the same survivors."""
    check_alike(signed, vouched.signers, SURVIVORS, vouched.survivors, "other survivors")
    agreeing = len(signed.keys() & set(vouched.active)) + 1
    if agreeing < vouched.threshold:
        raise DataError(
            f"{agreeing} devices have signed who is in the sum, {vouched.threshold} needed"
        )
    return vouched.shares


def own_mask_seed(common: bytes, node: int, seed: bytes) -> bytes:
    """The seed of the keystream that is a device's own mask."""
    return derived(seed, b"own mask", common, node.to_bytes(8, "big"))


def pair_mask_seed(common: bytes, private: bytes, public: bytes) -> bytes:
    """The seed of the mask between two devices: the same for both under one common task."""
    keys = sorted([public_of(private), public])
    return derived(agreed(private, public), b"pair mask", common, *keys)


def sign_of(node: int, other: int) -> int:
    """Whether the mask between them is added by a node, or taken away."""
    return 1 if node < other else -1


def places_of(keepers: Collection[int]) -> dict[int, int]:
    """Which share of a device's secrets each of its neighbours and itself keeps, from 1."""
    return {node: place for place, node in enumerate(sorted(keepers), 1)}


def _packet_key(
    common: bytes, private: bytes, public: bytes, sender: bytes, receiver: bytes
) -> bytes:
    return derived(agreed(private, public), b"packet", common, sender, receiver)


def _between(sender: int, receiver: int) -> bytes:
    return framed(sender.to_bytes(8, "big"), receiver.to_bytes(8, "big"))


def _check_enough(devices: int, threshold: int) -> None:
    if devices < max(threshold, LEAST):
        raise DataError(f"{devices} devices are too few to hide among")


@dataclass(frozen=True)
class Sharing:
    """The number of shares of each device's secrets, and how many of them recover one.

    Examples:
        >>> Sharing.of(devices=1000, shares=50, threshold=2 / 3)
        Sharing(shares=49, threshold=33)
        >>> sorted(Sharing.of(3, 50, 2 / 3).neighbours([4, 5, 6])[4])
        [4, 5, 6]
    """

    shares: int
    threshold: int

    @classmethod
    def of(cls, devices: int, shares: int, threshold: float) -> "Sharing":
        """Among this many devices; the threshold is a fraction, of at least two thirds."""
        shares = min(devices, shares)
        if shares < devices and shares % 2 == 0:
            shares -= 1  # a device and as many neighbours on either side
        return cls(shares, SecureMinimum(threshold=threshold).shares_of(shares))

    def neighbours(self, nodes: Sequence[int]) -> dict[int, set[int]]:
        """Who keeps shares for each node, itself included.

        All do, or the nearest on a ring in random order (Bell et al. 2020).
        """
        if len(nodes) <= self.shares:
            return {node: set(nodes) for node in nodes}
        ring, half = list(nodes), self.shares // 2
        _order.shuffle(ring)
        return {
            node: {ring[(place + step) % len(ring)] for step in range(-half, half + 1)}
            for place, node in enumerate(ring)
        }


class MaskedSum:
    """Adds up masked vectors of `size` entries, and takes the masks off the sum.

    Vectors are added as they come, modulo 2**64. For a device in the sum its own mask comes off;
    for one that dropped out after its neighbours had masked, the masks that they share with it.
    """

    def __init__(self, common: CommonTask, size: int) -> None:
        self._common, self._digest, self._size = common, common.digest, size
        self._total = np.zeros(size, np.uint64)
        self.nodes: set[int] = set()  # whose vectors are in it

    def add(self, node: int, vector: bytes) -> None:
        """Add a node's vector, as it came."""
        if len(vector) != ENTRY * self._size:
            raise DataError(
                f"a masked vector of {len(vector)} bytes, expected {ENTRY * self._size}"
            )
        if node in self.nodes:
            raise DataError("a second masked vector")
        self._total += unpacked(vector)
        self.nodes.add(node)

    def unmasked(
        self,
        shares: Mapping[int, Mapping[int, bytes]],
        announced: Mapping[int, Announcement],
        neighbours: Mapping[int, Collection[int]],
        sharing: Collection[int],
    ) -> np.ndarray:
        """The sum without its masks: int64 [size], modulo MODULUS.

        `shares` has enough of each device's, by who kept them: of the seed of its own mask where it
        is in the sum, of its key for masks otherwise. `sharing` are all that have sent packets.
        Call it once.
        """
        for node in sharing:
            secret = self._secret(node, shares[node], announced[node], places_of(neighbours[node]))
            if node in self.nodes:
                add_mask(self._total, own_mask_seed(self._digest, node, secret), -1)
                continue
            for other in set(neighbours[node]) & self.nodes:
                seed = pair_mask_seed(self._digest, secret, announced[other].mask)
                add_mask(self._total, seed, -sign_of(other, node))
        return (self._total % np.uint64(MODULUS)).astype(np.int64)

    def _secret(
        self,
        node: int,
        held: Mapping[int, bytes],
        said: Announcement,
        places: Mapping[int, int],
    ) -> bytes:
        """The secret that the shares recover, if it is the one that the device announced."""
        enough = sorted(held.items())[: self._common.threshold]
        secret = recovered({places[keeper]: share for keeper, share in enough})
        if secret is not None:
            token = self._common.token
            if node in self.nodes and commitment(token, node, secret) == said.commitment:
                return secret
            if node not in self.nodes and public_of(secret) == said.mask:
                return secret
        raise DataError(f"the shares of node {node}'s secret do not recover it")
