"""Repositories of the Hugging Face hub: listed and read in ranges, or downloaded; and the hub's cache on this machine.

Speaks through huggingface_hub, with its endpoint, token and cache; what goes wrong is said as a CheckpointError. Loads
no torch, and huggingface_hub only when it is used.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fastmtp.errors import CheckpointError, UnreachableError, UnreadableError
from fastmtp.files import REMOTE_PROBE, FileInfo, hidden, whole

if TYPE_CHECKING:
    from huggingface_hub import GitCommitInfo

# What the commit of a version is titled: this, and the version.
TITLE = "fastmtp"
# Weights in other formats are as large again, and code is never run.
UNWANTED = (".bin", ".pt", ".pth", ".pkl", ".py")
_TIMEOUT = 15.0  # seconds without a byte
_WAITS = (0.5, 1.5)  # seconds before the second and the third try


class HubFiles:
    """A repository of the hub, `org/name` or `org/name@revision`, pinned to the commit that the name means now."""

    probe = REMOTE_PROBE
    root: Path | None = None

    def __init__(self, repository: str) -> None:
        self.name = repository
        self._id, self._revision = hub_id(repository)
        self._listed: dict[str, FileInfo] | None = None

    def commit(self) -> str | None:
        """The commit that is meant; None where there is no such repository or revision. Raises CheckpointError."""
        from huggingface_hub import HfApi

        with _hub_explained(self.name):
            if not HfApi().repo_exists(self._id) or not HfApi().revision_exists(self._id, self._revision):
                return None
        self.list()
        return self._revision

    def list(self) -> dict[str, FileInfo]:
        """Files of the repository. Raises CheckpointError when there is no such repository, or no hub in reach."""
        from huggingface_hub import HfApi

        if self._listed is None:
            with _hub_explained(self.name):
                info = HfApi().model_info(self._id, revision=self._revision, files_metadata=True, timeout=_TIMEOUT)
            self._revision = info.sha or self._revision
            found = {
                item.rfilename: FileInfo(item.size, (item.lfs.sha256 if item.lfs else item.blob_id) or "")
                for item in info.siblings or ()
                if not hidden(item.rfilename)
            }
            self._listed = dict(sorted(found.items()))
        return self._listed

    def read(self, name: str, begin: int, end: int) -> bytes:
        """One ranged GET, tried three times where the hub does not answer."""
        if begin == end:
            return b""
        for wait in _WAITS:
            try:
                return self._get(name, begin, end)
            except UnreachableError:
                time.sleep(wait)
        return self._get(name, begin, end)

    def _get(self, name: str, begin: int, end: int) -> bytes:
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

        path = f"{self.name}/{name}"
        url = hf_hub_url(self._id, name, revision=self._revision)
        headers = {**build_hf_headers(), "range": f"bytes={begin}-{end - 1}", "accept-encoding": "identity"}
        data = bytearray()
        with _hub_explained(path), get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT) as answer:
            if answer.is_error:
                answer.read()
            hf_raise_for_status(answer)
            if answer.status_code != 206 and begin:
                what = f"{path}: the hub sends all of it where a part was asked for."
                raise UnreadableError(what, mend="Download it, and name the directory.", pointer="/model")
            # Who does not know ranges sends all of it: leave when there is enough.
            for block in answer.iter_raw():
                data += block
                if len(data) >= end - begin:
                    break
        return whole(path, bytes(data[: end - begin]), begin, end)


def hub_snapshot(model: str) -> Path:
    """Directory with what is needed of a hub model: its cache on this machine, downloaded where that lacks something.

    Raises:
        CheckpointError: there is no such repository; UnreachableError where the hub does not answer.
    """
    with _hub_explained(model):
        return _snapshot(model)


def cached_snapshot(model: str) -> Path | None:
    """What the hub's cache on this machine has of a model, where that is all of it."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return _snapshot(model, offline=True)
    except LocalEntryNotFoundError:
        return None


def commits(repository: str, branch: str) -> tuple[list[GitCommitInfo], dict[str, str]]:
    """Commits of a branch, newest first; and the commit that each branch and tag names. Raises CheckpointError."""
    from huggingface_hub import HfApi

    with _hub_explained(repository):
        found = HfApi().list_repo_commits(repository, revision=branch)
        refs = HfApi().list_repo_refs(repository)
    return found, {one.name: one.target_commit for one in [*refs.branches, *refs.tags]}


def hub_id(model: str) -> tuple[str, str]:
    """Repository and revision of `org/name`, `hf://org/name` or either with `@revision`; `main` where none is named."""
    repository, _, revision = model.removeprefix("hf://").partition("@")
    return repository, revision or "main"


def _snapshot(model: str, *, offline: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    repository, revision = hub_id(model)
    unwanted = [f"*{ending}" for ending in UNWANTED]
    return Path(snapshot_download(repository, revision=revision, ignore_patterns=unwanted, local_files_only=offline))


@contextlib.contextmanager
def _hub_explained(name: str) -> Iterator[None]:
    import httpx2  # what huggingface_hub speaks with
    from huggingface_hub.errors import XetDownloadError

    try:
        yield
    except CheckpointError:
        raise
    # The last three: an id that none can be, and answers that are no hub's, such as a login page's.
    except (httpx2.HTTPError, XetDownloadError, OSError, ValueError, TypeError, KeyError) as error:
        raise _hub_error(name, error) from error


def _hub_error(name: str, error: Exception) -> CheckpointError:
    """What a failed call to the hub means to a user."""
    import httpx2
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    away = (httpx2.TransportError, OfflineModeIsEnabled, LocalEntryNotFoundError)
    cause = " ".join(str(error).split())[:300]
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, away):
        what = f"{name} cannot be kept in the hub's cache: {error.strerror}."
        return UnreadableError(
            what, mend="HF_HOME names the cache's place: make room there, or name another.", pointer="/model"
        )
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
    if isinstance(error, away) or status == 429 or status >= 500:
        mend = "Check the network and HF_ENDPOINT, or name a local directory."
        return UnreachableError(f"{name}: the hub does not answer: {cause}", mend=mend, pointer="/model")
    answers: list[tuple[bool, str, str]] = [
        (isinstance(error, GatedRepoError), f"{name} is gated.", "Accept its terms on the hub, and set HF_TOKEN."),
        (
            isinstance(error, RepositoryNotFoundError) or status == 401, f"{name} is not on the hub, or is private.",
            "Check the id; for a private one, set HF_TOKEN.",
        ),
        (status == 403, f"{name}: the hub refuses: {cause}", "Set HF_TOKEN to a token that may read it."),
    ]  # fmt: skip
    what, mend = next(
        ((what, mend) for holds, what, mend in answers if holds),
        (f"{name} cannot be read from the hub: {cause}", "Check the id, the revision and HF_TOKEN."),
    )
    return UnreadableError(what, mend=mend, pointer="/model")
