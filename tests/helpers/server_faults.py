"""A server whose n-th file operation fails or kills it, with devices in the same process that live on.

Counted are the operations on files of the server's own folder: opening, writing, flushing to disk, renaming, removing,
and the moments before and after a commit of its database.
"""

import builtins
import errno
import io
import os
import sqlite3
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

from network_builders import coordinator

from fedbandit.core.errors import FedbanditError
from fedbandit.deploy.server import database
from fedbandit.deploy.server.store import Store


class Killed(BaseException):
    """The server is dead: nothing that it would do afterwards happens."""


class Faults:
    """Counts the operations on one folder; the `at`-th fails. Kinds: "kill", or "error" for a full disk."""

    def __init__(self, folder: Path, at: int | None = None, kind: str = "kill") -> None:
        self.folder, self.at, self.kind = str(folder), at, kind
        self.count, self.dead, self.elsewhere, self.log = 0, False, False, []

    def happens(self, what: str, path) -> None:
        """One operation; raises if it is the one that fails, or if the server is dead already."""
        if self.elsewhere:
            return
        if self.dead:
            raise Killed
        self.count += 1
        self.log.append(f"{what} {Path(str(path)).name}")
        if self.count == self.at:
            if self.kind == "error":
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            self.dead = True
            raise Killed

    def concerns(self, path) -> bool:
        return isinstance(path, str | os.PathLike) and str(path).startswith(self.folder)

    @contextmanager
    def installed(self):
        """Within this block the folder's operations are counted."""
        with _patched(self):
            yield self


class _File:
    """An open file whose writes can fail half-way."""

    def __init__(self, file, path, faults: Faults) -> None:
        self._file, self._path, self._faults = file, path, faults

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def __iter__(self):
        return iter(self._file)

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write(self, payload):
        try:
            self._faults.happens("write", self._path)
        except BaseException:
            if self._faults.log[-1].startswith("write") and self._faults.count == self._faults.at:
                self._file.write(payload[: len(payload) // 2])
                self._file.flush()
            raise
        return self._file.write(payload)

    def truncate(self, size=None):
        self._faults.happens("truncate", self._path)
        return self._file.truncate(size)


def _patched(faults: Faults) -> ExitStack:
    stack = ExitStack()
    real = {name: getattr(os, name) for name in ("replace", "unlink")}
    real_open, real_connect, real_commit = builtins.open, sqlite3.connect, database.commit

    def opened(path, mode="r", *args, **kwargs):
        if not faults.concerns(path):
            return real_open(path, mode, *args, **kwargs)
        faults.happens("open", path)
        file = real_open(path, mode, *args, **kwargs)
        return file if set(mode) <= set("rbt") else _File(file, path, faults)

    def connected(path, *args, **kwargs):
        if faults.folder in str(path):
            faults.happens("connect", str(path).partition("?")[0])
        return real_connect(path, *args, **kwargs)

    def committed(db):
        faults.happens("before commit of", database.NAME)
        real_commit(db)
        faults.happens("after commit of", database.NAME)

    def replaced(source, target, **kwargs):
        if faults.concerns(target):
            faults.happens("rename to", target)
        return real["replace"](source, target, **kwargs)

    def unlinked(path, **kwargs):
        if faults.concerns(path):
            faults.happens("remove", path)
        return real["unlink"](path, **kwargs)

    def synced(handle):
        path = os.readlink(f"/proc/self/fd/{handle}")
        if faults.concerns(path):
            faults.happens(
                "fsync", path
            )  # and no more: here only processes die, and the disk is shared

    for owner, name, value in (
        (builtins, "open", opened),
        (io, "open", opened),
        (sqlite3, "connect", connected),
        (database, "commit", committed),
        (os, "replace", replaced),
        (os, "unlink", unlinked),
        (os, "fsync", synced),
    ):
        stack.enter_context(patch.object(owner, name, value))
    return stack


def serve(
    deployment,
    network,
    faults: Faults,
    before_round=lambda number: None,
    attempts: int = 60,
    **more,
):
    """Run all rounds; a server that fails is started again. The last one, and how often one was started."""
    starts = 0
    with faults.installed():
        while True:
            starts += 1
            faults.dead = False
            store = None
            try:
                store = Store(deployment.folder)
                server = coordinator(deployment, network, store, **more)
                while server.state.round < server.deployment.rounds and attempts > 0:
                    faults.elsewhere = True  # what others do in the folder is not the server's
                    before_round(server.state.round + 1)
                    faults.elsewhere = False
                    server.attempt()
                    attempts -= 1
                return server, starts
            except (Killed, OSError, FedbanditError) as problem:
                if not faults.at or faults.count < faults.at or starts > 3:
                    raise AssertionError(f"failed without a fault: {problem!r}") from problem
            finally:
                if store is not None:
                    store.close()
