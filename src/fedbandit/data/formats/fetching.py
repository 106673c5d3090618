"""Published files: downloaded with a checksum, and unpacked beside themselves once."""

import base64
import hashlib
import http.client
import lzma
import os
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import Any, BinaryIO
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from fedbandit.core.errors import DataError
from fedbandit.core.progress import SILENT, ProgressReporter
from fedbandit.data.formats.binary import check_unpacked
from fedbandit.data.writer import claim

_CHUNK = 1 << 18
_TIMEOUT = 30.0  # seconds without a byte


def download(
    url: str, target: Path, *, sha256: str | None = None, progress: ProgressReporter = SILENT
) -> Path:
    """Fetch `url` to `target`, and return it; an interrupted download is resumed.

    The file is checked against `sha256` and whatever checksum the server publishes before it gets
    its name; one that does not match is thrown away.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.download")
    checksums = {} if sha256 is None else {"sha256": sha256}
    checksums |= _transfer(url, partial, progress)
    for algorithm, expected in checksums.items():
        with open(partial, "rb") as file:
            found = hashlib.file_digest(file, algorithm).hexdigest()
        if found != expected:
            partial.unlink()
            raise DataError(
                f"{url}: the {algorithm} checksum does not match; the download was thrown away, try again"
            )
    os.replace(partial, target)
    return target


def _transfer(url: str, partial: Path, progress: ProgressReporter) -> dict[str, str]:
    """Bring `partial` to full length; returns the checksums that the server publishes for the file."""
    have = partial.stat().st_size if partial.exists() else 0
    request = Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urlopen(request, timeout=_TIMEOUT)
    except HTTPError as error:
        with error:
            if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and have:
                if (
                    _total(error.headers) == have
                ):  # all bytes had arrived before the last attempt ended
                    return _published_checksums(error.headers)
                partial.unlink()
                return _transfer(url, partial, progress)
        raise DataError(f"{url}: the server answered {error.code} {error.reason}") from None
    except (URLError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise DataError(
            f"{url}: cannot reach {urlsplit(url).hostname} ({reason}); fetch the file elsewhere and give its path"
        ) from None
    with response:
        resumed = response.status == http.client.PARTIAL_CONTENT
        start = have if resumed else 0
        total = _total(response.headers) if resumed else _length(response.headers)
        _receive(response, partial, start, total, url, progress)
        return _published_checksums(response.headers)


def _receive(
    response: Any,
    partial: Path,
    start: int,
    total: int | None,
    url: str,
    progress: ProgressReporter,
) -> None:
    done, broken = start, False
    with (
        open(partial, "r+b" if start else "wb") as file,
        progress.task(
            f"Downloading {urlsplit(url).path.rsplit('/', 1)[-1]}", total, unit="B", done=start
        ) as advance,
    ):
        file.seek(start)
        try:
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                done += len(chunk)
                advance(len(chunk))
        except (http.client.HTTPException, TimeoutError, ConnectionError):
            broken = True  # what arrived is kept
    if broken or (total is not None and done != total):
        of_all = "" if total is None else f" of {total:,}"
        raise DataError(
            f"{url}: broke off after {done:,}{of_all} bytes; run the same command again to resume"
        )


def _length(headers: Message) -> int | None:
    text = headers.get("Content-Length")
    return int(text) if text and text.isdigit() else None


def _total(headers: Message) -> int | None:
    """The length of the whole file in `Content-Range: bytes 5-9/10` or `bytes */10`."""
    text = headers.get("Content-Range", "").rpartition("/")[2]
    return int(text) if text.isdigit() else None


def _published_checksums(headers: Message) -> dict[str, str]:
    """Google Cloud Storage publishes `x-goog-hash: crc32c=...,md5=...` (base64) with the files it
    serves.
    """
    for header in headers.get_all("x-goog-hash") or []:
        for part in header.split(","):
            name, _, value = part.strip().partition("=")
            if name == "md5":
                return {"md5": base64.b64decode(value).hex()}
    return {}


_UNPACKED_CHUNK = 1 << 20
_UNPACKING_MEMORY = 1 << 29  # bytes; a file names the dictionary it wants, published ones want 8 MB


def clear_unpacked(out: Path) -> None:
    """Remove what a killed import of this target left; refused while another one is working with
    it.
    """
    copy = _unpacked_name(out)
    if copy.exists():
        lock = claim(copy, os.O_RDWR | os.O_CREAT, out)
        copy.unlink()
        os.close(lock)


def _unpacked_name(out: Path) -> Path:
    """One name per target, so that the next import of the target finds what a killed one left."""
    return out.parent / f".{out.name}.unpacked"


@contextmanager
def unpacked(path: Path, out: Path, progress: ProgressReporter) -> Iterator[Path]:
    """The file itself, or for a `.lzma` or `.xz` file an unpacked copy that lives as long as the
    `with` block.
    """
    if path.suffix not in (".lzma", ".xz"):
        yield path
        return
    parents = [parent for parent in out.parents if not parent.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    copy = _unpacked_name(out)
    lock = claim(copy, os.O_RDWR | os.O_CREAT, out)
    try:
        _unpack(path, copy, progress)
        yield copy
    except DataError as error:
        raise DataError(
            str(error).replace(str(copy), str(path))
        ) from None  # users know the file they gave us
    finally:
        copy.unlink(missing_ok=True)
        os.close(lock)
        for parent in parents:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()


def _unpack(path: Path, copy: Path, progress: ProgressReporter) -> None:
    decompressor = lzma.LZMADecompressor(memlimit=_UNPACKING_MEMORY)
    with (
        open(path, "rb") as packed,
        open(copy, "wb") as target,
        progress.task(f"Unpacking {path.name}", path.stat().st_size, unit="B") as advance,
    ):
        while not decompressor.eof:
            chunk = packed.read(_UNPACKED_CHUNK)
            if not chunk:
                raise DataError(f"{path}: truncated: the compressed data ends too early")
            advance(len(chunk))
            _write_all(decompressor, chunk, path, target)
        if decompressor.unused_data or packed.read(1):
            raise DataError(f"{path}: damaged: something follows the compressed data")


def _write_all(
    decompressor: lzma.LZMADecompressor, chunk: bytes, path: Path, target: BinaryIO
) -> None:
    try:
        target.write(decompressor.decompress(chunk, max_length=_UNPACKED_CHUNK))
        while (
            not decompressor.needs_input and not decompressor.eof
        ):  # little input can unpack to very much
            size = path.stat().st_size
            check_unpacked(
                f"{path}:", target.tell(), size, "unpack it yourself if it is right", at_least=True
            )
            target.write(decompressor.decompress(b"", max_length=_UNPACKED_CHUNK))
    except lzma.LZMAError as error:
        raise DataError(f"{path}: damaged: {error}") from None
