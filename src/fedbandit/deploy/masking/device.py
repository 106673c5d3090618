"""A device's half of a secure sum: it announces keys, shares its secrets, masks its vector, and tells one share each.

Pure steps from one small value to the next, each of which must be taken once: whoever keeps the values sees to that.
Bonawitz et al. (2017) with the neighbours of Bell et al. (2020): masks between neighbours cancel in the sum, and a
mask of its own protects a vector that comes after its sender was taken for lost.
"""

import secrets
from collections.abc import Collection, Mapping

import numpy as np
from pydantic import BaseModel, ConfigDict

from fedbandit.core.errors import DataError
from fedbandit.deploy.masking.announcements import Announcement, Roster, Signer, reused
from fedbandit.deploy.masking.primitives import (
    SECRET,
    SHARE,
    add_mask,
    agreed,
    derived,
    digest,
    framed,
    new_key,
    opened,
    packed,
    public_of,
    sealed,
    shares_of,
)
from fedbandit.deploy.secure_sums import LEAST, MOST_SHARES


class _Kept(BaseModel):
    """Keeps as JSON between two messages."""

    model_config = ConfigDict(
        frozen=True, ser_json_bytes="base64", val_json_bytes="base64", extra="forbid"
    )


class Announced(_Kept):
    """After readiness: the secrets behind an announcement."""

    token: str
    node: int
    mask: bytes  # private keys
    seal: bytes
    seed: bytes  # of its own mask
    said: bytes  # the announcement


class Shared(_Kept):
    """After its secrets were shared: those, and whom it may have to do with."""

    own: Announced
    threshold: int
    neighbours: dict[int, tuple[bytes, bytes]]  # their public keys: for masks, for packets
    share: bytes  # its own, of the seed of its own mask


class Held(_Kept):
    """After its vector was masked: what others may need to unmask the sum, and nothing of its own secrets."""

    token: str
    node: int
    threshold: int
    share: bytes
    shares: dict[
        int, tuple[bytes, bytes]
    ]  # by neighbour: of its key for masks, and of the seed of its own mask


def announce(token: str, node: int, signer: Signer | None) -> tuple[Announced, Announcement]:
    """Fresh keys for one attempt at a round, signed with the node's key."""
    mask, seal, seed = new_key(), new_key(), secrets.token_bytes(SECRET)
    said = Announcement(public_of(mask), public_of(seal), commitment(token, node, seed))
    said = said if signer is None else said.signed(token, node, signer)
    return Announced(
        token=token, node=node, mask=mask, seal=seal, seed=seed, said=said.to_bytes()
    ), said


def commitment(token: str, node: int, seed: bytes) -> bytes:
    """What holds a device to the seed of its own mask."""
    return digest(seed, b"commitment", *_named(token, node))


def share(
    own: Announced, threshold: int, neighbours: Mapping[int, Announcement], roster: Roster | None
) -> tuple[Shared, dict[int, bytes]]:
    """What to keep, and the packet for each neighbour: a share of the key for masks and one of the seed.

    Without a roster the server's word is taken for who the neighbours are.
    """
    said = Announcement.of(own.said)
    if own.node in neighbours:
        raise DataError("this device as its own neighbour")
    number = len(neighbours) + 1
    _enough(number, LEAST)
    if number > MOST_SHARES:
        raise DataError(f"{number} neighbours are more than {MOST_SHARES}")
    if not number / 2 < threshold <= number:
        raise DataError(
            f"{threshold} of {number} shares would do: not more than half, or more than there are"
        )
    if reused([said, *neighbours.values()]):
        raise DataError("one key stands for two things or two nodes")
    for node, announcement in neighbours.items():
        announcement.check(own.token, node, roster)
    of_key, of_seed = (shares_of(secret, number, threshold) for secret in (own.mask, own.seed))
    places = places_of([own.node, *neighbours])
    packets = {}
    for node, announcement in neighbours.items():
        place = places[node] - 1
        key = _packet_key(own.token, own.seal, announcement.seal, said.seal, announcement.seal)
        packets[node] = sealed(key, of_key[place] + of_seed[place], _between(own.node, node))
    keys = {
        node: (announcement.mask, announcement.seal) for node, announcement in neighbours.items()
    }
    kept = Shared(
        own=own, threshold=threshold, neighbours=keys, share=of_seed[places[own.node] - 1]
    )
    return kept, packets


