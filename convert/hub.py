"""A model on the Hugging Face Hub as the source of a conversion.

Owns the listing (one commit, from the start to the end) and the staging folder that downloads go
to. Knows nothing about connections (``transfer.py``), about how a file is downloaded and proved
intact (``download.py``) or about what is in the files.

Headers and configuration are read by range, so a conversion can be planned in full before the
first shard is downloaded.
"""

import errno
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import validate_repo_id

from ..errors import BudgetError, CheckpointError, UnsupportedError
from ..units import format_bytes
from .download import Listed, download, part_of
from .source import FolderSource, Progress, Source, check_name, is_model_file
from .transfer import Transfer

# A K3 shard's header takes 0.8 MB: its length and the header itself come with one request.
_HEAD_BYTES = 2**20
_HEADS_AT_ONCE = 8
_RECORD = "staging.json"


def is_hub_id(text: str) -> bool:
    """Whether ``text`` has the form of a Hub id, ``org/name``."""
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return text.count("/") == 1


def open_hub(
    repo: str,
    *,
    revision: str | None = None,
    free_source: bool = False,
    staging: Path | None = None,
) -> Source:
    """The Hub repository ``repo``; with HF_HUB_OFFLINE set, its copy in the Hub's cache.

    Raises:
        CheckpointError: if there is no such model or it cannot be reached.
        UnsupportedError: if ``free_source`` would delete from the cache.
    """
    if not constants.is_offline_mode():
        return HubSource(repo, revision=revision, free_source=free_source, staging=staging)
    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            local_files_only=True,
            allow_patterns=["*.safetensors", "*.json"],
        )
    except LocalEntryNotFoundError:
        raise CheckpointError(
            f"{repo}: HF_HUB_OFFLINE is set and the Hub's cache does not hold all of it; "
            "unset it, or give a local folder"
        ) from None
    if free_source:
        raise UnsupportedError(
            f"{repo}: --free-source deletes only what it downloaded, and HF_HUB_OFFLINE is set; "
            "leave one of them out"
        )
    return FolderSource(folder)


