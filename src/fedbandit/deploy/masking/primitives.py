"""Building blocks of masks: agreed keys, keystreams, sealed packets, signatures, shares of a secret,
and the messages of a secure sum.

All of the cryptography comes from the library of that name except the sharing, which it has not.
Neither side believes anything in a message before it is checked here. Knows no round.

| step | to a device | back |
| --- | --- | --- |
| `ready` | (the token of the attempt) | its announcement |
| `shares` | common task, its neighbours' announcements | a packet for each neighbour, a statement |
| `vector` | packets and statements of its neighbours, beside the task | its masked vector |
| `survivors` | who is in the sum | a statement |
| `unmask` | statements of its neighbours | one share of each neighbour |
"""

import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256, Hash
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedbandit.core.errors import DataError
from fedbandit.deploy.secure_sums import MODULUS, MOST_SHARES

PROTOCOL = b"fedbandit secure sum 2"
SECRET = 32  # bytes of a key, of a seed and of a digest
SHARE = 33  # bytes of a share
TAG = 16  # bytes that sealing adds
SIGNATURE = 64  # bytes of a signature with a key of one attempt
PRIME = 2**256 + 297  # the first one beyond 32 bytes
ENTRY = 5  # bytes of an entry on the wire: what MODULUS takes
_CHUNK = 1 << 16  # bytes of keystream at a time, which stay in the core's cache
_ZEROS = bytes(_CHUNK)

assert MODULUS == 256**ENTRY


def framed(*parts: bytes) -> bytes:
    """Parts as one text of bytes, in which none can be taken for a piece of another."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def derived(secret: bytes, purpose: bytes, *context: bytes) -> bytes:
    """A 256-bit key for one purpose in one context."""
    return HKDF(SHA256(), SECRET, None, framed(PROTOCOL, purpose, *context)).derive(secret)


def digest_of(purpose: bytes, *parts: bytes) -> bytes:
    """A digest of some parts for one purpose; of a random secret it tells nothing."""
    found = Hash(SHA256())
    found.update(framed(PROTOCOL, purpose, *parts))
    return found.finalize()


def new_signing_key() -> bytes:
    """A private key of Ed25519."""
    return Ed25519PrivateKey.generate().private_bytes_raw()


def signing_public_of(private: bytes) -> bytes:
    """The public key that checks what a private one has signed."""
    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def signature_of(private: bytes, content: bytes) -> bytes:
    """A signature of SIGNATURE bytes."""
    return Ed25519PrivateKey.from_private_bytes(private).sign(content)


def is_signed(public: bytes, signature: bytes, content: bytes) -> bool:
    """Whether the owner of a public key has signed the content."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True


def new_key() -> bytes:
    """A private key of X25519."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_of(private: bytes) -> bytes:
    """The public key that belongs to a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agreed(private: bytes, public: bytes) -> bytes:
    """The secret between two keys; refuses public keys for which it is zero with any
    private one.
    """
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(
            X25519PublicKey.from_public_bytes(public)
        )
    except ValueError:
        raise DataError("invalid public key") from None


def add_mask(total: np.ndarray, seed: bytes, sign: int) -> None:
    """Add the mask of a seed to uint64 entries in place, or take it away; entries count modulo
    2**64.

    The nonce is zero because no seed makes more than one keystream.
    """
    stream = Cipher(AES256(seed), CTR(bytes(16))).encryptor()
    room = bytearray(_CHUNK + 15)
    words = np.frombuffer(room, "<u8", _CHUNK // 8)
    for start in range(0, len(total), len(words)):
        part = total[start : start + len(words)]
        stream.update_into(_ZEROS[: 8 * len(part)], room)
        if sign > 0:
            part += words[: len(part)]
        else:
            part -= words[: len(part)]


def packed(entries: np.ndarray) -> bytes:
    """Uint64 entries modulo MODULUS, ENTRY bytes each."""
    return entries.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :ENTRY].tobytes()


def unpacked(payload: bytes) -> np.ndarray:
    """The entries that `packed` was given, modulo MODULUS."""
    wide = np.zeros((len(payload) // ENTRY, 8), np.uint8)
    wide[:, :ENTRY] = np.frombuffer(payload, np.uint8).reshape(-1, ENTRY)
    entries: np.ndarray = wide.view("<u8")[:, 0]
    return entries


def sealed(key: bytes, content: bytes, context: bytes) -> bytes:
    """Encrypt content for the holders of the key, who notice any change.

    The nonce is zero because a key seals one packet.
    """
    return ChaCha20Poly1305(key).encrypt(bytes(12), content, context)


def opened(key: bytes, packet: bytes, context: bytes) -> bytes:
    """The content of a packet."""
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), packet, context)
    except InvalidTag:
        raise DataError(
            "a packet that its sender did not seal for this device in this round"
        ) from None


