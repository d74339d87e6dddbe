"""Byte ranges from the Hugging Face Hub over a connection that may fail.

Owns patience: what is worth another attempt, how long to wait, and the one line a person reads
when it is not. Knows nothing about models, or where the bytes go.

huggingface-hub brings the session, the credentials, the redirects and the reading of errors. Its
own download is not used: release 2.4 starts a file over when the process was killed (1.4 went on
from the byte), and one of K3's shards has 16 GB.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from huggingface_hub import constants, hf_hub_url
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    # The base of every failed request. It is httpx's or httpx2's, whichever the library uses.
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (
    build_hf_headers,
    get_session,
    hf_raise_for_status,
    parse_ratelimit_headers,
)

from ..errors import CheckpointError

_TRANSIENT = (408, 429, 500, 502, 503, 504)
_ATTEMPTS = 10
_FIRST_WAIT_SECONDS = 1.0
_LONGEST_WAIT_SECONDS = 60.0
# The Hub counts requests in windows of five minutes; a server that asks for more than three of
# them is not about to answer.
_LONGEST_ASKED_WAIT_SECONDS = 900

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """``nbytes`` from ``offset`` on of the file ``name``, ``size_bytes`` long, at ``commit``."""

    commit: str
    name: str
    size_bytes: int
    offset: int
    nbytes: int


class Transfer:
    """Requests to one repository, repeated while that is sensible. Safe to use from threads."""

    def __init__(self, repo: str, endpoint: str) -> None:
        if not endpoint.startswith(("http://", "https://")):
            raise CheckpointError(f"HF_ENDPOINT={endpoint} is not a URL; unset it or correct it")
        self.repo = repo
        self.endpoint = endpoint
        self._lock = threading.Lock()
        self._announced_until = 0.0

    def call(self, request: Callable[[], T]) -> T:
        """``request()``, which uses huggingface-hub, repeated after failures that may pass.

        Raises:
            CheckpointError: if it failed for good; the message says what to do.
        """
        failures = 0
        while True:
            try:
                return request()
            except OfflineModeIsEnabled:
                raise CheckpointError(
                    f"{self.repo}: HF_HUB_OFFLINE is set; unset it, or give a local folder"
                ) from None
            except json.JSONDecodeError:
                raise CheckpointError(
                    f"{self.repo}: {self.endpoint} does not answer as a Hub does; check "
                    "HF_ENDPOINT, or sign in to the network first"
                ) from None
            except HTTPError as error:
                failures += 1
                # Nothing has been done yet: better to say at once that there is no network.
                self._wait_or_raise(error, failures, "its listing", 3, threading.Event())

    def read(
        self,
        wanted: Range,
        received: Callable[[int], None] | None = None,
        stop: threading.Event | None = None,
    ) -> bytearray:
        """The bytes of ``wanted``. After a failure it goes on from the byte that was reached.

        ``received(n)`` is told of every ``n`` bytes that arrive; ``stop`` ends it early.

        Raises:
            CheckpointError: if they cannot be had; the message says what to do.
        """
        stop = stop or threading.Event()
        data = bytearray()
        failures = 0
        while len(data) < wanted.nbytes:
            reached = len(data)
            try:
                for chunk in self._receive(wanted, reached):
                    data += chunk
                    if received:
                        received(len(chunk))
                    if stop.is_set():
                        raise _stopped(wanted.name)
            except HTTPError as error:
                failures = 1 if len(data) > reached else failures + 1
                self._wait_or_raise(error, failures, wanted.name, _ATTEMPTS, stop)
            else:
                if len(data) == reached:
                    raise CheckpointError(
                        f"{self.repo}: {self.endpoint} sent nothing of {wanted.name}; run again"
                    )
        return data

    def _receive(self, wanted: Range, reached: int) -> Iterator[bytes]:
        """What one request yields of ``wanted`` after its first ``reached`` bytes."""
        start, missing = wanted.offset + reached, wanted.nbytes - reached
        url = hf_hub_url(self.repo, wanted.name, revision=wanted.commit, endpoint=self.endpoint)
        headers = build_hf_headers(library_name="mlx-k3")
        headers["Range"] = f"bytes={start}-{start + missing - 1}"
        headers["Accept-Encoding"] = "identity"
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
            hf_raise_for_status(response)
            self._check_range(response, wanted, start)
            # Without a chunk size: with one, a drop would lose what is short of a whole chunk.
            for chunk in response.iter_bytes():
                yield chunk[:missing]
                missing -= len(chunk)
                if missing <= 0:
                    return

    def _check_range(self, response, wanted: Range, start: int) -> None:
        """Refuse an answer that is not the range that was asked for."""
        if response.status_code == 206:
            span, _, total = response.headers.get("Content-Range", "").partition("/")
            good = span.startswith(f"bytes {start}-")
        else:
            # A file whose every byte was asked for may come whole.
            total = response.headers.get("Content-Length", "")
            good = response.status_code == 200 and start == 0
        if not good:
            raise CheckpointError(
                f"{self.repo}: {self.endpoint} does not serve byte ranges of {wanted.name}; "
                "download the model with `hf download` and give its folder"
            )
        if total.isdigit() and int(total) != wanted.size_bytes:
            raise CheckpointError(
                f"{self.repo}: {wanted.name} has {int(total):,} bytes, its listing says "
                f"{wanted.size_bytes:,}; the repository is damaged, report it to its owner"
            )

    def _wait_or_raise(
        self, error: HTTPError, failures: int, what: str, attempts: int, stop: threading.Event
    ) -> None:
        """Return after a wait if another attempt makes sense.

        Raises:
            CheckpointError: if it does not, made from ``error``.
        """
        response = error.response if isinstance(error, HfHubHTTPError) else None
        if response is not None and response.status_code not in _TRANSIENT:
            raise CheckpointError(self._explain(error, what)) from error
        reason = f"HTTP {response.status_code}" if response is not None else _first_line(error)
        asked = _asked_wait(response.headers) if response is not None else None
        if failures >= attempts or (asked or 0) > _LONGEST_ASKED_WAIT_SECONDS:
            wait = f", and asks to wait {asked} s" if asked else ""
            raise CheckpointError(
                f"{self.repo}: {self.endpoint} does not deliver {what} ({reason}{wait}); check "
                "the connection and run again later: it goes on from where it stopped"
            ) from error
        backoff = min(_FIRST_WAIT_SECONDS * 2 ** (failures - 1), _LONGEST_WAIT_SECONDS)
        seconds = float(asked) if asked is not None else backoff
        self._announce(f"{what}: {reason}; trying again in {max(seconds, 1):.0f} s", seconds)
        if stop.wait(seconds):
            raise _stopped(what) from error

    def _announce(self, message: str, seconds: float) -> None:
        """Say that there is a wait, unless another thread has just said so."""
        until = time.monotonic() + seconds
        with self._lock:
            news = until > self._announced_until + seconds / 2
            self._announced_until = max(self._announced_until, until)
        if news:
            _log.warning(message)

    def _explain(self, error: HTTPError, what: str) -> str:
        """The line for a request that was refused."""
        login = "log in with `hf auth login` or set HF_TOKEN"
        page = f"{self.endpoint}/{self.repo}"
        # A gated repository is, for huggingface-hub, one that was not found: ask for it first.
        if isinstance(error, GatedRepoError):
            return f"{self.repo}: access is on request; accept the terms at {page}, then {login}"
        if isinstance(error, RepositoryNotFoundError):
            return (
                f"{self.repo}: no such folder, and no such model at {self.endpoint}; check the "
                f"spelling, or, if it is private, {login}"
            )
        if isinstance(error, RevisionNotFoundError):
            return f"{self.repo}: no such revision; see {page}/tree/main for what there is"
        if isinstance(error, EntryNotFoundError):
            return f"{self.repo}: {what} is missing; report it to the repository's owner"
        if isinstance(error, DisabledRepoError):
            return f"{self.repo}: access to it has been disabled; see {page}"
        status = error.response.status_code
        if status in (401, 403):
            return f"{self.repo}: the token was refused (HTTP {status}); {login}"
        return f"{self.repo}: {self.endpoint} refused {what} with HTTP {status}; run again later"


def _stopped(what: str) -> CheckpointError:
    """What a request ends with that nobody waits for any more."""
    return CheckpointError(f"the download of {what} was stopped; run again to go on")


def _asked_wait(headers) -> int | None:
    """The seconds a server asks to wait: the Hub's own header first, then Retry-After."""
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return limit.reset_in_seconds
    seconds = headers.get("Retry-After", "").strip()
    return int(seconds) if seconds.isdigit() else None


def _first_line(error: Exception) -> str:
    """A failure of the connection in a few words, which some exceptions do not have."""
    return str(error).strip().split("\n")[0] or type(error).__name__