class HubSource:
    """A repository of the Hub at one commit.

    Args:
        repo: ``org/name``.
        revision: branch, tag or commit; the default branch if ``None``.
        free_source: delete a downloaded file when it is released.
        staging: the folder that downloads go to; ``None`` if only :meth:`read` will be used.

    Raises:
        CheckpointError: if the repository cannot be had, or ``staging`` belongs to another one.
    """

    def __init__(
        self,
        repo: str,
        *,
        revision: str | None = None,
        free_source: bool = False,
        staging: Path | None = None,
    ) -> None:
        api = HfApi(library_name="mlx-k3")
        self.label = repo
        self.progress: Progress | None = None
        self._free_source = free_source
        self._staging = staging
        self._transfer = Transfer(repo, api.endpoint)
        self._intact: dict[str, Path] = {}
        self._heads: dict[str, bytearray] = {}
        staged = self._staged_commit(revision)
        info = self._transfer.call(
            lambda: api.model_info(
                repo,
                revision=staged or revision,
                files_metadata=True,
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            )
        )
        self.commit: str = info.sha
        self._entries = {
            file.rfilename: Listed(
                file.rfilename,
                info.sha,
                file.lfs.size if file.lfs else file.size,
                file.lfs.sha256 if file.lfs else None,
                file.blob_id,
            )
            for file in info.siblings or []
            if is_model_file(file.rfilename)
        }
        for name in self._entries:
            check_name(name, self.label)
        self._revision = revision

    def files(self) -> dict[str, int]:
        """Every file of the model at this commit: name -> size_bytes, sorted by name."""
        return {name: entry.size_bytes for name, entry in sorted(self._entries.items())}

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """``nbytes`` of ``name`` from ``offset`` on, by a range request.

        Raises:
            CheckpointError: if there is no such file, it ends before ``offset + nbytes``, or the
                Hub does not deliver.
        """
        entry = self._entry(name)
        if (missing := offset + nbytes - entry.size_bytes) > 0:
            raise CheckpointError(
                f"{self.label}: {name} ends {missing:,} bytes early; "
                "report it to the repository's owner"
            )
        if offset + nbytes > _HEAD_BYTES:
            return bytes(self._transfer.read(entry.range(offset, nbytes)))
        if name not in self._heads:
            self._heads |= self._read_heads(name)
        return bytes(self._heads[name][offset : offset + nbytes])

    def fetch(self, name: str) -> Path:
        """``name`` in the staging folder or in the Hub's cache, complete and intact.

        Raises:
            CheckpointError: if it is missing, not delivered, or damaged twice in a row.
            BudgetError: if the disk is full.
            UnsupportedError: if it has to be downloaded and there is no staging folder.
        """
        entry = self._entry(name)
        # Planning is over; a hundred headers are a hundred megabytes.
        self._heads.clear()
        if name in self._intact:
            return self._intact[name]
        path = self._staging / name if self._staging else None
        for candidate in (path, self._cached(name)):
            if candidate is not None and entry.is_intact(candidate):
                self._intact[name] = candidate
                return candidate
        if path is None:
            raise UnsupportedError(
                f"{self.label}: this needs {name} itself; download the model with `hf download` "
                "and give its folder"
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._record_commit()
            download(self._transfer, entry, path, self.progress)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise BudgetError(
                f"{path.parent}: the disk is full, {name} needs {format_bytes(entry.size_bytes)}; "
                "make room and run again: it goes on from where it stopped"
            ) from error
        self._intact[name] = path
        return path

    def release(self, name: str) -> None:
        """Delete the downloaded ``name`` under ``free_source``; never a file of the Hub's cache."""
        self._entry(name)
        self._intact.pop(name, None)
        if self._free_source and self._staging is not None:
            (self._staging / name).unlink(missing_ok=True)

    def room_bytes(self, groups: Iterable[Sequence[str]]) -> int:
        """Disk space that fetching each group in turn takes at most, releasing it or not."""
        if self._free_source:
            return max((self._missing_bytes(group) for group in groups), default=0)
        return self._missing_bytes({name for group in groups for name in group})

    def close(self) -> None:
        """Let go of the commit; under ``free_source``, delete what was put into staging."""
        if self._staging is None or not self._staging.is_dir():
            return
        (self._staging / _RECORD).unlink(missing_ok=True)
        if not self._free_source:
            return
        for name in self._entries:
            self.release(name)
            part_of(self._staging / name).unlink(missing_ok=True)
        folders = {(self._staging / name).parent for name in self._entries}
        for folder in sorted(folders, reverse=True):
            # Only what is empty now: somebody may have put other files there.
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def _read_heads(self, name: str) -> dict[str, bytearray]:
        """The first bytes of ``name``; of all shards if it is one, for a plan reads them all."""
        names = [name]
        if name.endswith(".safetensors"):
            names = [other for other in self._entries if other.endswith(".safetensors")]

        def head(name: str) -> bytearray:
            entry = self._entries[name]
            return self._transfer.read(entry.range(0, min(entry.size_bytes, _HEAD_BYTES)))

        with ThreadPoolExecutor(_HEADS_AT_ONCE) as pool:
            return dict(zip(names, pool.map(head, names), strict=True))

    def _missing_bytes(self, names: Iterable[str]) -> int:
        missing = 0
        for name in names:
            if self._cached(name) is None:
                path = self._staging / name
                missing += self._entry(name).size_bytes - _size(path) - _size(part_of(path))
        return missing

    def _cached(self, name: str) -> Path | None:
        """The shard ``name`` in the Hub's cache: who has it should not download it again.

        Small files always go to staging, where they are together.
        """
        if not name.endswith(".safetensors"):
            return None
        cached = try_to_load_from_cache(self.label, name, revision=self.commit)
        return Path(cached) if isinstance(cached, str) else None

    def _entry(self, name: str) -> Listed:
        if name not in self._entries:
            raise CheckpointError(
                f"{self.label}: {name} is missing; report it to the repository's owner"
            )
        return self._entries[name]

    def _staged_commit(self, revision: str | None) -> str | None:
        """The commit that an interrupted run was reading, so that a branch may move meanwhile."""
        if self._staging is None or not (self._staging / _RECORD).is_file():
            return None
        record = json.loads((self._staging / _RECORD).read_text())
        if (record["repo"], record["revision"]) != (self.label, revision):
            raise CheckpointError(
                f"{self._staging}: holds files of {record['repo']} at "
                f"{record['revision'] or 'its default branch'}; finish that, or delete the folder"
            )
        return record["commit"]

    def _record_commit(self) -> None:
        record = {"repo": self.label, "revision": self._revision, "commit": self.commit}
        path = self._staging / _RECORD
        part_of(path).write_text(json.dumps(record))
        os.replace(part_of(path), path)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
