"""A device's public keys for one round, signed with its node's key, and the roster of nodes whose word counts.

The roster is installed on devices: if servers relayed it, they could invent neighbours. No I/O here.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    SECP384R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedbandit.core.errors import DataError
from fedbandit.deploy.masking.primitives import PROTOCOL, SECRET, agreed, framed, new_key

_POINT = 49  # bytes of a node's public key, compressed
_HALF = 48  # bytes of one of a signature's two numbers
_KIND = "ecdsa-sha2-nistp384"
_PROBE = new_key()


@dataclass(frozen=True)
class Announcement:
    """What a device says of itself before a round: what masks and sealed packets are agreed with, and who it is."""

    mask: bytes  # public keys of X25519: for masks between two devices, ...
    seal: bytes  # ... and for shares that travel by way of the server
    commitment: bytes  # to the seed of its own mask
    signer: bytes = b""  # its node's public key; empty: unsigned
    signature: bytes = b""

    @property
    def keys(self) -> list[bytes]:
        """What must be no other's, and differ from each other: who drops out gives one of them away."""
        return [key for key in (self.mask, self.seal, self.signer) if key]

    def to_bytes(self) -> bytes:
        return self.mask + self.seal + self.commitment + self.signer + self.signature

    @classmethod
    def of(cls, payload: bytes) -> "Announcement":
        """The announcement that `to_bytes` made bytes of; whether it is true has to be checked."""
        ends = [SECRET, 2 * SECRET, 3 * SECRET, 3 * SECRET + _POINT, 3 * SECRET + _POINT + 2 * _HALF]
        if len(payload) not in (ends[2], ends[-1]):
            raise DataError(f"an announcement of {len(payload)} bytes")
        return cls(*(payload[start:end] for start, end in zip([0, *ends], ends, strict=False)))

    def signed(self, token: str, node: int, key: EllipticCurvePrivateKey) -> "Announcement":
        """The same, under the signature of the node's key."""
        point = key.public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
        own = replace(self, signer=point)
        numbers = decode_dss_signature(key.sign(own._statement(token, node), ECDSA(SHA384())))
        return replace(own, signature=b"".join(number.to_bytes(_HALF, "big") for number in numbers))

    def check(self, token: str, node: int, roster: "Roster | None") -> None:
        """Refuse it unless a node of the roster has signed it for this round; without a roster, unless it is whole."""
        for public in (self.mask, self.seal):
            agreed(_PROBE, public)  # what agrees on nothing with one key does so with none
        if not self.signer:
            if roster is not None:
                raise DataError(f"the keys of node {node} are not signed")
            return
        try:
            key = EllipticCurvePublicKey.from_encoded_point(SECP384R1(), self.signer)
            numbers = (int.from_bytes(self.signature[:_HALF], "big"), int.from_bytes(self.signature[_HALF:], "big"))
            key.verify(encode_dss_signature(*numbers), self._statement(token, node), ECDSA(SHA384()))
        except (ValueError, InvalidSignature):
            raise DataError(f"the keys of node {node} have a signature that is not for them") from None
        if roster is not None and _line_of(key) not in roster.keys:
            raise DataError(f"the keys of node {node} are signed by a node that is not on the roster")

    def _statement(self, token: str, node: int) -> bytes:
        named = (token.encode(), node.to_bytes(8, "big"))
        return framed(PROTOCOL, b"announcement", *named, self.mask, self.seal, self.commitment, self.signer)


def reused(announcements: Collection[Announcement]) -> bool:
    """Whether a key or a signer stands in more than one place."""
    keys = [key for said in announcements for key in said.keys]
    return len(set(keys)) < len(keys)


@dataclass(frozen=True)
class Roster:
    """The public keys of registered nodes."""

    keys: frozenset[str]  # as OpenSSH writes them, without comments

    @classmethod
    def of(cls, text: str, where: str) -> "Roster":
        """From lines as in `node.pub`; `where` names the file in errors."""
        found = set()
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if words[0] != _KIND or len(words) < 2:
                raise DataError(f"{where}: line {number}: not a public key of the kind {_KIND}")
            found.add(f"{words[0]} {words[1]}")
        if not found:
            raise DataError(f"{where}: no public keys in it")
        return cls(frozenset(found))


def roster_line(public_key: bytes, comment: str, where: str) -> str:
    """A node's line in a roster, from the contents of its public key's file."""
    try:
        key = load_ssh_public_key(public_key)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not (isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP384R1)):
        raise DataError(f"{where}: not a public key as `ssh-keygen -t ecdsa -b 384` makes them")
    return f"{_line_of(key)} {' '.join(comment.split())}".rstrip()


def signing_key(private_key: bytes, where: str) -> EllipticCurvePrivateKey:
    """A node's key, from the contents of its file."""
    try:
        key = load_ssh_private_key(private_key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not (isinstance(key, EllipticCurvePrivateKey) and isinstance(key.curve, SECP384R1)):
        raise DataError(f"{where}: not a key as `ssh-keygen -t ecdsa -b 384` makes them, without a password")
    return key


def _line_of(key: EllipticCurvePublicKey) -> str:
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
