"""Signed statements of the devices of a secure sum: keys for one attempt, the common task, and who
is in the sum.

Keys are signed with the node's own key, which stands on a roster. The roster is installed on
devices: if servers relayed it, they could invent neighbours. A server that gives devices different
tasks could read one of them out of the sum (Pasquini et al. 2022): a digest of all that must be
alike goes into every mask, and devices sign it for each other. No I/O here.
"""

import json
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    SECP384R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    SSHCertificate,
    SSHCertificateType,
    load_ssh_private_key,
    load_ssh_public_identity,
)

from fedbandit.core.errors import DataError
from fedbandit.deploy.masking.primitives import (
    PROTOCOL,
    SECRET,
    SIGNATURE,
    agreed,
    digest_of,
    framed,
    is_signed,
    new_key,
    signature_of,
)

NODE = 8  # bytes of a node's number
STATEMENT = SECRET + SIGNATURE  # bytes of a signed digest
TASK, SURVIVORS = b"common task", b"survivors"  # what statements are about
_MEMBER = NODE + SECRET  # bytes of a node in the list of a cohort
_HALF = 48  # bytes of one of a signature's two numbers
_LONGEST = 8192  # bytes of an announcement; with a certificate it has about 1500
_KIND = "ecdsa-sha2-nistp384"
_AUTHORITY = "cert-authority"
_PROBE = new_key()


@dataclass(frozen=True)
class Signer:
    """A node's key, and what shows whose it is: the public key, or an operator's certificate for
    it, as text.
    """

    key: EllipticCurvePrivateKey
    identity: bytes


@dataclass(frozen=True)
class Announcement:
    """A device's public keys for one attempt at a round, and who it is.

    Keys are new for each attempt: a drop-out's key for masks is recovered by the others, and must
    open nothing else. The commitment holds the device to the seed of its own mask.
    """

    mask: bytes  # X25519: for masks between two devices, ...
    seal: bytes  # ... and for shares that travel by way of the server
    sign: bytes  # Ed25519: for what it states to its neighbours later
    commitment: bytes  # to the seed of its own mask
    signature: bytes = b""
    signer: bytes = b""  # its node's public key or certificate in OpenSSH's form; empty: unsigned

    @property
    def keys(self) -> list[bytes]:
        """Keys that no other device may have, nor one device twice: a drop-out gives one away."""
        own = [self.mask, self.seal, self.sign]
        return [*own, _line_of(_identity(self.signer)[0]).encode()] if self.signer else own

    def to_bytes(self) -> bytes:
        """As it travels, and as `of` reads it."""
        return self.mask + self.seal + self.sign + self.commitment + self.signature + self.signer

    @classmethod
    def of(cls, payload: bytes) -> "Announcement":
        """The announcement that `to_bytes` made bytes of; whether it is true has to be checked."""
        ends = [*(number * SECRET for number in range(1, 5)), 4 * SECRET + 2 * _HALF, _LONGEST]
        if not (len(payload) == ends[3] or ends[4] < len(payload) <= _LONGEST):
            raise DataError(f"an announcement of {len(payload)} bytes")
        return cls(*(payload[start:end] for start, end in zip([0, *ends], ends, strict=False)))

    def signed(self, token: str, node: int, signer: Signer) -> "Announcement":
        """The same, under the signature of the node's key."""
        own = replace(self, signer=signer.identity)
        numbers = decode_dss_signature(
            signer.key.sign(own._statement(token, node), ECDSA(SHA384()))
        )
        return replace(own, signature=b"".join(number.to_bytes(_HALF, "big") for number in numbers))

    def check(self, token: str, node: int, roster: "Roster | None") -> None:
        """Refuse it unless a node of the roster has signed it for this attempt.

        Without a roster it only has to be whole.
        """
        for public in (self.mask, self.seal):
            agreed(_PROBE, public)  # refused with one private key is refused with all
        if not self.signer:
            if roster is not None:
                raise DataError(f"the keys of node {node} are not signed")
            return
        key, certificate = _identity(self.signer)
        try:
            numbers = (
                int.from_bytes(self.signature[:_HALF], "big"),
                int.from_bytes(self.signature[_HALF:], "big"),
            )
            key.verify(
                encode_dss_signature(*numbers), self._statement(token, node), ECDSA(SHA384())
            )
        except (ValueError, InvalidSignature):
            raise DataError(
                f"the keys of node {node} have a signature that is not for them"
            ) from None
        if roster is not None and not roster.has(key, certificate, time.time()):
            raise DataError(
                f"the keys of node {node} are signed by a node that is not on the roster"
            )

    def _statement(self, token: str, node: int) -> bytes:
        named = (token.encode(), node.to_bytes(8, "big"))
        own = (self.mask, self.seal, self.sign, self.commitment, self.signer)
        return framed(PROTOCOL, b"announcement", *named, *own)


