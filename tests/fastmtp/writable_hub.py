"""A hub that takes commits: the routes that huggingface_hub asks for pushing without Xet, over HTTP, in memory."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

from fastmtp.push import git_blob
from tests.fastmtp.hub import listening

Files = dict[str, bytes]


@dataclass
class Repository:
    """Branches name commits; a commit has files, of which the large ones lie in `lfs` by sha256, and a title."""

    private: bool
    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    lfs: dict[str, bytes] = field(default_factory=dict)
    history: dict[str, tuple[str, str]] = field(default_factory=dict)  # parent and title of each commit

    def commit(self, branch: str, files: Files, title: str = "initial commit") -> str:
        parent = self.branches.get(branch, "")
        name = hashlib.sha1(repr((parent, sorted(files.items()))).encode()).hexdigest()
        self.commits[name], self.branches[branch] = files, name
        self.history[name] = parent, title
        return name

    def log(self, revision: str) -> list[dict[str, Any]]:
        """As the hub lists commits, newest first."""
        found, name = [], self.branches.get(revision, revision)
        while name:
            parent, title = self.history[name]
            made = {"id": name, "title": title, "message": "", "authors": [], "date": "2026-11-30T12:00:00.000Z"}
            found, name = [*found, made], parent
        return found

    def files(self, revision: str) -> Files | None:
        return self.commits.get(self.branches.get(revision, revision))


@dataclass
class WritableHub:
    """What there is, and how it answers.

    Attributes:
        role: of the token; organisation: where the token's owner may write, beside `me`.
        broken: names of LFS objects by their number (from 1) that are refused when they are sent.
        spoil: what arrives of large files is kept with another last byte, under the digest that was announced.
        sent: bytes of LFS objects sent, by sha256; requests: method and path of each.
    """

    url: str = ""
    role: str = "write"
    organisation: str = "org"
    broken: set[int] = field(default_factory=set)
    spoil: bool = False
    sent: Counter[str] = field(default_factory=Counter)
    requests: list[str] = field(default_factory=list)
    repositories: dict[str, Repository] = field(default_factory=dict)

    def create(self, name: str, files: Files | None = None) -> Repository:
        found = self.repositories[name] = Repository(private=True)
        found.commit("main", files or {".gitattributes": b"*.safetensors filter=lfs\n"})
        return found


@contextlib.contextmanager
def serve_writable() -> Iterator[WritableHub]:
    hub = WritableHub()
    with listening(_Handler, hub):
        yield hub


class _Handler(BaseHTTPRequestHandler):
    hub: WritableHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_arguments: object) -> None:
        return

    def do_GET(self) -> None:
        path = self._path()
        if path == "/api/whoami-v2":
            orgs = [{"name": self.hub.organisation, "roleInOrg": "write"}]
            return self._json({"name": "me", "orgs": orgs, "auth": {"accessToken": {"role": self.hub.role}}})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree|auth-check)/([^/]+))?", path):
            return self._about(found[1], found[2] or "revision", found[3] or "main")
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commits/([^/]+)", path):
            repository = self.hub.repositories.get(found[1])
            return self._json(repository.log(found[2])) if repository else self._refuse(404, "RepoNotFound")
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/refs", path):
            branches = self.hub.repositories[found[1]].branches.items()
            refs = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit} for name, commit in branches]
            return self._json({"branches": refs, "converts": [], "tags": []})
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._content(found[1], found[2], found[3])
        return self._refuse(404, "EntryNotFound")

    def do_HEAD(self) -> None:
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._path())
        assert found, "only files are asked about"
        self._content(found[1], found[2], found[3])

    def do_POST(self) -> None:
        path, body = self._path(), self._body()
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.hub.create(name).private = asked["visibility"] == "private"
            return self._json({"url": f"{self.hub.url}/{name}"})
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self._batch(self.hub.repositories[found[1]], found[1], json.loads(body))
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|branch|commit)/([^/]+)", path)
        assert found, path
        repository = self.hub.repositories[found[1]]
        if found[2] == "branch":
            repository.branches[found[3]] = json.loads(body)["startingPoint"]
            return self._json({})
        if found[2] == "commit":
            return self._commit(found[1], found[3], [json.loads(line) for line in body.splitlines()])
        there = repository.files(found[3])
        if there is None:
            return self._refuse(404, "RevisionNotFound")
        modes = [
            {"path": one["path"], "uploadMode": _mode(one["path"]), "shouldIgnore": False, "oid": None}
            for one in json.loads(body)["files"]
        ]
        return self._json({"files": modes})

    def do_PUT(self) -> None:
        _, _, owner, name, oid = self._path().split("/")
        data = self._body()
        self.hub.sent[oid] += len(data)
        if len(self.hub.sent) in self.hub.broken:
            return self._refuse(400, "")
        self.hub.repositories[f"{owner}/{name}"].lfs[oid] = data
        return self._json({})

    def _about(self, name: str, what: str, revision: str) -> None:
        repository = self.hub.repositories.get(name)
        files = None if repository is None else repository.files(revision)
        if repository is None:
            return self._refuse(404, "RepoNotFound")
        if what == "auth-check":
            return self._json({}) if self.hub.role == "write" else self._refuse(403, "")
        if files is None:
            return self._refuse(404, "RevisionNotFound")
        found = [self._described(repository, *one) for one in sorted(files.items())]
        if what == "tree":
            return self._json([{"type": "file", **one} for one in found])
        siblings = [
            {"rfilename": one["path"], "size": one["size"], "blobId": one["oid"]}
            | ({"lfs": {**one["lfs"], "sha256": one["lfs"]["oid"]}} if "lfs" in one else {})
            for one in found
        ]
        sha = repository.branches.get(revision, revision)
        return self._json({"id": name, "sha": sha, "private": repository.private, "siblings": siblings})

    def _described(self, repository: Repository, path: str, data: bytes) -> dict[str, Any]:
        found: dict[str, Any] = {"path": path, "size": len(data), "oid": git_blob(data)}
        if _mode(path) == "lfs":
            oid = data.decode()
            kept = repository.lfs[oid]
            kept = kept[:-1] + bytes([kept[-1] ^ 1]) if self.hub.spoil else kept
            lfs = {"oid": hashlib.sha256(kept).hexdigest(), "size": len(kept), "pointerSize": 130}
            found |= {"size": len(kept), "lfs": lfs}
        return found

    def _batch(self, repository: Repository, name: str, asked: dict[str, Any]) -> None:
        found = []
        for one in asked["objects"]:
            upload = {"upload": {"href": f"{self.hub.url}/lfs/{name}/{one['oid']}"}}
            found.append({**one, **({} if one["oid"] in repository.lfs else {"actions": upload})})
        self._json({"transfer": "basic", "objects": found})

    def _commit(self, name: str, branch: str, lines: list[dict[str, Any]]) -> None:
        repository, parent = self.hub.repositories[name], lines[0]["value"].get("parentCommit")
        if parent is not None and repository.branches.get(branch) != parent:
            return self._refuse(412, "")
        files = dict(repository.files(branch) or {})
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "deletedFile":
                del files[value["path"]]
            elif line["key"] == "lfsFile":
                assert value["oid"] in repository.lfs, f"{value['path']} was never sent"
                files[value["path"]] = value["oid"].encode()
            else:
                files[value["path"]] = base64.b64decode(value["content"])
        commit = repository.commit(branch, files, lines[0]["value"]["summary"])
        return self._json({"commitUrl": f"{self.hub.url}/{name}/commit/{commit}", "commitOid": commit})

    def _content(self, name: str, revision: str, path: str) -> None:
        repository = self.hub.repositories[name]
        data = (repository.files(revision) or {})[path]
        etag = data.decode() if _mode(path) == "lfs" else git_blob(data)
        data = repository.lfs[etag] if _mode(path) == "lfs" else data
        about = {"ETag": f'"{etag}"', "X-Repo-Commit": repository.branches.get(revision, revision)}
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            return self._send(206, data[int(wanted[1]) : int(wanted[2]) + 1], about)
        return self._send(200, data, about)

    def _path(self) -> str:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        assert self.headers["Authorization"] in (None, "Bearer hf_secret")
        return path

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = bytearray()
        while count := int(self.rfile.readline(), 16):
            found += self.rfile.read(count)
            self.rfile.readline()
        self.rfile.readline()
        return bytes(found)

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else data)


def _mode(path: str) -> str:
    return "lfs" if path.endswith(".safetensors") else "regular"
