"""Dataset repositories as Hugging Face's hub answers for them: making one, commits, and reading."""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.fakes.scripted_http import running

TOKEN = "hf_secret"
Files = dict[str, bytes]


class HubServer:
    """Repositories by name, with their files. They come in the commits themselves, as small ones do."""

    def __init__(self) -> None:
        self.private: dict[str, bool] = {}
        self.files: dict[str, Files] = {}
        self.url = ""

    async def create(self, request: Request) -> Response:
        given = await request.json()
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return JSONResponse({"error": "Invalid username or password."}, 401)
        name = f"{given['organization']}/{given['name']}"
        self.private[name], self.files[name] = given["visibility"] == "private", {}
        return JSONResponse({"url": f"{self.url}/datasets/{name}"})

    def _found(self, request: Request) -> tuple[str, str, Files]:
        """Name, commit and files of what is asked for, where the asker may read it."""
        name = "{owner}/{name}".format(**request.path_params)
        if request.headers.get("authorization") != f"Bearer {TOKEN}" or name not in self.files:
            raise HTTPException(401, headers={"x-error-code": "RepoNotFound"})
        return name, _commit_of(self.files[name]), self.files[name]

    async def info(self, request: Request) -> Response:
        name, id, files = self._found(request)
        held = {"siblings": [{"rfilename": path} for path in files]}
        return JSONResponse({"id": name, "sha": id, "private": self.private[name], **held})

    async def tree(self, request: Request) -> Response:
        _, _, files = self._found(request)
        return JSONResponse([{"type": "file", "path": path, "size": len(files[path]), "oid": path} for path in files])

    async def preupload(self, request: Request) -> Response:
        mode = {"uploadMode": "regular", "shouldIgnore": False}
        return JSONResponse({"files": [file | mode for file in (await request.json())["files"]]})

    async def commit(self, request: Request) -> Response:
        name, _, files = self._found(request)
        for line in (await request.body()).splitlines():
            if (part := json.loads(line))["key"] == "file":
                files[part["value"]["path"]] = base64.b64decode(part["value"]["content"])
        id = _commit_of(files)
        return JSONResponse({"commitUrl": f"{self.url}/datasets/{name}/commit/{id}", "commitOid": id})

    async def resolve(self, request: Request) -> Response:
        _, id, files = self._found(request)
        content = files[request.path_params["path"]]
        tags = {"x-repo-commit": id, "etag": f'"{hashlib.sha256(content).hexdigest()}"'}
        return Response(content, headers=tags)


def _commit_of(files: Files) -> str:
    return hashlib.sha1(repr(files).encode()).hexdigest()


@contextmanager
def served(hub: HubServer) -> Iterator[HubServer]:
    """The hub with its `url`, while it runs in a thread."""
    api = "/api/datasets/{owner}/{name}"
    routes = [
        Route("/api/repos/create", hub.create, methods=["POST"]),
        Route("/api/validate-yaml", lambda request: JSONResponse({}), methods=["POST"]),
        Route(api, hub.info),
        Route(f"{api}/revision/{{revision}}", hub.info),
        Route(f"{api}/tree/{{revision}}", hub.tree),
        Route(f"{api}/preupload/{{revision}}", hub.preupload, methods=["POST"]),
        Route(f"{api}/commit/{{revision}}", hub.commit, methods=["POST"]),
        Route("/datasets/{owner}/{name}/resolve/{revision}/{path:path}", hub.resolve, methods=["GET", "HEAD"]),
    ]
    with running(uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="critical"))) as port:
        hub.url = f"http://127.0.0.1:{port}"
        yield hub