def reused(announcements: Collection[Announcement]) -> bool:
    """Whether a key or a signer stands in more than one place."""
    keys = [key for said in announcements for key in said.keys]
    return len(set(keys)) < len(keys)


@dataclass(frozen=True)
class Roster:
    """Whose word counts: public keys of nodes, and of operators who certify nodes. As OpenSSH
    writes them.
    """

    keys: frozenset[str]
    authorities: frozenset[str] = frozenset()

    @classmethod
    def of(cls, text: str, where: str) -> "Roster":
        """From lines as in `node.pub`, or `cert-authority` and a line as in `operator.pub`; errors
        name `where`.
        """
        keys, authorities = set(), set()
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if words[0] == _AUTHORITY and len(words) > 2:
                authorities.add(f"{words[1]} {words[2]}")
            elif words[0] == _KIND and len(words) > 1:
                keys.add(f"{words[0]} {words[1]}")
            else:
                what = f"not a public key of the kind {_KIND}, nor {_AUTHORITY}"
                raise DataError(f"{where}: line {number}: {what}")
        if not keys | authorities:
            raise DataError(f"{where}: no public keys in it")
        return cls(frozenset(keys), frozenset(authorities))

    def has(
        self, key: EllipticCurvePublicKey, certificate: SSHCertificate | None, now: float
    ) -> bool:
        """Whether a node is on it, or has a certificate by an operator who is, valid at
        this time.
        """
        if _line_of(key) in self.keys:
            return True
        if (
            certificate is None
            or certificate.type is not SSHCertificateType.USER
            or certificate.critical_options
        ):
            return False
        by = (
            certificate.signature_key()
            .public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
            .decode()
        )
        if (
            by not in self.authorities
            or not certificate.valid_after <= now < certificate.valid_before
        ):
            return False
        try:
            certificate.verify_cert_signature()
        except InvalidSignature:
            return False
        return True


def roster_line(public_key: bytes, comment: str, where: str) -> str:
    """A node's line in a roster, from the contents of its public key's file."""
    try:
        key, _ = _identity(public_key)
    except DataError:
        raise DataError(
            f"{where}: not a public key as `ssh-keygen -t ecdsa -b 384` makes them"
        ) from None
    return f"{_line_of(key)} {' '.join(comment.split())}".rstrip()


def signer_of(private_key: bytes, where: str, certificate: bytes | None = None) -> Signer:
    """A node's signer from the contents of its key's file, and of the certificate's if it has one;
    errors name `where`.
    """
    try:
        key = load_ssh_private_key(private_key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not (isinstance(key, EllipticCurvePrivateKey) and isinstance(key.curve, SECP384R1)):
        raise DataError(
            f"{where}: not a key as `ssh-keygen -t ecdsa -b 384` makes them, without a password"
        )
    own = _line_of(key.public_key())
    if certificate is None:
        return Signer(key, own.encode())
    try:
        found, certified = _identity(certificate)
        fits = certified is not None and _line_of(found) == own
    except DataError:
        fits = False
    if not fits:
        raise DataError(f"{where}: the certificate beside it is not for it")
    return Signer(key, b" ".join(certificate.split()[:2]))


def _identity(text: bytes) -> tuple[EllipticCurvePublicKey, SSHCertificate | None]:
    """The key in a line as OpenSSH writes it, and the certificate if it is one."""
    try:
        found = load_ssh_public_identity(text)
        certificate = found if isinstance(found, SSHCertificate) else None
        key = found if certificate is None else certificate.public_key()
    except (ValueError, UnsupportedAlgorithm):
        raise DataError("neither a node's public key nor a certificate of one") from None
    if not (isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP384R1)):
        raise DataError(f"not a key of the kind {_KIND}")
    return key, certificate


