"""Unpacking a published `.lzma` file: streamed to a hidden file beside the target, which goes when the import ends."""

import lzma
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fedbandit.data.claims import claim
from fedbandit.data.progress import Progress
from fedbandit.errors import DataError

_CHUNK = 1 << 20


def clear_unpacked(out: Path) -> None:
    """Remove what a killed import of this target left; refused while another one is working with it."""
    copy = _unpacked_name(out)
    if copy.exists():
        lock = claim(copy, os.O_RDWR | os.O_CREAT, out)
        copy.unlink()
        os.close(lock)


def _unpacked_name(out: Path) -> Path:
    """One name per target, so that the next import of the target finds what a killed one left."""
    return out.parent / f".{out.name}.unpacked"


@contextmanager
def unpacked(path: Path, out: Path, progress: Progress) -> Iterator[Path]:
    """The file itself, or for a `.lzma` or `.xz` file an unpacked copy that lives as long as the `with` block."""
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
        raise DataError(str(error).replace(str(copy), str(path))) from None  # users know the file they gave us
    finally:
        copy.unlink(missing_ok=True)
        os.close(lock)
        for parent in parents:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()


def _unpack(path: Path, copy: Path, progress: Progress) -> None:
    decompressor = lzma.LZMADecompressor()
    with (
        open(path, "rb") as packed,
        open(copy, "wb") as target,
        progress.task(f"Unpacking {path.name}", path.stat().st_size) as advance,
    ):
        while not decompressor.eof:
            chunk = packed.read(_CHUNK)
            if not chunk:
                raise DataError(f"{path}: truncated: the compressed data ends too early")
            advance(len(chunk))
            _write_all(decompressor, chunk, path, target)
        if decompressor.unused_data or packed.read(1):
            raise DataError(f"{path}: damaged: something follows the compressed data")


def _write_all(decompressor: lzma.LZMADecompressor, chunk: bytes, path: Path, target: BinaryIO) -> None:
    try:
        target.write(decompressor.decompress(chunk, max_length=_CHUNK))
        while not decompressor.needs_input and not decompressor.eof:  # little input can unpack to very much
            target.write(decompressor.decompress(b"", max_length=_CHUNK))
    except lzma.LZMAError as error:
        raise DataError(f"{path}: damaged: {error}") from None
