"""A device's part in secure sums, message by message. What it keeps in between is in its folder, for one step each.

A step takes what it needs out of the folder before it answers, so that no request is answered twice: two vectors
under the same masks, or two answers about one neighbour, would tell the server what the protocol hides.
"""

import hashlib
import logging
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.deploy.device.instructions import check_understood, read_token
from fedbandit.deploy.device.participant import Participant, cannot
from fedbandit.deploy.masking import wire
from fedbandit.deploy.masking.announcements import Announcement, Roster, Signer, signer_of
from fedbandit.deploy.masking.device import (
    Announced,
    Held,
    Shared,
    accept,
    announce,
    masked,
    reveal,
    share,
)
from fedbandit.deploy.masking.primitives import SHARE, TAG
from fedbandit.deploy.messages import with_protocol

_logger = logging.getLogger("fedbandit.deploy")
Kept = TypeVar("Kept", Announced, Shared, Held)
_STAGES = {Announced: "announced", Shared: "shared", Held: "held"}


@dataclass(frozen=True)
class Identity:
    """Who this device is, and whom it believes: its node's key and the roster, as its operator has installed them.

    Beside the key `node` there may be an operator's certificate for it in `node-cert.pub`, as `ssh-keygen -s` makes it.
    `unsigned` does without a roster, to try things out: the server could then pose as all of the neighbours.
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
    """Answers the steps of secure sums for one participant, under the number that the server knows it by."""

    def __init__(self, participant: Participant, node: int, identity: Identity) -> None:
        self._participant, self._node, self._identity = participant, node, identity
        self._folder = participant.agent.folder

    def ready(
        self, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, Any], wire.Said]:
        """Who this is and whether there is anything to train on; if so, new keys."""
        said, _ = self._participant.answer("ready", facts, arrays)
        if said.get("ready") is not True:
            return said, {}
        try:
            _, signer = self._identity.read()
            own, announcement = announce(read_token(facts), self._node, signer)
            self._forget(own.token)
            self._keep(own.token, own)
        except Exception as problem:
            return with_protocol(cannot("ready", facts, problem)), {}
        if self._identity.roster is None:
            _logger.warning(
                "a secure sum without a roster: the server is believed who this device's neighbours are"
            )
        return said, {wire.ANNOUNCEMENT: announcement.to_bytes()}

    def step(
        self, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray], said: wire.Said
    ) -> tuple[dict[str, Any], wire.Said]:
        """Facts and a message to send back. What cannot be done is said in `problem`, never raised."""
        try:
            check_understood(facts)
            token, step = read_token(facts), said.get(wire.STEP)
            if step == wire.SHARES:
                answer = self._share(token, said)
            elif step == wire.VECTOR:
                answer = self._mask(token, facts, arrays, said)
            elif step == wire.UNMASK:
                answer = self._reveal(token, said)
            else:
                raise DataError("not a step of a secure sum")
        except (
            Exception
        ) as problem:  # a server's word, or a part of the user's, may fail in any way
            return with_protocol(cannot("secure sum", facts, problem)), {}
        return with_protocol({"token": token}), answer

    def _share(self, token: str, said: wire.Said) -> wire.Said:
        own, (roster, _) = self._take(token, Announced), self._identity.read()
        neighbours = {
            node: Announcement.of(parcel) for node, parcel in wire.read_parcels(said).items()
        }
        shared, packets = share(own, wire.read_number(said, wire.THRESHOLD), neighbours, roster)
        self._keep(token, shared)
        return wire.parcels(packets)

    def _mask(
        self,
        token: str,
        facts: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray],
        said: wire.Said,
    ) -> wire.Said:
        shared = self._take(token, Shared)
        held = accept(shared, wire.read_parcels(said, 2 * SHARE + TAG))
        vector = masked(shared, held, self._participant.contribute(facts, arrays))
        self._keep(token, held)
        return {wire.MASKED: vector}

    def _reveal(self, token: str, said: wire.Said) -> wire.Said:
        held = self._take(token, Held)
        return wire.parcels(
            reveal(held, wire.read_nodes(said, wire.ACTIVE), wire.read_nodes(said, wire.DROPPED))
        )

    def _file(self, token: str, stage: str) -> Path:
        return self._folder / f"secure-{_short(token)}-{self._node}-{stage}.json"

    def _keep(self, token: str, kept: Announced | Shared | Held) -> None:
        """For the owner's eyes, and not made to outlast a power cut: a device that loses it has dropped out."""
        path = self._file(token, _STAGES[type(kept)])
        with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(kept.model_dump_json().encode())

    def _take(self, token: str, kind: type[Kept]) -> Kept:
        """What was kept for a step, which then is not there for any other process."""
        path = self._file(token, _STAGES[kind])
        mine = path.with_name(f"{path.stem}-{uuid.uuid4().hex}.json")
        try:
            path.rename(mine)
        except FileNotFoundError:
            raise DataError(
                "this step of a secure sum is not due: it was taken before, or others come first"
            ) from None
        try:
            return kind.model_validate_json(mine.read_bytes())
        except ValueError:
            raise DataError("what was kept for this step of a secure sum is damaged") from None
        finally:
            mine.unlink(missing_ok=True)

    def _forget(self, token: str) -> None:
        """Clear away what other attempts have left; in this one the folder may stand for another node as well."""
        for path in self._folder.glob("secure-*-*.json"):
            if not path.name.startswith(f"secure-{_short(token)}-"):
                with suppress(FileNotFoundError):  # a step that is being taken
                    path.unlink()


def _short(token: str) -> str:
    """A token that may stand in a file's name."""
    return hashlib.sha256(token.encode()).hexdigest()[:16]


def _contents(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
