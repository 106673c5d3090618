"""A secure sum between the two halves of the protocol, without messages: keys, devices, and who drops out when."""

from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    SSHCertificateBuilder,
    SSHCertificateType,
)

from fedbandit.deploy.masking.announcements import CommonTask, Roster, Signer, cohort_of, in_order
from fedbandit.deploy.masking.masked_sum import (
    MaskedSum,
    Sharing,
    accept,
    announce,
    masked,
    reveal,
    share,
    vouch,
)
from fedbandit.deploy.secure_sums import SecureMinimum

TOKEN = "a token"
TASK = bytes(range(32))


def node_key():
    """What a node signs with."""
    key = generate_private_key(SECP384R1())
    return Signer(key, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))


def public_line(signer):
    return signer.key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)


def private_file(signer):
    return signer.key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())


def certificate(signer, operator, after=0, before=2**64 - 1, kind=SSHCertificateType.USER):
    """An operator's word that a key is a node's, as `ssh-keygen -s` writes it."""
    built = (
        SSHCertificateBuilder()
        .public_key(signer.key.public_key())
        .serial(1)
        .type(kind)
        .key_id(b"device")
    )
    built = built.valid_for_all_principals().valid_after(after).valid_before(before)
    return built.sign(operator.key).public_bytes()


def roster_of(*keys):
    return Roster.of("\n".join(public_line(key).decode() for key in keys), "roster")


@dataclass
class MaskedRound:
    """One attempt at a round. `vectors` are points of the grid by node; the sets name who is lost at which step."""

    vectors: dict
    shares: int = 25
    threshold: float = 2 / 3
    keys: dict | None = None  # of nodes, by number; None: unsigned
    roster: Roster | None = None
    lost_before_packets: set = field(default_factory=set)
    lost_before_vectors: set = field(default_factory=set)
    lost_before_unmasking: set = field(default_factory=set)

    def __post_init__(self):
        nodes = list(self.vectors)
        self.terms = Sharing.of(len(nodes), self.shares, self.threshold)
        self.neighbours = self.terms.neighbours(nodes)
        both = {node: announce(TOKEN, node, self.keys and self.keys[node]) for node in nodes}
        self.own = {node: own for node, (own, _) in both.items()}
        self.announced = {node: said for node, (_, said) in both.items()}

    @property
    def common(self):
        return CommonTask(TOKEN, TASK, self.terms.threshold, cohort_of(self.announced))

    def introduced(self, node):
        """What the server says of a node's neighbours."""
        return {other: self.announced[other] for other in sorted(self.neighbours[node] - {node})}

    def share(self, node):
        known = self.introduced(node)
        return share(self.own[node], self.common, known, self.roster, SecureMinimum())

    def run(self):
        """The sum over those that sent a vector; `self.seen` has all masked vectors."""
        both = {node: self.share(node) for node in self.own if node not in self.lost_before_packets}
        self.shared = {node: kept for node, (kept, _, _) in both.items()}
        self.packets = {node: packets for node, (_, packets, _) in both.items()}
        self.signed = {node: signed for node, (_, _, signed) in both.items()}
        total = MaskedSum(self.common, len(next(iter(self.vectors.values()))))
        self.held, self.seen = {}, {}
        for node in self.shared.keys() - self.lost_before_vectors:
            self.held[node] = self.accept(node)
            self.seen[node] = masked(self.shared[node], self.held[node], self.vectors[node])
            total.add(node, self.seen[node])
        both = {node: vouch(held, in_order(total.nodes)) for node, held in self.held.items()}
        self.vouched = {node: kept for node, (kept, _) in both.items()}
        self.survivors = {node: signed for node, (_, signed) in both.items()}
        told = {
            node: reveal(self.vouched[node], self.statements_for(node))
            for node in self.held.keys() - self.lost_before_unmasking
        }
        kept = {
            node: {keeper: known[node] for keeper, known in told.items() if node in known}
            for node in self.shared
        }
        return total.unmasked(kept, self.announced, self.neighbours, self.shared)

    def accept(self, node):
        packets = self.packets_for(node)
        return accept(self.shared[node], packets, {other: self.signed[other] for other in packets})

    def statements_for(self, node):
        """What neighbours that are in the sum have signed."""
        others = (self.neighbours[node] - {node}) & self.survivors.keys()
        return {other: self.survivors[other] for other in others}

    def packets_for(self, node):
        return {other: packets[node] for other, packets in self.packets.items() if node in packets}


def some_vectors(number, size=50, seed=0, first=100):
    rng = np.random.default_rng(seed)
    return {first + i: rng.integers(0, 2**22 + 1, size) for i in range(number)}