def _line_of(key: EllipticCurvePublicKey) -> str:
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def task_digest(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """The digest of a request to train: every fact in it, and every array with its type and
    shape.
    """
    parts = [json.dumps(dict(facts), sort_keys=True).encode()]
    for name, array in sorted(arrays.items()):
        described = json.dumps([name, array.dtype.str, array.shape]).encode()
        parts += [described, np.ascontiguousarray(array).tobytes()]
    return digest_of(b"task", *parts)


@dataclass(frozen=True)
class CommonTask:
    """All that the devices of one attempt must have been told alike."""

    token: str
    task: bytes  # the digest of the request to train
    threshold: int  # shares that recover a secret
    cohort: bytes  # who takes part, and with which keys: see `cohort_of`

    @property
    def digest(self) -> bytes:
        """32 bytes that differ wherever any of it does."""
        threshold = self.threshold.to_bytes(NODE, "big")
        return digest_of(TASK, self.token.encode(), self.task, threshold, self.cohort)

    @property
    def size(self) -> int:
        """The devices of the cohort."""
        return len(self.cohort) // _MEMBER

    def check_holds(self, announced: Mapping[int, Announcement]) -> None:
        """Refuse a cohort in which these nodes are not, each with the keys that it announced."""
        entries = [
            self.cohort[start : start + _MEMBER] for start in range(0, len(self.cohort), _MEMBER)
        ]
        nodes = [entry[:NODE] for entry in entries]
        if len(self.cohort) % _MEMBER or any(a >= b for a, b in pairwise(nodes)):
            raise DataError("cohort: not a list of nodes in their order")
        own = cohort_of(announced)
        if not {own[at : at + _MEMBER] for at in range(0, len(own), _MEMBER)} <= set(entries):
            raise DataError("cohort: not with the keys that this device and its neighbours have")


def cohort_of(announced: Mapping[int, Announcement]) -> bytes:
    """Each node's number and the digest of its announcement, in the order of the numbers."""
    return b"".join(
        node.to_bytes(NODE, "big") + digest_of(b"announcement", announced[node].to_bytes())
        for node in sorted(announced)
    )


def survivors_of(nodes: bytes) -> set[int]:
    """The nodes in a list as `in_order` writes it; refuses any other."""
    found = [int.from_bytes(nodes[at : at + NODE], "big") for at in range(0, len(nodes), NODE)]
    if in_order(found) != nodes:
        raise DataError("survivors: not a list of nodes in their order")
    return set(found)


def in_order(nodes: Iterable[int]) -> bytes:
    """Nodes as bytes, each once, in the order of their numbers."""
    return b"".join(node.to_bytes(NODE, "big") for node in sorted(set(nodes)))


def statement(key: bytes, purpose: bytes, digest: bytes) -> bytes:
    """A digest under the signature of a device's key for this attempt."""
    return digest + signature_of(key, framed(PROTOCOL, purpose, digest))


def check_alike(
    said: Mapping[int, bytes], signers: Mapping[int, bytes], purpose: bytes, own: bytes, what: str
) -> None:
    """Refuse unless each of these nodes has signed the very digest that this device has."""
    for node, signed in said.items():
        if node not in signers:
            raise DataError(f"a statement of node {node}, which is no neighbour")
        found = signed[:SECRET]
        if not is_signed(signers[node], signed[SECRET:], framed(PROTOCOL, purpose, found)):
            raise DataError(f"node {node} has not signed what the server relays in its name")
        if found != own:
            raise DataError(f"the server has told node {node} of {what} than this device")
