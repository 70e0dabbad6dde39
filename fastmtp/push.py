"""Publish on the Hugging Face hub: a version is one commit of a branch, which readers see whole or not at all.

The manifest goes into the commit. Files that the branch has already are neither sent nor read; of the rest the hub
takes what it lacks. What was sent before a run was killed is not visible and not sent again. Endpoint and token are
huggingface_hub's own (HF_ENDPOINT, HF_TOKEN, its login) and appear nowhere here. Loads no torch, and huggingface_hub
only when it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastmtp.errors import DestinationError, FastMTPError, IntegrityError
from fastmtp.headers import SUFFIX
from fastmtp.hub import TITLE, hub_id
from fastmtp.stage import MANIFEST, FileEntry

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete
    from huggingface_hub.hf_api import RepoFile

SCHEME = "hf://"
_SMALL = 16 << 20  # bytes of a file that is read at once, and may be kept by git itself
_BEAT = 5.0  # seconds between signs of life
_POINTER = "/publish/uri"


def probe(uri: str) -> None:
    """See that the token may write to the repository, or make it. Writes nothing. Raises DestinationError."""
    from huggingface_hub import HfApi, get_token

    repository, _ = hub_id(uri)
    owner = repository.partition("/")[0]
    if get_token() is None:
        raise DestinationError(
            f"{uri} cannot be written: there is no token.", mend="Set HF_TOKEN, or `hf auth login`.", pointer=_POINTER
        )
    with _explained(uri):
        api, who = HfApi(), HfApi().whoami()
        roles = {str(one["name"]): one.get("roleInOrg") for one in who.get("orgs", ())} | {str(who["name"]): "admin"}
        if who.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise DestinationError(
                f"{uri} cannot be written: the token may only read.", mend="Set HF_TOKEN to one that may write.",
                pointer=_POINTER,
            )  # fmt: skip
        if api.repo_exists(repository):
            api.auth_check(repository, write=True)
        elif roles.get(owner, "read") == "read":
            raise DestinationError(
                f"{uri} does not exist, and {who['name']} may not make it in {owner}.",
                mend="Name a repository of yours, or of an organisation that you may write to.", pointer=_POINTER,
            )  # fmt: skip


def push(
    directory: Path,
    uri: str,
    version: str,
    files: dict[str, FileEntry],
    about: dict[str, Any],
    on_bytes: Callable[[int], None] = lambda _count: None,
) -> dict[str, Any]:
    """Make `files` of `directory` what hf://ORG/NAME[@BRANCH] has, by one commit; prove what the hub then lists.

    A repository that is not there is made, private; a branch that is not there begins at `main`. Weights of what was
    there before go, and so do other files that its manifest lists; a card or licence that somebody wrote stays.

    Args:
        files: with the sha256 of each.
        about: goes into the manifest beside the files.
        on_bytes: told how many bytes have just got into place, sent or not; and of life, by 0.

    Returns:
        The manifest, its `uri` and those of the files with the commit in place of the branch.

    Raises:
        DestinationError: the hub refused, or somebody else commits there. The same call goes on from there.
        IntegrityError: what is there, or here, is not what was hashed.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    repository, branch = hub_id(uri)
    # The reporter shows progress: bars of another kind would write over it.
    with _explained(uri), disable_progress_bars(), _alive(on_bytes):
        if not HfApi().repo_exists(repository):
            HfApi().create_repo(repository, private=True, exist_ok=True)
        return _Push(directory, repository, branch, version, files, about, on_bytes).run()


