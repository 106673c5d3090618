"""What one secure sum costs its server: simulated devices with signed keys, some of which drop out after sharing.

    python scripts/secure_sum_cost.py --devices 1000 --weights 500000 --lost 0.1
    python scripts/secure_sum_cost.py --noise --out scripts/results/secure_sum_cost.json

With `--out` the numbers are kept, beside those of the other kind of sum (with or without noise
from the devices) that the file has already. Both halves of the protocol run in one process and its
clock is read around each of them. The work of a transport on the messages is not in it. Exits with
code 1 if the sum is wrong.
"""

import argparse
import json
import logging
import resource
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedbandit.deploy.masking import primitives as wire
from fedbandit.deploy.masking.announcements import (
    STATEMENT,
    Announcement,
    CommonTask,
    Roster,
    Signer,
    task_digest,
)
from fedbandit.deploy.masking.masked_sum import (
    Announced,
    Shared,
    accept,
    announce,
    masked,
    reveal,
    share,
    vouch,
)
from fedbandit.deploy.messages import Reply, Request, RequestPoller
from fedbandit.deploy.secure_sums import (
    RANGE,
    STEP,
    Figures,
    SecureMinimum,
    encode,
    update_error,
)
from fedbandit.deploy.server.deployment import Deployment, build_deployment
from fedbandit.deploy.server.secure_gathering import SecureSums
from fedbandit.privacy.noise import SECURE

ACTIONS = 10