def shares_of(secret: bytes, number: int, threshold: int) -> list[bytes]:
    """Shares 1 to `number` of a secret of 32 bytes (Shamir): `threshold` of them recover it, fewer
    tell nothing.

    Examples:
        >>> secret = bytes(range(32))
        >>> first, second, third = shares_of(secret, 3, threshold=2)
        >>> recovered({1: first, 3: third}) == secret, recovered({1: first}) == secret
        (True, False)
    """
    assert len(secret) == SECRET
    assert 0 < threshold <= number
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)] + [
        int.from_bytes(secret, "big")
    ]
    found = []
    for place in range(1, number + 1):
        value = 0
        for coefficient in coefficients:
            value = (value * place + coefficient) % PRIME
        found.append(value.to_bytes(SHARE, "big"))
    return found


def recovered(shares: Mapping[int, bytes]) -> bytes | None:
    """The secret of which these are `threshold` shares, by their places from 1; of wrong ones,
    another or None.
    """
    values = {place: int.from_bytes(share, "big") for place, share in shares.items()}
    secret = 0
    for place, value in values.items():
        above, below = 1, 1
        for other in values:
            if other != place:
                above, below = above * other % PRIME, below * (other - place) % PRIME
        secret = (secret + value * above * pow(below, -1, PRIME)) % PRIME
    return secret.to_bytes(SECRET, "big") if secret < 1 << 8 * SECRET else None


Said = Mapping[str, Any]
"""One message: numbers, texts, bytes and lists of one of these."""
STEP = "step"
SHARES, VECTOR, SURVIVORS, UNMASK = "shares", "vector", "survivors", "unmask"
STEPS = (SHARES, VECTOR, SURVIVORS, UNMASK)
THRESHOLD, TASK, COHORT, NODES, PARCELS = "threshold", "task", "cohort", "nodes", "parcels"
ANNOUNCEMENT, STATEMENT = "announcement", "statement"
MASKED = "vector"
_MOST_NODES = 2**64


def parcels(by_node: Mapping[int, bytes]) -> dict[str, Any]:
    """Bytes for or from each of some nodes."""
    return {NODES: list(by_node), PARCELS: list(by_node.values())}


def read_parcels(said: Mapping[str, Any], length: int | None = None) -> dict[int, bytes]:
    """The bytes by node; all of them as long as `length` if it is given."""
    nodes, found = _read_nodes(said), said.get(PARCELS, [])
    if not (isinstance(found, list) and all(isinstance(parcel, bytes) for parcel in found)):
        raise DataError(f"{PARCELS}: not a list of bytes")
    if len(nodes) != len(found):
        raise DataError(f"{PARCELS}: {len(found)} for {len(nodes)} nodes")
    if length is not None and any(len(parcel) != length for parcel in found):
        raise DataError(f"{PARCELS}: not of {length} bytes each")
    return dict(zip(nodes, found, strict=True))


def _read_nodes(said: Mapping[str, Any]) -> list[int]:
    nodes = said.get(NODES, [])  # an empty list does not travel
    if not (isinstance(nodes, list) and len(nodes) < MOST_SHARES + 1):
        raise DataError(f"{NODES}: not a list of at most {MOST_SHARES} nodes")
    if not all(type(node) is int and 0 <= node < _MOST_NODES for node in nodes):
        raise DataError(f"{NODES}: not the numbers of nodes")
    if len(set(nodes)) < len(nodes):
        raise DataError(f"{NODES}: a node stands in it twice")
    return nodes


def read_number(said: Mapping[str, Any], name: str) -> int:
    """A whole number that is not negative."""
    found = said.get(name)
    if not (type(found) is int and found >= 0):
        raise DataError(f"{name}: not a whole number")
    return found


def read_bytes(said: Mapping[str, Any], name: str, length: int | None = None) -> bytes:
    """Bytes, as many as `length` if it is given."""
    found = said.get(name)
    if not isinstance(found, bytes) or length not in (None, len(found)):
        raise DataError(f"{name}: no bytes" + ("" if length is None else f", or not {length}"))
    return found
