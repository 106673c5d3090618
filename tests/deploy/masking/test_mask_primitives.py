"""What masks are made of: sharing, keystreams, packets and signatures do what they say, and nothing else passes."""

import shutil
import subprocess
from itertools import combinations

import numpy as np
import pytest

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.serialization import SSHCertificateType
from masked_round import TOKEN, certificate, node_key, private_file, public_line, roster_of

from fedbandit.core.errors import DataError
from fedbandit.deploy.masking.announcements import (
    Announcement,
    Roster,
    Signer,
    reused,
    roster_line,
    signer_of,
)
from fedbandit.deploy.masking.masked_sum import announce
from fedbandit.deploy.masking.primitives import (
    PRIME,
    SHARE,
    add_mask,
    agreed,
    derived,
    framed,
    new_key,
    opened,
    packed,
    public_of,
    recovered,
    sealed,
    shares_of,
    unpacked,
)

EDGES = [bytes(32), bytes([255] * 32), bytes(31) + b"\x01", bytes(range(32))]


@pytest.mark.parametrize("secret", EDGES)
def test_any_threshold_of_the_shares_recovers_the_secret(secret):
    shares = dict(enumerate(shares_of(secret, 6, 4), 1))
    assert {len(share) for share in shares.values()} == {SHARE}
    for places in combinations(shares, 4):
        assert recovered({place: shares[place] for place in places}) == secret
    assert recovered(shares) == secret
    for places in combinations(shares, 3):
        assert recovered({place: shares[place] for place in places}) != secret


def test_fewer_shares_than_the_threshold_fit_every_secret():
    """With two shares of three needed, each secret in the field has the one third share that leads to it."""
    known = dict(enumerate(shares_of(EDGES[3], 3, 3)[:2], 1))
    low = int.from_bytes(recovered({**known, 3: bytes(SHARE)}) or bytes(32), "big")
    one = int.from_bytes(recovered({**known, 3: (1).to_bytes(SHARE, "big")}) or bytes(32), "big")
    slope = (one - low) % PRIME
    for wanted in (0, 1, 2**255):
        third = (wanted - low) * pow(slope, -1, PRIME) % PRIME
        assert recovered({**known, 3: third.to_bytes(SHARE, "big")}) == wanted.to_bytes(32, "big")


def test_a_wrong_share_makes_another_secret():
    shares = dict(enumerate(shares_of(EDGES[3], 5, 3), 1))
    wrong = {**shares, 2: bytes([shares[2][0], *shares[2][1:-1], shares[2][-1] ^ 1])}
    for places in combinations(shares, 3):
        assert (recovered({place: wrong[place] for place in places}) == EDGES[3]) is (
            2 not in places
        )


def test_the_field_is_one():
    """Fermat's test to forty bases; a number that is not prime and not chosen to deceive fails nearly every base."""
    assert all(pow(base, PRIME - 1, PRIME) == 1 for base in range(2, 42))
    assert PRIME > 2**256


@pytest.mark.parametrize("size", [0, 1, 8191, 8192, 8193, 30_000])
def test_a_mask_that_is_added_and_taken_away_leaves_nothing(size):
    rng = np.random.default_rng(size)
    entries = rng.integers(0, 2**63, size).astype(np.uint64)
    total, seed = entries.copy(), rng.bytes(32)
    add_mask(total, seed, 1)
    assert size == 0 or not np.array_equal(total, entries)
    longer = np.zeros(size + 5, np.uint64)
    add_mask(longer, seed, 1)
    np.testing.assert_array_equal(longer[:size], total - entries)
    add_mask(total, seed, -1)
    np.testing.assert_array_equal(total, entries)


