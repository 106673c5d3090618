"""A device's part in secure sums, step by step. What it keeps in between is in its folder.

A step takes what it needs out of the folder before it answers, so that no request is answered
twice: two vectors under the same masks, or two answers about one neighbour, would tell the server
what the protocol hides.
"""

import hashlib
import logging
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.core.files import read_small
from fedbandit.deploy.device.device_identity import Instructions, Limits, read_instructions
from fedbandit.deploy.masking import primitives as wire
from fedbandit.deploy.masking.announcements import (
    STATEMENT,
    Announcement,
    CommonTask,
    Roster,
    Signer,
    signer_of,
    task_digest,
)
from fedbandit.deploy.masking.masked_sum import (
    Announced,
    Held,
    Shared,
    Vouched,
    accept,
    announce,
    masked,
    reveal,
    share,
    vouch,
)
from fedbandit.deploy.masking.primitives import SECRET, SHARE, TAG
from fedbandit.deploy.secure_sums import SecureMinimum

_logger = logging.getLogger("fedbandit.deploy")
Kept = TypeVar("Kept", Announced, Shared, Held, Vouched)
_PACKET = 2 * SHARE + TAG


class Contributor(Protocol):
    """The device behind the protocol: its log, and its account of what it has released."""

    def contribute(
        self, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray], cohort: int
    ) -> np.ndarray: ...

    def release(self, token: str) -> None: ...


@dataclass(frozen=True)
class Identity:
    """A device's key and the roster of those whom it believes, as its operator has installed them.

    Beside the key `node` there may be an operator's certificate for it in `node-cert.pub`, as
    `ssh-keygen -s` makes it. `unsigned` does without a roster, to try things out: the server could
    then pose as all of the neighbours.
    """

    roster: Path | None = None
    key: Path | None = None
    unsigned: bool = False

    def read(self) -> tuple[Roster | None, Signer | None]:
        """The roster and what to sign with; refuses to do without."""
        roster = None
        if self.roster is not None:
            roster = Roster.of(_contents(self.roster).decode("utf-8", "replace"), str(self.roster))
        elif not self.unsigned:
            raise DataError(
                "this device has no roster of registered nodes, so it takes part in no secure sum"
            )
        if self.key is None and roster is not None:
            raise DataError(
                "this device has a roster but no key of its own, so others would not take its word"
            )
        if self.key is None:
            return roster, None
        beside = self.key.with_name(f"{self.key.name}-cert.pub")
        certificate = _contents(beside) if beside.exists() else None
        return roster, signer_of(_contents(self.key), str(self.key), certificate)


class SecureRounds:
    """Answers the steps of secure sums for one device, under the number that the server knows."""

    def __init__(self, folder: Path, node: int, identity: Identity, least: SecureMinimum) -> None:
        self._folder, self._node, self._identity, self._least = folder, node, identity, least

    def announce(self, token: str) -> wire.Said:
        """New keys for an attempt; what earlier attempts have left is forgotten."""
        _, signer = self._identity.read()
        own, announcement = announce(token, self._node, signer)
        self._forget(token)
        self._keep(token, own)
        if self._identity.roster is None:
            _logger.warning(
                "a secure sum without a roster: the server is believed who this device's"
                " neighbours are"
            )
        return {wire.ANNOUNCEMENT: announcement.to_bytes()}

    def step(
        self,
        token: str,
        facts: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray],
        said: wire.Said,
        device: Contributor,
    ) -> wire.Said:
        """The answer to a step; raises where it is refused."""
        step = said.get(wire.STEP)
        if step == wire.SHARES:
            return self._share(token, said)
        if step == wire.VECTOR:
            return self._mask(token, facts, arrays, said, device)
        if step == wire.SURVIVORS:
            return self._vouch(token, said, device)
        if step == wire.UNMASK:
            signed = wire.read_parcels(said, STATEMENT)
            return wire.parcels(reveal(self._take(token, Vouched), signed))
        raise DataError("not a step of a secure sum")

    def _share(self, token: str, said: wire.Said) -> wire.Said:
        own, (roster, _) = self._take(token, Announced), self._identity.read()
        neighbours = {
            node: Announcement.of(parcel) for node, parcel in wire.read_parcels(said).items()
        }
        common = CommonTask(
            token,
            wire.read_bytes(said, wire.TASK, SECRET),
            wire.read_number(said, wire.THRESHOLD),
            wire.read_bytes(said, wire.COHORT),
        )
        shared, packets, signed = share(own, common, neighbours, roster, self._least)
        self._keep(token, shared)
        return {**wire.parcels(packets), wire.STATEMENT: signed}

    def _mask(
        self,
        token: str,
        facts: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray],
        said: wire.Said,
        device: Contributor,
    ) -> wire.Said:
        shared = self._take(token, Shared)
        both = wire.read_parcels(said, _PACKET + STATEMENT)
        packets = {node: parcel[:_PACKET] for node, parcel in both.items()}
        signed = {node: parcel[_PACKET:] for node, parcel in both.items()}
        held = accept(shared, packets, signed)
        if task_digest(facts, arrays) != shared.task:
            raise DataError("the task is not the one that the devices of this sum have signed")
        vector = masked(shared, held, device.contribute(facts, arrays, shared.cohort))
        tolerance = read_instructions(Instructions, facts, Limits()).tolerance
        if tolerance is not None:
            held = held.model_copy(update={"least": tolerance.survivors(shared.cohort)})
        self._keep(token, held)
        return {wire.MASKED: vector}

    def _vouch(self, token: str, said: wire.Said, device: Contributor) -> wire.Said:
        held = self._take(token, Held)
        vouched, signed = vouch(held, wire.read_bytes(said, wire.SURVIVORS))
        device.release(token)  # on record before anybody can count on this device's word
        self._keep(token, vouched)
        return {wire.STATEMENT: signed}

    def _file(self, token: str, kind: type[Any]) -> Path:
        stage = kind.__name__.lower()
        return self._folder / f"secure-{_short(token)}-{self._node}-{stage}.json"

    def _keep(self, token: str, kept: Announced | Shared | Held | Vouched) -> None:
        """For its owner alone, and not made to outlast a power cut: without it a device
        drops out.
        """
        path = self._file(token, type(kept))
        path.unlink(missing_ok=True)
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(kept.model_dump_json().encode())

    def _take(self, token: str, kind: type[Kept]) -> Kept:
        """Take what was kept for a step, which then is not there for any other process."""
        path = self._file(token, kind)
        mine = path.with_name(f"{path.stem}-{uuid.uuid4().hex}.json")
        try:
            path.rename(mine)
        except FileNotFoundError:
            raise DataError(
                "this step of a secure sum is not due: it was taken before, or others come first"
            ) from None
        try:
            return kind.model_validate_json(read_small(mine))
        except (OSError, ValueError):
            raise DataError("what was kept for this step of a secure sum is damaged") from None
        finally:
            with suppress(OSError):  # a folder stays
                mine.unlink(missing_ok=True)

    def _forget(self, token: str) -> None:
        """Clear away what other attempts have left; in this one another node may use the folder."""
        for path in self._folder.glob("secure-*-*.json"):
            if not path.name.startswith(f"secure-{_short(token)}-"):
                with suppress(FileNotFoundError):  # a step that is being taken
                    path.unlink()


def _short(token: str) -> str:
    """A token that may stand in a file's name."""
    return hashlib.sha256(token.encode()).hexdigest()[:16]


def _contents(path: Path) -> bytes:
    try:
        return read_small(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise DataError(str(error)) from None