def git_blob(data: bytes) -> str:
    """The id git gives a file: what the hub states of files it keeps without LFS."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@dataclass
class _Push:
    directory: Path
    repository: str
    branch: str
    version: str
    files: dict[str, FileEntry]
    about: dict[str, Any]
    on_bytes: Callable[[int], None]

    def run(self) -> dict[str, Any]:
        head, made = self._head()
        there = self._tree(head)
        before = self._manifest_at(head, there)
        changed = [name for name, entry in self.files.items() if not self._is(there.get(name), name, entry)]
        if made and not changed and before.get("version") == self.version:
            self.on_bytes(sum(entry.size for entry in self.files.values()))
            return self._located(before, head, there)
        additions = [self._addition(name) for name in changed]
        self.on_bytes(sum(entry.size for name, entry in self.files.items() if name not in changed))
        for addition in additions:
            self._send(addition, self.branch if made else "main")
        listed = [{"name": name, "size": one.size, "sha256": one.sha256} for name, one in self.files.items()]
        manifest = {"version": self.version, "created": time.time(), **self.about, "files": listed}
        commit = self._commit(additions, manifest, head, made, self._stale(there, before))
        now = self._tree(commit)
        wrong = [name for name, entry in self.files.items() if not self._is(now.get(name), name, entry)]
        if wrong or MANIFEST not in now:
            raise IntegrityError(f"hf://{self.repository}@{commit}: {', '.join(wrong) or MANIFEST} did not arrive.")
        return self._located(manifest, commit, now)

    def _head(self) -> tuple[str, bool]:
        """The commit to go on from, and whether it is the branch's own."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RevisionNotFoundError

        try:
            return str(HfApi().model_info(self.repository, revision=self.branch).sha), True
        except RevisionNotFoundError:
            return str(HfApi().model_info(self.repository, revision="main").sha), False

    def _tree(self, commit: str) -> dict[str, RepoFile]:
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        found = HfApi().list_repo_tree(self.repository, recursive=True, revision=commit)
        return {item.path: item for item in found if isinstance(item, RepoFile)}

    def _manifest_at(self, commit: str, there: dict[str, RepoFile]) -> dict[str, Any]:
        """The manifest that a commit has; empty where it has none of ours."""
        from fastmtp.hub import HubFiles

        if MANIFEST in there and there[MANIFEST].size <= _SMALL:
            data = HubFiles(f"{self.repository}@{commit}").read(MANIFEST, 0, there[MANIFEST].size)
            with contextlib.suppress(ValueError):
                found = json.loads(data)
                if isinstance(found, dict) and isinstance(found.get("files"), list):
                    return found
        return {}

    def _is(self, remote: RepoFile | None, name: str, entry: FileEntry) -> bool:
        """Whether a file of the hub is ours, by the digest that the hub states of it."""
        if remote is None or remote.size != entry.size:
            return False
        if remote.lfs:
            return bool(remote.lfs.sha256 == entry.sha256)
        return remote.size <= _SMALL and bool(remote.blob_id == git_blob(self._read(name)))

    def _read(self, name: str) -> bytes:
        data = (self.directory / name).read_bytes()
        if hashlib.sha256(data).hexdigest() != self.files[name].sha256:
            raise IntegrityError(f"{self.directory / name} is not what its manifest says.")
        return data

    def _addition(self, name: str) -> CommitOperationAdd:
        from huggingface_hub import CommitOperationAdd

        path = self.directory / name
        if path.stat().st_size != self.files[name].size:
            raise IntegrityError(f"{path} is not what its manifest says.")
        # git follows no link, and neither do we: the file behind it is what was hashed.
        content = self._read(name) if self.files[name].size <= _SMALL else str(path.resolve())
        return CommitOperationAdd(path_in_repo=name, path_or_fileobj=content)

    def _send(self, addition: CommitOperationAdd, revision: str) -> None:
        """Send a large file, if the hub lacks it. Its digest is taken anew on the way, of what is really sent."""
        from huggingface_hub import HfApi

        HfApi().preupload_lfs_files(self.repository, [addition], revision=revision, free_memory=False)
        entry = self.files[addition.path_in_repo]
        if addition.upload_info.sha256.hex() != entry.sha256:
            raise IntegrityError(f"{self.directory / addition.path_in_repo} changed while it was sent.")
        self.on_bytes(entry.size)

    def _stale(self, there: dict[str, RepoFile], before: dict[str, Any]) -> list[str]:
        """Files of what was there before that must not stay beside the new ones."""
        ours = {str(entry["name"]) for entry in before.get("files", ())}
        weights = {name for name in there if name.endswith((SUFFIX, f"{SUFFIX}.index.json"))}
        return sorted((ours & there.keys() | weights) - self.files.keys())

    def _commit(
        self, additions: list[CommitOperationAdd], manifest: dict[str, Any], head: str, made: bool, stale: list[str]
    ) -> str:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        text = json.dumps(manifest, indent=1).encode()
        gone = [CommitOperationDelete(path_in_repo=name) for name in stale]
        operations: list[CommitOperationAdd | CommitOperationDelete] = [*gone, *additions]
        operations.append(CommitOperationAdd(path_in_repo=MANIFEST, path_or_fileobj=text))
        if not made:
            HfApi().create_branch(self.repository, branch=self.branch, revision=head, exist_ok=True)
        # Refused by the hub where the branch has moved on meanwhile.
        done = HfApi().create_commit(
            self.repository, operations, commit_message=f"{TITLE} {self.version}", revision=self.branch,
            parent_commit=head,
        )  # fmt: skip
        return str(done.oid)

    def _located(self, manifest: dict[str, Any], commit: str, tree: dict[str, RepoFile]) -> dict[str, Any]:
        uri = f"{SCHEME}{self.repository}@{commit}"
        files = [
            {**entry, "uri": f"{uri}/{entry['name']}", "stamp": tree[entry["name"]].blob_id}
            for entry in manifest["files"]
        ]
        return {**manifest, "uri": uri, "files": files}


@contextlib.contextmanager
def _alive(on_bytes: Callable[[int], None]) -> Iterator[None]:
    """A sign of life every few seconds: huggingface_hub says how far it is to a terminal only."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(_BEAT):
            on_bytes(0)

    thread = threading.Thread(target=beat, daemon=True, name="hub")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def _explained(uri: str) -> Iterator[None]:
    """Turn what the hub answers into a DestinationError. Addresses lose their queries, which may hold signatures."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except FastMTPError:
        raise
    # RuntimeError is what huggingface_hub wraps failures of uploads in; ValueError what it says of bad answers.
    except (httpx2.HTTPError, OSError, RuntimeError, ValueError, KeyError) as error:
        found = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        status = found.response.status_code if isinstance(found, HfHubHTTPError) else 0
        mend = "Run it again: it goes on where it was."
        if status in (401, 403, 404):
            mend = "Check the name, and that HF_TOKEN may write to it."
        elif status in (409, 412):
            mend = "Somebody else committed there meanwhile: run it again."
        cause = re.sub(r"\?[^\s'\"]+", "", " ".join(str(found).split()))[:300]
        raise DestinationError(f"{uri}: the hub refuses: {cause}", mend=mend, pointer=_POINTER) from error
