"""A hub on this machine: an HTTP server that speaks the part of the Hugging Face Hub's API by which models are downloaded, over directories.

It notes each request. A repository may be gated, and a file may be cut off.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_token_of_a_user"  # opens gated repositories


@dataclass
class Hub:
    """The repositories of a hub, and what was asked of it.

    Attributes:
        folders: the directory of each repository, by OWNER/NAME.
        gated: the repositories that only TOKEN opens.
        branches: names of revisions that each repository has, beside its commit.
        cut: how many bytes of a file are sent before the connection ends, by its path. A request for the rest of such a file is answered 503.
        tags: the ETag of a file, by its path, where it is not its hash.
        requests: each request: its method, path, and the Range header if any.
    """

    folders: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    branches: set[str] = field(default_factory=lambda: {"main"})
    cut: dict[str, int] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    url: str = ""

    def commit(self, repository: str) -> str:
        """Return the commit of a repository: it changes with its files."""
        files = "".join(f"{path}:{hash_of(self.folders[repository] / path)}" for path in self.files(repository))
        return hashlib.sha1(files.encode()).hexdigest()

    def files(self, repository: str) -> list[str]:
        """Return the paths of all files of a repository."""
        folder = self.folders[repository]
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    def fetched(self) -> list[str]:
        """Return the paths of the files whose content was requested, in order."""
        paths = [re.fullmatch(r"/.+?/resolve/[^/]+/(.+)", path) for method, path, _ in self.requests if method == "GET"]
        return [found[1] for found in paths if found]


def hash_of(path: Path) -> str:
    """Return the hash by which the hub knows a large file."""
    return _hash(path, path.stat().st_mtime_ns)


@cache
def _hash(path: Path, _: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    """Serve `hub` on a free port, and set its `url`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

        def do_GET(self) -> None:
            sent = urlsplit(self.path).path
            path = unquote(sent)
            hub.requests.append((self.command, path, self.headers.get("Range", "")))
            if found := re.fullmatch(r"/api/models/(.+?)(?:/(revision|tree)/(.+))?", path):
                self._describe(*found.groups())
            elif found := re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", sent):  # a revision may have slashes, quoted
                self._file(*map(unquote, found.groups()))
            else:
                self._refuse(404, "EntryNotFound")

        do_HEAD = do_GET

        def _is_refused(self, repository: str, revision: str) -> bool:
            """Answer with an error unless there is such a repository and revision, and it is open to the caller."""
            if repository not in hub.folders:
                self._refuse(401, "RepoNotFound", "Invalid username or password.")
            elif repository in hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self._refuse(401, "GatedRepo", "Access to this model is restricted.")
            elif revision not in hub.branches | {hub.commit(repository)}:
                self._refuse(404, "RevisionNotFound", "Invalid rev id")
            else:
                return False
            return True

        def _describe(self, repository: str, what: str | None, revision: str | None) -> None:
            if self._is_refused(repository, revision or "main"):
                return
            commit = hub.commit(repository)
            if what == "tree":
                return self._json([self._entry(repository, path) for path in hub.files(repository)])
            siblings = [{"rfilename": path} for path in hub.files(repository)]
            self._json({
                "_id": "1", "id": repository, "modelId": repository, "sha": commit, "private": False, "gated": False, "disabled": False,
                "tags": [], "downloads": 0, "likes": 0, "siblings": siblings,
            })  # fmt: skip

        def _entry(self, repository: str, path: str) -> dict[str, Any]:
            file = hub.folders[repository] / path
            size, oid = file.stat().st_size, hash_of(file)
            entry = {"type": "file", "path": path, "size": size, "oid": oid[:40]}
            return entry | {"lfs": {"oid": oid, "size": size, "pointerSize": 134}} if is_large(path) else entry

        def _file(self, repository: str, revision: str, path: str) -> None:
            if self._is_refused(repository, revision):
                return
            file = hub.folders[repository] / path
            if not file.is_file():
                return self._refuse(404, "EntryNotFound", "Entry not found")
            content = file.read_bytes()
            tag = hash_of(file) if is_large(path) else hash_of(file)[:40]
            headers = {"ETag": f'"{hub.tags.get(path, tag)}"', "X-Linked-Size": str(len(content))}
            headers |= {"X-Repo-Commit": hub.commit(repository), "Accept-Ranges": "bytes"}
            is_cut = self.command == "GET" and path in hub.cut
            if is_cut and "Range" in self.headers:
                return self._refuse(503, "")
            self._send(200, content[: hub.cut[path]] if is_cut else content, headers, length=len(content))
            self.close_connection |= is_cut

        def _json(self, value: Any) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _refuse(self, status: int, code: str, message: str = "") -> None:
            headers = {"X-Error-Code": code, "X-Error-Message": message} if code else {}
            self._send(status, json.dumps({"error": message}).encode(), headers)

        def _send(self, status: int, body: bytes, headers: dict[str, str], length: int | None = None) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    return Handler


def is_large(path: str) -> bool:
    """Return whether the hub keeps a file apart from the repository."""
    return path.endswith((".safetensors", ".bin", ".onnx", ".pt"))
