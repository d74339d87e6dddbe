"""A Hugging Face Hub on the loopback interface, with the faults of a real network on demand.

Speaks what huggingface_hub asks of the real one: model information with its listing, the tree,
and ``resolve`` with HEAD, GET, ranges and the redirect of large files to storage on another
origin. Files stay on the disk and are sent in small chunks.

>>> with HubServer() as hub:
...     commit = hub.publish("org/model", folder)
...     hub.faults.append(Fault("model-00001-of-000002.safetensors", drop_at=1000))
"""

import hashlib
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

import huggingface_hub
import pytest

_MAX_CONNECTIONS = 32
_CHUNK_BYTES = 16 * 1024


@dataclass
class Fault:
    """Something that goes wrong with ``name``, the next ``times`` times it applies.

    ``drop_at``, ``corrupt_at`` and ``hang_at`` are offsets in the file; they apply to an answer
    that covers the offset. ``name`` "" stands for the listing.
    """

    name: str
    times: int = 1
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    drop_at: int | None = None
    corrupt_at: int | None = None
    hang_at: int | None = None
    cut_to: int | None = None
    """The file is served as if it had only so many bytes."""
    no_ranges: bool = False


@dataclass
class Request:
    """What a client asked for, and how many bytes of the file it was ``sent`` so far."""

    method: str
    name: str
    start: int
    stop: int
    at_storage: bool
    authorization: str | None
    sent: int = 0


@dataclass(frozen=True)
class _File:
    path: Path
    size: int
    sha256: str
    blob_id: str

    @property
    def large(self) -> bool:
        return self.path.suffix == ".safetensors"


