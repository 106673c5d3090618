"""Downloads from a real HTTP server on this machine: whole, broken off, resumed, wrong, and out of reach."""

import base64
import hashlib
import io
import re
import socket
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fedbandit.core.errors import DataError
from fedbandit.core.progress import SILENT
from fedbandit.data.importers import published as published_files
from fedbandit.data.importers.published import download, find_counts, find_database


class Server(ThreadingHTTPServer):
    """Serves `files` from memory; `break_after` cuts the next answer short, `ranges` and `lengths` may be off."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.requests, self.break_after = {}, [], None
        self.ranges = self.hashes = self.lengths = True

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        asked = self.headers.get("Range")
        server.requests.append((self.path[1:], asked))
        body = server.files.get(self.path[1:])
        if body is None:
            self.send_error(404)
            return
        start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and server.ranges else 0
        if start >= len(body) and start:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            self._hashes(body)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if asked and server.ranges else 200)
        if asked and server.ranges:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self._hashes(body)
        if server.lengths:
            self.send_header("Content-Length", str(len(body) - start))
        else:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        stop, server.break_after = server.break_after, None
        part = body[start : len(body) if stop is None else start + stop]
        self.wfile.write(part if server.lengths else b"%x\r\n%b\r\n" % (len(part), part))
        if not server.lengths and stop is None:
            self.wfile.write(b"0\r\n\r\n")

    def _hashes(self, body):
        if self.server.hashes:
            digest = base64.b64encode(hashlib.md5(body).digest()).decode()
            self.send_header("x-goog-hash", "crc32c=AAAAAA==")
            self.send_header("x-goog-hash", f"md5={digest}")

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setattr(published_files, "BASE_URL", server.url)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


BODY = bytes(range(256)) * 4000


def test_a_whole_file_arrives_under_its_name(server, tmp_path):
    server.files["a.bin"] = BODY
    target = download(
        f"{server.url}a.bin", tmp_path / "new" / "a.bin", sha256=hashlib.sha256(BODY).hexdigest()
    )
    assert target.read_bytes() == BODY
    assert [p.name for p in target.parent.iterdir()] == ["a.bin"]


def test_a_broken_download_goes_on_where_it_stopped(server, tmp_path):
    server.files["a.bin"], server.break_after = BODY, 300_000
    with pytest.raises(
        DataError, match="broke off after 300,000 of 1,024,000 bytes; run the same command again"
    ):
        download(f"{server.url}a.bin", tmp_path / "a.bin")
    assert [p.name for p in tmp_path.iterdir()] == [".a.bin.download"]
    assert download(f"{server.url}a.bin", tmp_path / "a.bin").read_bytes() == BODY
    assert server.requests == [("a.bin", None), ("a.bin", "bytes=300000-")]


def test_a_broken_download_of_unknown_length_is_not_taken_for_whole(server, tmp_path):
    server.files["a.bin"], server.break_after, server.lengths, server.hashes = (
        BODY,
        300_000,
        False,
        False,
    )
    with pytest.raises(
        DataError, match=r"broke off after [\d,]+ bytes; run the same command again"
    ):
        download(f"{server.url}a.bin", tmp_path / "a.bin")
    assert [p.name for p in tmp_path.iterdir()] == [".a.bin.download"]
    assert download(f"{server.url}a.bin", tmp_path / "a.bin").read_bytes() == BODY


def test_a_server_without_ranges_starts_again(server, tmp_path):
    server.files["a.bin"], server.ranges = BODY, False
    (tmp_path / ".a.bin.download").write_bytes(b"x" * 1000)
    assert download(f"{server.url}a.bin", tmp_path / "a.bin").read_bytes() == BODY


def test_a_complete_partial_file_is_only_checked(server, tmp_path):
    server.files["a.bin"] = BODY
    (tmp_path / ".a.bin.download").write_bytes(BODY)
    assert download(f"{server.url}a.bin", tmp_path / "a.bin").read_bytes() == BODY
    (tmp_path / ".a.bin.download").write_bytes(BODY + b"too long")
    assert download(f"{server.url}a.bin", tmp_path / "a.bin").read_bytes() == BODY


def test_wrong_contents_are_thrown_away(server, tmp_path):
    server.files["a.bin"] = BODY
    (tmp_path / ".a.bin.download").write_bytes(b"x" * 1000)  # the beginning of some other file
    with pytest.raises(DataError, match="md5 checksum does not match"):
        download(f"{server.url}a.bin", tmp_path / "a.bin")
    assert not list(tmp_path.iterdir())
    server.hashes = False
    with pytest.raises(DataError, match="sha256 checksum does not match"):
        download(f"{server.url}a.bin", tmp_path / "a.bin", sha256="0" * 64)
    assert not list(tmp_path.iterdir())


def test_a_missing_file_and_an_unreachable_server_are_named(server, tmp_path):
    with pytest.raises(DataError, match=r"none\.bin: the server answered 404"):
        download(f"{server.url}none.bin", tmp_path / "a.bin")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(DataError, match=r"cannot reach 127\.0\.0\.1 .*give its path") as caught:
        download(f"http://127.0.0.1:{port}/a.bin", tmp_path / "a.bin")
    assert "\n" not in str(caught.value)


def test_only_what_is_missing_is_downloaded(server, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDBANDIT_CACHE", str(tmp_path / "cache"))
    server.files["stackoverflow.sqlite.lzma"] = b"packed"
    mine = tmp_path / "mine"
    mine.mkdir()
    database = find_database(mine, "stackoverflow.sqlite", SILENT)
    assert database == mine / "stackoverflow.sqlite.lzma"
    assert find_database(mine, "stackoverflow.sqlite", SILENT) == database
    (mine / "stackoverflow.sqlite").write_bytes(b"unpacked")
    assert find_database(mine, "stackoverflow.sqlite", SILENT) == mine / "stackoverflow.sqlite"
    assert (
        find_database(None, "stackoverflow.sqlite", SILENT).parent
        == tmp_path / "cache" / "downloads"
    )
    assert len(server.requests) == 2
    with pytest.raises(DataError, match="no such file or folder"):
        find_database(tmp_path / "nowhere", "stackoverflow.sqlite", SILENT)


def test_counts_are_taken_out_of_their_archive(server, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDBANDIT_CACHE", str(tmp_path / "cache"))
    database = tmp_path / "stackoverflow.sqlite"
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:bz2") as tar:
        entry = tarfile.TarInfo("../../stackoverflow.tag_count")  # its path is not followed
        entry.size = 10
        tar.addfile(entry, io.BytesIO(b'{"c#": 12}'))
    name = "stackoverflow.tag_count"
    server.files[f"{name}.tar.bz2"] = archive.getvalue()
    with pytest.raises(DataError, match="sha256 checksum does not match"):  # not the published file
        find_counts(None, name, database, SILENT)
    monkeypatch.setattr(published_files, "_SHA256", {})
    found = find_counts(None, name, database, SILENT)
    assert found.read_text() == '{"c#": 12}'
    assert [p.name for p in found.parent.iterdir()] == [name]
    assert find_counts(None, name, database, SILENT) == found
    (tmp_path / name).write_text("{}")
    assert find_counts(None, name, database, SILENT) == tmp_path / name
    assert len(server.requests) == 2
    with pytest.raises(DataError, match="no such file"):
        find_counts(tmp_path / "none", name, database, SILENT)