def accept(shared: Shared, packets: Mapping[int, bytes]) -> Held:
    """Open what neighbours have sealed for this device.

    A packet that opens was sealed by somebody who saw this device's new keys: no neighbour can be a recording.
    """
    own = shared.own
    if not packets.keys() <= shared.neighbours.keys():
        raise DataError("packets of others than its neighbours")
    _enough(len(packets) + 1, shared.threshold)
    shares, mine = {}, public_of(own.seal)
    for node, packet in packets.items():
        theirs = shared.neighbours[node][1]
        content = opened(
            _packet_key(own.token, own.seal, theirs, theirs, mine), packet, _between(node, own.node)
        )
        if len(content) != 2 * SHARE:
            raise DataError(f"node {node} has sealed no shares")
        shares[node] = (content[:SHARE], content[SHARE:])
    return Held(
        token=own.token,
        node=own.node,
        threshold=shared.threshold,
        share=shared.share,
        shares=shares,
    )


def masked(shared: Shared, held: Held, levels: np.ndarray) -> bytes:
    """Points of the grid, int64 [P], under this device's own mask and those with each neighbour that sent a packet."""
    own = shared.own
    total = levels.astype(np.uint64)
    add_mask(total, own_mask_seed(own.token, own.node, own.seed), 1)
    for node in held.shares:
        seed = pair_mask_seed(own.token, own.mask, shared.neighbours[node][0])
        add_mask(total, seed, sign_of(own.node, node))
    return packed(total)


def reveal(held: Held, active: Collection[int], dropped: Collection[int]) -> dict[int, bytes]:
    """One share for each neighbour: of its own mask's seed if it is in the sum, of its key for masks if it is not."""
    there, gone = set(active), set(dropped)
    if there & gone:
        raise DataError("asked for both secrets of one device")
    if held.node not in there:
        raise DataError("asked as if this device had dropped out")
    if there | gone != held.shares.keys() | {held.node}:
        raise DataError("asked about others than the neighbours whose packets it was given")
    _enough(len(there), held.threshold)
    found = {
        node: of_key if node in gone else of_seed for node, (of_key, of_seed) in held.shares.items()
    }
    return {**found, held.node: held.share}


def own_mask_seed(token: str, node: int, seed: bytes) -> bytes:
    """What a device's own mask is made from."""
    return derived(seed, b"own mask", *_named(token, node))


def pair_mask_seed(token: str, private: bytes, public: bytes) -> bytes:
    """What the mask between two devices is made from: the same for both."""
    return derived(
        agreed(private, public), b"pair mask", token.encode(), *sorted([public_of(private), public])
    )


def sign_of(node: int, other: int) -> int:
    """Whether the mask between them is added by a node, or taken away."""
    return 1 if node < other else -1


def places_of(keepers: Collection[int]) -> dict[int, int]:
    """Which share of a device's secrets each of its neighbours and itself keeps, from 1."""
    return {node: place for place, node in enumerate(sorted(keepers), 1)}


def _packet_key(token: str, private: bytes, public: bytes, sender: bytes, receiver: bytes) -> bytes:
    return derived(agreed(private, public), b"packet", token.encode(), sender, receiver)


def _between(sender: int, receiver: int) -> bytes:
    return framed(sender.to_bytes(8, "big"), receiver.to_bytes(8, "big"))


def _named(token: str, node: int) -> tuple[bytes, bytes]:
    return token.encode(), node.to_bytes(8, "big")


def _enough(devices: int, least: int) -> None:
    if devices < max(least, LEAST):
        raise DataError(f"{devices} devices are too few to hide among")