class HubServer:
    """The server, as a context manager. ``endpoint`` is what HF_ENDPOINT should say."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.gated: set[str] = set()
        self.bytes_per_second: float | None = None
        self.hanging = threading.Event()
        """Set as soon as a ``hang_at`` was reached."""
        self._release = threading.Event()
        self._commits: dict[tuple[str, str], dict[str, _File]] = {}
        self._branches: dict[tuple[str, str], str] = {}
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self.port = self._server.server_address[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        # Another origin, as the real storage is: a client must not carry its token there.
        self.storage = f"http://localhost:{self.port}/storage"

    def __enter__(self) -> "HubServer":
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._release.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def publish(self, repo: str, folder: Path, branch: str = "main") -> str:
        """Make ``folder`` the head of ``branch``; returns the commit. Older ones stay."""
        files = {}
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            data = path.read_bytes()
            files[path.relative_to(folder).as_posix()] = _File(
                path,
                len(data),
                hashlib.sha256(data).hexdigest(),
                hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
            )
        listing = json.dumps([(name, file.sha256) for name, file in files.items()])
        commit = hashlib.sha1(f"{repo}{listing}".encode()).hexdigest()
        self._commits[repo, commit] = files
        self._branches[repo, branch] = commit
        return commit

    def commit(self, repo: str, revision: str) -> str | None:
        """The commit that ``revision`` (a branch or a commit) stands for."""
        if (repo, revision) in self._commits:
            return revision
        return self._branches.get((repo, revision))

    def knows(self, repo: str) -> bool:
        return any(known == repo for known, _ in self._commits)

    def files(self, repo: str, commit: str) -> dict[str, _File]:
        return self._commits[repo, commit]

    def sent_bytes(self, name: str) -> int:
        """How many bytes of ``name`` went out, over all requests."""
        return sum(r.sent for r in self.requests if r.name == name)

    def take_fault(self, name: str, start: int, stop: int) -> Fault | None:
        """The first fault that applies to this answer; it is used up."""
        with self._lock:
            for fault in self.faults:
                offsets = [
                    o for o in (fault.drop_at, fault.corrupt_at, fault.hang_at) if o is not None
                ]
                covered = all(start <= offset < stop for offset in offsets)
                if fault.times and fault.name == name and covered:
                    fault.times -= 1
                    return fault
        return None

    def hang(self) -> None:
        self.hanging.set()
        self._release.wait(30)

    def note(self, request: Request) -> None:
        with self._lock:
            self.requests.append(request)


def use_hub(server: HubServer, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Direct huggingface_hub in this process to ``server``; ``home`` is for its cache.

    It reads the environment once, when it is imported: here its constants have to change.
    """
    constants = huggingface_hub.constants
    template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: HubServer

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self._slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)

    def process_request(self, request, client_address) -> None:
        self._slots.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request, client_address) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request, client_address) -> None:
        """A client that was killed is part of the tests, not an error of this server."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30
    server: _Server

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._route()

    def do_GET(self) -> None:
        self._route()

    def _route(self) -> None:
        url = urlsplit(self.path)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            self._api("/".join(parts[2:4]), parts[4:], parse_qs(url.query))
        elif len(parts) >= 5 and parts[2] == "resolve":
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        elif parts[0] == "storage" and len(parts) >= 5:
            self._storage("/".join(parts[1:3]), parts[3], "/".join(parts[4:]))
        else:
            self._error(404, "EntryNotFound")

    def _commit(self, repo: str, revision: str) -> str | None:
        """The commit, or None after an error was answered."""
        hub = self.server.hub
        if not hub.knows(repo):
            self._error(401, "RepoNotFound")
        elif repo in hub.gated and not self.headers.get("Authorization"):
            self._error(401, "GatedRepo")
        elif hub.commit(repo, revision) is None:
            self._error(404, "RevisionNotFound")
        else:
            return hub.commit(repo, revision)
        return None

    def _api(self, repo: str, rest: list[str], query: dict[str, list[str]]) -> None:
        hub = self.server.hub
        hub.note(Request(self.command, "", 0, 0, False, self.headers.get("Authorization")))
        if (fault := hub.take_fault("", 0, 0)) and fault.status:
            return self._error(fault.status, headers=fault.headers)
        if (commit := self._commit(repo, rest[1] if len(rest) > 1 else "main")) is None:
            return None
        files = hub.files(repo, commit)
        if rest[:1] == ["tree"]:
            return self._json([_tree_entry(name, file) for name, file in files.items()])
        blobs = "blobs" in query
        siblings = [_sibling(name, file, blobs) for name, file in files.items()]
        return self._json({"id": repo, "modelId": repo, "sha": commit, "siblings": siblings})

    def _resolve(self, repo: str, revision: str, name: str) -> None:
        if (commit := self._commit(repo, revision)) is None:
            return
        file = self.server.hub.files(repo, commit).get(name)
        if file is None:
            self._error(404, "EntryNotFound")
        elif file.large:
            self.send_response(302)
            self.send_header("Location", f"{self.server.hub.storage}/{repo}/{commit}/{quote(name)}")
            self.send_header("X-Repo-Commit", commit)
            self.send_header("X-Linked-Size", str(file.size))
            self.send_header("X-Linked-Etag", f'"{file.sha256}"')
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self._send(name, file, {"X-Repo-Commit": commit, "ETag": f'"{file.blob_id}"'})

    def _storage(self, repo: str, commit: str, name: str) -> None:
        file = self.server.hub.files(repo, commit)[name]
        self._send(name, file, {"ETag": f'"{file.sha256}"'}, at_storage=True)

    def _send(
        self, name: str, file: _File, headers: dict[str, str], at_storage: bool = False
    ) -> None:
        hub = self.server.hub
        start, stop = self._range(file.size)
        fault = hub.take_fault(name, start, stop) or Fault(name)
        size = file.size if fault.cut_to is None else fault.cut_to
        stop = min(stop, size)
        if fault.status:
            return self._error(fault.status, headers=fault.headers)
        partial = "Range" in self.headers and not fault.no_ranges
        if not partial:
            start, stop = 0, size
        self.send_response(206 if partial else 200)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Accept-Ranges", "bytes")
        if partial:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        auth = self.headers.get("Authorization")
        request = Request(self.command, name, start, stop, at_storage, auth)
        hub.note(request)
        if self.command == "GET":
            self._body(file.path, request, fault)

    def _body(self, path: Path, request: Request, fault: Fault) -> None:
        """Send the bytes, or what the fault leaves of them."""
        hub, position = self.server.hub, request.start
        with open(path, "rb") as data:
            data.seek(position)
            while position < request.stop:
                end = min(position + _CHUNK_BYTES, request.stop)
                for offset in (fault.drop_at, fault.hang_at):
                    if offset is not None and position <= offset:
                        end = min(end, offset)
                chunk = bytearray(data.read(end - position))
                if fault.corrupt_at is not None and position <= fault.corrupt_at < end:
                    chunk[fault.corrupt_at - position] ^= 1
                # Counted before it is sent: a client that has it all may ask at once.
                request.sent += len(chunk)
                try:
                    self.wfile.write(chunk)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True
                    return
                position = end
                if position == fault.hang_at:
                    hub.hang()
                if position in (fault.drop_at, fault.hang_at):
                    self.close_connection = True
                    return
                if hub.bytes_per_second:
                    time.sleep(len(chunk) / hub.bytes_per_second)

    def _range(self, size: int) -> tuple[int, int]:
        """The half-open span of the file that was asked for."""
        asked = self.headers.get("Range", "bytes=0-").removeprefix("bytes=")
        first, _, last = asked.partition("-")
        return int(first), min(int(last) + 1 if last else size, size)

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _error(self, status: int, code: str = "", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _sibling(name: str, file: _File, blobs: bool) -> dict:
    if not blobs:
        return {"rfilename": name}
    entry = {"rfilename": name, "size": file.size, "blobId": file.blob_id}
    if file.large:
        entry["lfs"] = {"sha256": file.sha256, "size": file.size, "pointerSize": 134}
    return entry


def _tree_entry(name: str, file: _File) -> dict:
    entry = {"type": "file", "path": name, "size": file.size, "oid": file.blob_id}
    if file.large:
        entry["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": 134}
    return entry
