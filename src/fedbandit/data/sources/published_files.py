"""Where the published files are: in a folder or cache of the user's, or else on the publisher's server."""

import os
import tarfile
from pathlib import Path

from fedbandit.data import cache_folder
from fedbandit.data.download import download
from fedbandit.data.progress import Progress
from fedbandit.errors import DataError

BASE_URL = "https://storage.googleapis.com/tff-datasets-public/"
_SHA256 = {  # as published by the data sets' loaders; the large files carry the server's own checksum
    "stackoverflow.word_count.tar.bz2": "1dc00256d6e527c54b9756d968118378ae14e6692c0b3b6cad470cdd3f0c519c",
    "stackoverflow.tag_count.tar.bz2": "6fe281cec490d9384a290d560072438e7e2b377bbb823876ce7bd6f82696772d",
}


def _downloads() -> Path:
    """Where downloads go when the user names no place."""
    return cache_folder() / "downloads"


def find_database(path: Path | None, name: str, progress: Progress) -> Path:
    """The SQLite file `name`, packed or not: the path itself, or found in that folder, or downloaded into it."""
    if path is not None and path.is_file():
        return path
    folder = _downloads() if path is None else path
    if path is not None and not path.is_dir():
        raise DataError(f"{path}: no such file or folder")
    for candidate in (folder / name, folder / f"{name}.lzma"):
        if candidate.is_file():
            return candidate
    return download(f"{BASE_URL}{name}.lzma", folder / f"{name}.lzma", progress=progress)


def find_counts(given: Path | None, name: str, database: Path, progress: Progress) -> Path:
    """A file of counts: the one given, or found beside the database or in the cache, or downloaded into the cache."""
    if given is not None:
        if not given.is_file():
            raise DataError(f"{given}: no such file")
        return given
    short = name.removeprefix("stackoverflow.")
    for candidate in (database.parent / name, database.parent / short, _downloads() / name):
        if candidate.is_file():
            return candidate
    archive = _downloads() / f"{name}.tar.bz2"
    download(f"{BASE_URL}{archive.name}", archive, sha256=_SHA256.get(archive.name), progress=progress)
    return _extract(archive, name)


def _extract(archive: Path, name: str) -> Path:
    """Take one file out of an archive, by its own name only: paths in archives are not trusted."""
    target = archive.with_name(name)
    unfinished = archive.with_name(f".{name}.partial")
    try:
        with tarfile.open(archive, "r:bz2") as tar:
            member = next((m for m in tar.getmembers() if m.isfile() and Path(m.name).name == name), None)
            source = tar.extractfile(member) if member is not None else None
            if source is None:
                raise DataError(f"{archive}: holds no file {name}")
            unfinished.write_bytes(source.read())
    except (tarfile.TarError, EOFError, OSError) as error:
        unfinished.unlink(missing_ok=True)
        raise DataError(f"{archive}: cannot be unpacked: {error}") from None
    os.replace(unfinished, target)
    archive.unlink()
    return target
