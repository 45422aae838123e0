"""A model hub on this machine, as far as small repositories go up and come down; it keeps their files in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_COMMIT = "0" * 40


class HubServer(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Hub)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.refuses = False
        """Whether new repositories are forbidden."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Hub(BaseHTTPRequestHandler):
    server: HubServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/repos/create":
            self._create(json.loads(body))
        elif self.path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif re.fullmatch(r"/api/models/.+/preupload/main", self.path):
            files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in _files(body)]
            self._json({"files": files})
        elif found := re.fullmatch(r"/api/models/(.+)/commit/main", self.path):
            self._commit(found[1], body)
        else:
            self._json({"error": f"unknown {self.path}"}, 404)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if found := re.fullmatch(r"/(.+)/resolve/[^/]+/(.+)", path):
            self._file(found[1], found[2])
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+)?", path):
            self._describe(found[1])
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+(?:/(.*))?", path):
            self._listing(found[1], found[2] or "")
        else:
            self._json({"error": f"unknown {path}"}, 404)

    do_HEAD = do_GET

    def _create(self, wanted: dict[str, Any]) -> None:
        if self.server.refuses:
            self._json({"error": "You don't have the rights to create a model there"}, 403)
            return
        name = "/".join(part for part in (wanted.get("organization"), wanted["name"]) if part)
        self.server.repositories.setdefault(name, {})
        if wanted.get("visibility") == "private":
            self.server.private.add(name)
        self._json({"url": f"{self.server.url}/{name}", "name": name})

    def _commit(self, repository: str, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                self.server.repositories[repository][line["value"]["path"]] = content
        self._json(
            {"success": True, "commitOid": _COMMIT, "commitUrl": f"{self.server.url}/{repository}/commit/{_COMMIT}"}
        )

    def _describe(self, repository: str) -> None:
        names = self.server.repositories.get(repository)
        if names is None:
            self._send(b"", 404, {"X-Error-Code": "RepoNotFound"})
            return
        self._json({"id": repository, "sha": _COMMIT, "siblings": [{"rfilename": name} for name in names], "tags": []})

    def _listing(self, repository: str, folder: str) -> None:
        files = {
            name: content for name, content in self.server.repositories[repository].items() if name.startswith(folder)
        }
        found = [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for name, content in files.items()
        ]
        if folder and not found:
            self._send(b"", 404, {"X-Error-Code": "EntryNotFound"})
        else:
            self._json(found)

    def _file(self, repository: str, name: str) -> None:
        content = self.server.repositories[repository].get(name)
        if content is None:
            self._send(b"", 404, {"X-Error-Code": "EntryNotFound"})
            return
        self._send(content, 200, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": _COMMIT})

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(json.dumps(value).encode(), status, {"Content-Type": "application/json"})

    def _send(self, content: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""


def _files(body: bytes) -> list[dict[str, Any]]:
    files: list[dict[str, Any]] = json.loads(body)["files"]
    return files


@contextmanager
def hub_server() -> Iterator[HubServer]:
    server = HubServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