class Devices:
    """A transport to devices that answer when they are asked for their replies, a few at a time."""

    def __init__(self, number: int, lost: Collection[int], deployment: Deployment) -> None:
        self._lost, self._deployment = lost, deployment
        keys = {node: generate_private_key(SECP384R1()) for node in range(1, number + 1)}
        self._keys = {
            node: Signer(key, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
            for node, key in keys.items()
        }
        lines = [signer.identity.decode() for signer in self._keys.values()]
        self._roster = Roster.of("\n".join(lines), "roster")
        self._kept: dict[int, Any] = {}
        self._open: dict[str, Request] = {}
        self.total = np.zeros(deployment.initial.size)
        self.noise = np.zeros(deployment.initial.size, np.int64)
        self.seconds, self.drawing, self.sent, self.now = 0.0, 0.0, 0, 0.0

    def nodes(self) -> list[int]:
        return list(self._keys)

    def send(self, requests: Sequence[Request]) -> list[str]:
        tickets = [f"{request.node} {request.sealed.get(wire.STEP)}" for request in requests]
        self._open.update(zip(tickets, requests, strict=True))
        return tickets

    def receive(self, tickets: Collection[str]) -> list[Reply]:
        with self._own_time():
            due = [
                ticket for ticket in tickets if ticket in self._open and not self._silent(ticket)
            ]
            return [self._answer(ticket, self._open.pop(ticket)) for ticket in due[:16]]

    def wait(self, seconds: float) -> None:
        self.now += 0.0 if any(not self._silent(ticket) for ticket in self._open) else seconds

    def _silent(self, ticket: str) -> bool:
        node, step = ticket.split()
        return int(node) in self._lost and step == wire.VECTOR

    @contextmanager
    def _own_time(self) -> Any:
        before = time.process_time()
        yield
        self.seconds += time.process_time() - before

    def _answer(self, ticket: str, request: Request) -> Reply:
        node, said = request.node, request.sealed
        facts = {"protocol": 2, "token": request.facts["token"]}
        if request.kind == "ready":
            self._kept[node], announcement = announce(facts["token"], node, self._keys[node])
            facts |= {"device": f"device {node}", "version": 0, "ready": True}
            return Reply(ticket, facts, sealed={wire.ANNOUNCEMENT: announcement.to_bytes()})
        if said[wire.STEP] == wire.VECTOR:
            assert task_digest(request.facts, request.arrays) == self._kept[node].task
        steps = {
            wire.SHARES: self._share,
            wire.VECTOR: self._mask,
            wire.SURVIVORS: self._vouch,
            wire.UNMASK: self._reveal,
        }
        return Reply(ticket, facts, sealed=steps[said[wire.STEP]](node, said))

    def _share(self, node: int, said: Mapping[str, Any]) -> Mapping[str, Any]:
        own: Announced = self._kept[node]
        neighbours = {
            other: Announcement.of(parcel) for other, parcel in wire.read_parcels(said).items()
        }
        common = CommonTask(
            own.token, said[wire.TASK], wire.read_number(said, wire.THRESHOLD), said[wire.COHORT]
        )
        self._kept[node], packets, signed = share(
            own, common, neighbours, self._roster, SecureMinimum()
        )
        return {**wire.parcels(packets), wire.STATEMENT: signed}

    def _mask(self, node: int, said: Mapping[str, Any]) -> Mapping[str, Any]:
        shared: Shared = self._kept[node]
        rng = np.random.default_rng(node)
        update = rng.random(self.total.size, np.float32) - np.float32(0.5)
        update /= np.linalg.norm(update) * 1.01
        self.total += update
        both = wire.read_parcels(said)
        packets = {other: parcel[:-STATEMENT] for other, parcel in both.items()}
        signed = {other: parcel[-STATEMENT:] for other, parcel in both.items()}
        self._kept[node] = accept(shared, packets, signed)
        bounds, ledger = self._deployment.rules.bounds, self._deployment.ledger
        if ledger is None:
            levels = encode(Figures(update, 1, 1, 0.5, 0.5), 1.0, bounds, rng)
        else:
            levels = encode(Figures(update, 0, 0, 0.0, 0.0, 0), 1.0, bounds, rng)
            before = time.process_time()
            share = ledger.tolerance.drawn(
                update.size, len(self._keys), ledger.plan.noise_multiplier, STEP / RANGE
            )
            self.drawing += time.process_time() - before
            levels[: update.size] += share
            self.noise += share
        vector = masked(shared, self._kept[node], levels)
        self.sent = len(vector)
        return {wire.MASKED: vector}

    def _reveal(self, node: int, said: Mapping[str, Any]) -> Mapping[str, Any]:
        return wire.parcels(reveal(self._kept.pop(node), wire.read_parcels(said)))

    def _vouch(self, node: int, said: Mapping[str, Any]) -> Mapping[str, Any]:
        self._kept[node], signed = vouch(self._kept[node], said[wire.SURVIVORS])
        return {wire.STATEMENT: signed}


def deployment_of(devices: int, weights: int, folder: Path, noise: bool) -> Deployment:
    values = {
        "rounds": 1,
        "clients_per_round": devices,
        "clipping": {"norm": 1.0},
        "deployment": {
            "state": "server",
            "actions": [f"action {i}" for i in range(ACTIONS)],
            "shape": [weights // ACTIONS - 1],
            "secure_aggregation": True,
            "min_reports": 3,
        },
    }
    if noise:
        values["privacy"] = {"mechanism": "dp-fedavg", "noise": "devices", "noise_multiplier": 4.0}
        values["privacy"] |= {"sampling": "fixed", "dropout": 0.2, "colluders": 0.1}
        values["deployment"] |= {"population": devices}
    return build_deployment(values, folder)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--weights", type=int, default=500_000, help=f"a multiple of {ACTIONS}")
    parser.add_argument(
        "--lost", type=float, default=0.1, help="the part of the devices that drops out"
    )
    parser.add_argument("--noise", action="store_true", help="devices add their own noise")
    parser.add_argument("--out", type=Path, help="a JSON file to keep the numbers in")
    given = parser.parse_args()
    logging.getLogger("fedbandit").setLevel(logging.ERROR)  # that devices drop out is meant
    with tempfile.TemporaryDirectory() as folder:
        deployment = deployment_of(given.devices, given.weights, Path(folder), given.noise)
        lost = set(
            np.random.default_rng(0).choice(
                given.devices, int(given.lost * given.devices), replace=False
            )
            + 1
        )
        devices = Devices(given.devices, lost, deployment)
        courier = RequestPoller(devices, lambda: devices.now, devices.wait, 1.0)
        before = time.process_time()
        found = SecureSums(deployment, courier).gather(
            deployment.start(), 1, devices.nodes(), lambda _: {}
        )
        seconds = time.process_time() - before - devices.seconds
    if found is None:
        print("no  a sum came about")
        return 1
    total, summed = found.total, found.accepted + found.idle
    if given.noise:
        total = SECURE.centred(found.total - devices.noise) * SECURE.step
    error = float(np.abs(total - devices.total).max())
    bound = update_error(summed, 1.0) + 1e-4  # the total is kept in float32
    right = error < bound and summed == given.devices - len(lost)
    cost = {
        "devices": given.devices,
        "in_the_sum": summed,
        "weights": devices.total.size,
        "sent_bytes": devices.sent,
        "server_seconds": round(seconds, 2),
        "device_seconds": round(devices.seconds / given.devices, 6),
        "of_it_noise_seconds": round(devices.drawing / given.devices, 6),
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "error": error,
        "right": right,
    }
    for line in in_words(cost):
        print(line)
    if given.out is not None:
        kept = json.loads(given.out.read_text()) if given.out.exists() else {}
        kept["devices' noise" if given.noise else "no noise of devices"] = cost
        given.out.write_text(json.dumps(kept, indent=1) + "\n")
    return 0 if right else 1


def in_words(cost: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"in the sum           {cost['in_the_sum']} of {cost['devices']} devices,"
        f" {cost['weights']} weights each"
    )
    yield f"sent by a device     {cost['sent_bytes'] / 1e6:.2f} MB in its masked vector"
    yield f"server's CPU         {cost['server_seconds']:.1f} s"
    yield f"a device's CPU       {cost['device_seconds']:.2f} s"
    if cost["of_it_noise_seconds"]:
        yield f"of it, noise         {cost['of_it_noise_seconds']:.2f} s"
    yield f"memory at most       {cost['memory_mb']} MB, both sides"
    yield f"{'yes' if cost['right'] else 'no '}  the sum is right: within {cost['error']:.1e}"


if __name__ == "__main__":
    sys.exit(main())
