"""A small stand-in for the Hugging Face hub on a free port: what huggingface_hub asks for in an upload or download of
a model.

It keeps the files of repositories in memory, small ones as they come in a commit, `*.safetensors` as git LFS does.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from huggingface_hub import constants


@dataclass
class Repository:
    """The files of each branch, by path."""

    private: bool = False
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    messages: list[str] = field(default_factory=list)


@dataclass
class Hub:
    """`owners` are the names under which the token may create and write. `objects` are large files, by SHA-256.
    `failures` are statuses of the next requests that upload or commit, 0 for a closed connection. `meanwhile` are files
    that somebody else commits to a branch as soon as an upload to it begins."""

    token: str = "hf_good"
    owners: tuple[str, ...] = ("bird",)
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    failures: list[int] = field(default_factory=list)
    meanwhile: dict[str, bytes] = field(default_factory=dict)
    sent: int = 0  # large files
    url: str = ""

    def files(self, name: str = "bird/draft", branch: str = "main") -> dict[str, bytes]:
        return self.repositories[name].branches[branch]

    def listing(self) -> list[str]:
        return sorted(self.files())


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def stand_in(hub: Hub, patch: pytest.MonkeyPatch, directory: Path) -> None:
    """Lets huggingface_hub take it for the hub. Caches are in the directory. It has read its environment when it was
    imported, except for HF_TOKEN."""
    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    places = {"HF_HUB_CACHE": str(directory / "cache"), "HF_TOKEN_PATH": str(directory / "token")}
    values = {"ENDPOINT": hub.url, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_DISABLE_XET": True}
    for name, value in (values | places | {"HF_HUB_OFFLINE": False}).items():
        patch.setattr(constants, name, value)
    patch.setattr("transformers.utils.hub._hf_api", None, raising=False)  # else that of the hub before
    patch.setenv("HF_TOKEN", hub.token)


class _Refused(Exception):
    """(status, message, the hub's code of the error)"""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer("GET")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def _answer(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        try:
            found = next((m, f) for verb, p, f in _ROUTES if verb == method and (m := re.fullmatch(p, path)))
            status, content, more = found[1](self, body, *found[0].groups())
        except StopIteration:
            status, content, more = 404, b"", {}
        except _Refused as e:
            status, message, code = e.args
            if not status:
                self.close_connection = True
                return
            content, more = json.dumps({"error": message}).encode(), {"X-Error-Code": code, "X-Error-Message": message}
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **more}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content if self.command != "HEAD" else b"")

    def _login(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            raise _Refused(401, "Invalid credentials in Authorization header", "")

    def _writable(self, name: str) -> None:
        self._login()
        if self.hub.failures:
            raise _Refused(self.hub.failures.pop(0), "out of order", "")
        if name.partition("/")[0] not in self.hub.owners:
            raise _Refused(403, f"You don't have the rights to write to {name}", "")

    def _repository(self, name: str) -> Repository:
        self._login()
        if name not in self.hub.repositories:
            raise _Refused(404, "Repository not found", "RepoNotFound")
        return self.hub.repositories[name]

    def _files(self, name: str, branch: str | None) -> dict[str, bytes]:
        branches = self._repository(name).branches
        if (branch or "main") in branches:
            return branches[branch or "main"]
        if found := [files for files in branches.values() if _commit(files) == branch]:
            return found[0]
        raise _Refused(404, f"Invalid rev id: {branch}", "RevisionNotFound")

    def info(self, body: bytes, name: str, branch: str | None = None) -> Any:
        files, repository = self._files(name, branch), self._repository(name)
        siblings = [{"rfilename": path} for path in sorted(files)]
        return _json({"id": name, "private": repository.private, "sha": _commit(files), "siblings": siblings})

    def tree(self, body: bytes, name: str, branch: str) -> Any:
        files = self._files(name, branch)
        return _json([{"type": "file", "path": p, "size": len(files[p]), "oid": "0" * 40} for p in sorted(files)])

    def paths(self, body: bytes, name: str, branch: str) -> Any:
        files, asked = self._files(name, branch), parse_qs(body.decode())["paths"]
        return _json([{"type": "file", "path": p, "size": len(files[p]), "oid": "0" * 40} for p in asked if p in files])

    def create(self, body: bytes) -> Any:
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
        self._writable(name)
        private = asked.get("private") is True or asked.get("visibility") == "private"
        self.hub.repositories[name] = Repository(private)
        return _json({"url": f"{self.hub.url}/{name}"})

    def branch(self, body: bytes, name: str, branch: str) -> Any:
        branches = self._repository(name).branches
        if branch in branches:
            raise _Refused(409, "Reference already exists", "")
        branches[branch] = dict(branches["main"])
        return _json({})

    def yaml(self, body: bytes) -> Any:
        return _json({"errors": [], "warnings": []})

    def preupload(self, body: bytes, name: str, branch: str) -> Any:
        self._writable(name)
        self._files(name, branch).update(self.hub.meanwhile)
        self.hub.meanwhile = {}
        files = [
            {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular",
             "shouldIgnore": False}
            for f in json.loads(body)["files"]
        ]  # fmt: skip
        return _json({"files": files})

    def batch(self, body: bytes, name: str) -> Any:
        objects = []
        for wanted in json.loads(body)["objects"]:
            known = wanted["oid"] in self.hub.objects
            upload = {"upload": {"href": f"{self.hub.url}/objects/{wanted['oid']}"}}
            objects.append(wanted | ({} if known else {"actions": upload}))
        return _json({"transfer": "basic", "objects": objects})

    def store(self, body: bytes, oid: str) -> Any:
        if self.hub.failures:
            raise _Refused(self.hub.failures.pop(0), "out of order", "")
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.objects[oid] = body
        self.hub.sent += 1
        return 200, b"", {}

    def commit(self, body: bytes, name: str, branch: str) -> Any:
        self._writable(name)
        files = dict(self._files(name, branch))
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "header":
                if value.get("parentCommit") not in (None, _commit(files)):
                    raise _Refused(412, "A commit has happened since. Please refresh and try again.", "")
                self._repository(name).messages.append(value["summary"])
            elif operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            else:
                assert operation["key"] == "deletedFile"
                del files[value["path"]]
        self._repository(name).branches[branch] = files
        return _json({"commitUrl": f"{self.hub.url}/{name}/commit/{_commit(files)}", "commitOid": _commit(files)})

    def file(self, body: bytes, name: str, branch: str, path: str) -> Any:
        files = self._files(name, branch)
        if path not in files:
            raise _Refused(404, "Entry not found", "EntryNotFound")
        etag = hashlib.sha256(files[path]).hexdigest()
        return 200, files[path], {"ETag": f'"{etag}"', "X-Repo-Commit": _commit(files)}


def _commit(files: dict[str, bytes]) -> str:
    """The id of the commit that has these files."""
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


def _json(value: Any) -> tuple[int, bytes, dict[str, str]]:
    return 200, json.dumps(value).encode(), {"Content-Type": "application/json"}


_NAME = r"([\w.-]+/[\w.-]+)"
_ROUTES = (
    ("POST", "/api/repos/create", _Handler.create),
    ("POST", "/api/validate-yaml", _Handler.yaml),
    ("GET", f"/api/models/{_NAME}", _Handler.info),
    ("GET", f"/api/models/{_NAME}/revision/([^/]+)", _Handler.info),
    ("GET", f"/api/models/{_NAME}/tree/([^/]+)", _Handler.tree),
    ("POST", f"/api/models/{_NAME}/paths-info/([^/]+)", _Handler.paths),
    ("POST", f"/api/models/{_NAME}/branch/([^/]+)", _Handler.branch),
    ("POST", f"/api/models/{_NAME}/preupload/([^/]+)", _Handler.preupload),
    ("POST", f"/api/models/{_NAME}/commit/([^/]+)", _Handler.commit),
    ("POST", f"/{_NAME}.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT", "/objects/([0-9a-f]+)", _Handler.store),
    ("GET", f"/{_NAME}/resolve/([^/]+)/(.+)", _Handler.file),
)