def test_masks_are_those_of_aes_in_counter_mode():
    """FIPS 197's example for a key of 256 bits tells the first block only in ECB; CTR of zeros is ECB of counters."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    seed = bytes(range(32))
    block = Cipher(algorithms.AES(seed), modes.ECB()).encryptor()
    stream = b"".join(block.update(counter.to_bytes(16, "big")) for counter in range(4))
    total = np.zeros(8, np.uint64)
    add_mask(total, seed, 1)
    np.testing.assert_array_equal(total, np.frombuffer(stream, "<u8"))


def test_entries_travel_in_five_bytes():
    entries = np.array([0, 1, 2**22, 2**40 - 1, 2**40, 2**63 + 5], np.uint64)
    assert len(packed(entries)) == 5 * 6
    assert unpacked(packed(entries)).tolist() == [0, 1, 2**22, 2**40 - 1, 0, 5]


@pytest.mark.parametrize(
    "public",
    [
        bytes(32),
        b"\x01" + bytes(31),
        bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
        bytes(31),
    ],
)
def test_public_keys_that_agree_on_zero_whatever_the_other_is(public):
    with pytest.raises(DataError, match="invalid public key"):
        agreed(new_key(), public)


def test_two_keys_agree_and_purposes_and_contexts_keep_apart():
    one, two = new_key(), new_key()
    secret = agreed(one, public_of(two))
    assert secret == agreed(two, public_of(one))
    made = [
        derived(secret, *parts) for parts in ((b"a",), (b"b",), (b"a", b""), (b"a", b"b"), (b"ab",))
    ]
    assert len(set(made)) == len(made)
    assert framed(b"ab", b"c") != framed(b"a", b"bc")


@pytest.mark.parametrize(
    "change", [lambda p: p[:-1], lambda p: bytes([p[0] ^ 1]) + p[1:], lambda p: p + b"x"]
)
def test_a_packet_opens_for_its_key_and_context_alone(change):
    key = new_key()
    packet = sealed(key, b"shares", b"from 1 to 2")
    assert opened(key, packet, b"from 1 to 2") == b"shares"
    for attempt in (
        (key, change(packet), b"from 1 to 2"),
        (key, packet, b"from 2 to 1"),
        (new_key(), packet, b""),
    ):
        with pytest.raises(DataError, match="did not seal"):
            opened(*attempt)


def test_an_announcement_counts_for_its_node_and_round_if_its_signer_is_on_the_roster():
    key, other = node_key(), node_key()
    _, said = announce(TOKEN, 7, key)
    assert Announcement.of(said.to_bytes()) == said
    said.check(TOKEN, 7, roster_of(other, key))
    said.check(TOKEN, 7, None)
    for token, node, roster, why in (
        (TOKEN, 7, roster_of(other), "signed by a node that is not on the roster"),
        (TOKEN, 8, roster_of(key), "not for them"),
        ("another", 7, roster_of(key), "not for them"),
        (TOKEN, 8, None, "not for them"),
    ):
        with pytest.raises(DataError, match=why):
            said.check(token, node, roster)


@pytest.mark.parametrize("place", [0, 32, 64, 96, 191, 192, 250, -1])
def test_no_byte_of_an_announcement_can_be_changed(place):
    key = node_key()
    payload = bytearray(announce(TOKEN, 7, key)[1].to_bytes())
    payload[place] ^= 1
    with pytest.raises(DataError, match=r"not for them|neither a node's public key"):
        Announcement.of(bytes(payload)).check(TOKEN, 7, roster_of(key))


def test_an_operators_certificate_stands_for_a_line_of_the_roster():
    key, operator, other = node_key(), node_key(), node_key()
    roster = Roster.of(f"cert-authority {public_line(operator).decode()} us", "roster")

    def checked(made, signs=key):
        signer = signer_of(private_file(signs), "node", made)
        Announcement.of(announce(TOKEN, 7, signer)[1].to_bytes()).check(TOKEN, 7, roster)

    checked(certificate(key, operator))
    checked(certificate(key, operator, 1, 2**40))
    for wrong in (
        certificate(key, other),
        certificate(key, operator, before=1000),
        certificate(key, operator, after=2**40),
        certificate(key, operator, kind=SSHCertificateType.HOST),
        None,
    ):
        with pytest.raises(DataError, match="signed by a node that is not on the roster"):
            checked(wrong)
    for wrong in (certificate(other, operator), public_line(key), b"what"):
        with pytest.raises(DataError, match="node: the certificate beside it is not for it"):
            checked(wrong)
    stolen = Signer(other.key, certificate(key, operator))
    with pytest.raises(DataError, match="not for them"):
        announce(TOKEN, 7, stolen)[1].check(TOKEN, 7, roster)


@pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="needs ssh-keygen")
@pytest.mark.parametrize("kind", [("ecdsa", "-b", "384"), ("ed25519",)])
def test_certificates_and_keys_as_ssh_keygen_makes_them(tmp_path, kind):
    def keygen(*arguments):
        subprocess.run(["ssh-keygen", "-q", *map(str, arguments)], check=True, capture_output=True)

    node, operator = tmp_path / "node-0", tmp_path / "operator"
    keygen("-t", "ecdsa", "-b", "384", "-N", "", "-f", node)
    keygen("-t", *kind, "-N", "", "-f", operator)
    keygen("-s", operator, "-I", "device-0", "-V", "+52w", f"{node}.pub")
    made = (tmp_path / "node-0-cert.pub").read_bytes()
    _, said = announce(TOKEN, 7, signer_of(node.read_bytes(), "node-0", made))
    said.check(
        TOKEN, 7, Roster.of(f"cert-authority {operator.with_suffix('.pub').read_text()}", "roster")
    )
    said.check(
        TOKEN,
        7,
        Roster.of(
            roster_line((tmp_path / "node-0.pub").read_bytes(), "device-0", "node-0"), "roster"
        ),
    )


def test_a_forged_certificate_does_not_count():
    import base64

    key, operator = node_key(), node_key()
    kind, blob = certificate(key, operator).split()[:2]
    forged = bytearray(base64.b64decode(blob))
    forged[-1] ^= 1
    roster = Roster.of(f"cert-authority {public_line(operator).decode()}", "roster")
    said = announce(TOKEN, 7, Signer(key.key, kind + b" " + base64.b64encode(bytes(forged))))[1]
    with pytest.raises(DataError, match="not on the roster"):
        said.check(TOKEN, 7, roster)


def test_one_node_with_two_certificates_is_one_node():
    key, operator = node_key(), node_key()
    one, two = (Signer(key.key, certificate(key, operator, before=2**40 + i)) for i in range(2))
    assert reused([announce(TOKEN, 1, one)[1], announce(TOKEN, 2, two)[1]])
    assert reused([announce(TOKEN, 1, one)[1], announce(TOKEN, 2, key)[1]])
    assert not reused([announce(TOKEN, 1, one)[1], announce(TOKEN, 2, node_key())[1]])


def test_an_unsigned_announcement_is_refused_where_there_is_a_roster():
    _, said = announce(TOKEN, 7, None)
    said.check(TOKEN, 7, None)
    with pytest.raises(DataError, match="keys of node 7 are not signed"):
        said.check(TOKEN, 7, roster_of(node_key()))
    for payload in (b"", said.to_bytes() + b"x", said.to_bytes()[:-1], bytes(192), bytes(8193)):
        with pytest.raises(DataError, match="an announcement of"):
            Announcement.of(payload)


def test_a_roster_is_a_list_of_public_keys():
    key = node_key()
    line = roster_line(public_line(key) + b" somebody@somewhere", "device 0", "node.pub")
    assert line == f"{public_line(key).decode()} device 0"
    assert Roster.of(f"# nodes\n\n{line}\n", "roster") == roster_of(key)
    for text, why in (
        ("", "no public keys"),
        ("ssh-rsa AAAA x", "line 1: not a public key"),
        ("what", "line 1"),
    ):
        with pytest.raises(DataError, match=why):
            Roster.of(text, "roster")
    for wrong in (b"", b"ssh-rsa AAAA", public_line(key)[:40]):
        with pytest.raises(DataError, match=r"node\.pub: not a public key"):
            roster_line(wrong, "x", "node.pub")


def test_a_key_of_another_kind_signs_nothing():
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

    other = Signer(generate_private_key(SECP256R1()), b"")
    assert signer_of(private_file(node_key()), "node").key.curve.name == "secp384r1"
    for wrong in (private_file(other), b"", b"nonsense"):
        with pytest.raises(DataError, match="node: not a key"):
            signer_of(wrong, "node")
    with pytest.raises(DataError, match=r"node\.pub: not a public key"):
        roster_line(public_line(other), "x", "node.pub")
