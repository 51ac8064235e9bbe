"""Exchanges short authenticated texts between the ranks of an attempt, with heartbeats while a rank is at work.

Every process that can connect to the port of PyTorch's store can read, set and delete its keys. So each text carries an
HMAC made with the attempt's token, which only processes of the user can read; a text with a wrong HMAC is ignored. Texts are
JSON or numbers: nothing from the store is unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable

import torch.distributed as dist

from ddp_hpc.base.errors import WorkerError

HEARTBEAT_INTERVAL_S = 2.0
"""How often a rank that others wait for reports that it is at work."""
_PART_CHARS = 4 << 20
"""PyTorch's TCPStore refuses values above 8 MiB (libuv back end), so a longer text lies under several keys."""
_PARTS_PREFIX = "\0parts "
"""Begins the text of a key whose text lies in parts; JSON and numbers never begin so."""
_SHORTEST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.25


class SealedStore:
    """One connection to the store, for one thread: a request that waits blocks all other requests on its connection."""

    def __init__(self, store: dist.Store, token: str, *, silence_s: float = 600.0) -> None:
        self._store = store
        self._token = token.encode()
        self._silence_s = silence_s
        self._num_heartbeats = 0
        self._heartbeat_at = float("-inf")

    def set(self, key: str, text: str) -> None:
        # The key itself is set last: a reader that finds it finds all parts.
        if len(text) > _PART_CHARS:
            parts = [text[begin : begin + _PART_CHARS] for begin in range(0, len(text), _PART_CHARS)]
            for number, part in enumerate(parts):
                self._set(f"{key}/part-{number}", part)
            text = f"{_PARTS_PREFIX}{len(parts)}"
        self._set(key, text)

    def _set(self, key: str, text: str) -> None:
        self._store.set(key, f"{self._hmac(key, text)} {text}")

    def heartbeat(self, key: str) -> None:
        """Report that this rank is at work on what it will set as `key`; nearly free if called often."""
        now = time.monotonic()
        if now - self._heartbeat_at >= HEARTBEAT_INTERVAL_S:
            self._heartbeat_at = now
            self._num_heartbeats += 1
            self.set(f"{key}/heartbeat", str(self._num_heartbeats))

    def try_get(self, key: str) -> str | None:
        """Return the text of a key; None if it is not set, or not by a rank of this attempt."""
        if not self._store.check([key]):
            return None
        found, _, text = self._store.get(key).decode(errors="replace").partition(" ")
        # In constant time, so that a forger learns nothing from how long the comparison takes:
        # https://docs.python.org/3/library/hmac.html#hmac.compare_digest
        if not hmac.compare_digest(found.encode(), self._hmac(key, text).encode()):
            return None
        if not text.startswith(_PARTS_PREFIX):
            return text
        parts = [self.try_get(f"{key}/part-{number}") for number in range(int(text.removeprefix(_PARTS_PREFIX)))]
        return None if None in parts else "".join(filter(None, parts))

    def get(
        self, key: str, *, on_heartbeat: Callable[[], object] = lambda: None, silence_s: float | None = None
    ) -> str:
        """Wait for the text of a key while its writer sends heartbeats; call `on_heartbeat` for each of them.

        Raises:
            WorkerError: if there is neither a text nor a heartbeat for `silence_s`.
        """
        silence_s = self._silence_s if silence_s is None else silence_s
        heartbeat_key, seen, pause = f"{key}/heartbeat", None, _SHORTEST_PAUSE_S
        heard_at = looked_at = time.monotonic()
        while True:
            text = self.try_get(key)
            if text is not None:
                return text
            now = time.monotonic()
            if now - looked_at >= HEARTBEAT_INTERVAL_S / 2:
                looked_at = now
                counted = self.try_get(heartbeat_key)
                if counted != seen:
                    seen, heard_at = counted, now
                    on_heartbeat()
            if now - heard_at >= silence_s:
                raise WorkerError(
                    f"This rank waited for a message of another rank ({key!r}), which sent neither that nor a heartbeat for "
                    f"{silence_s:.0f} s. The other rank hangs or has died: read the logs of all ranks (`ddp-hpc logs RUN --all`)."
                )
            time.sleep(pause)
            pause = min(pause * 1.2, _LONGEST_PAUSE_S)

    def take(self, key: str, *, on_heartbeat: Callable[[], object]) -> str:
        """Return the text of a key as `get` does, and delete it; for what one rank alone reads."""
        text = self.get(key, on_heartbeat=on_heartbeat)
        for read in (key, f"{key}/heartbeat"):
            self._store.delete_key(read)
        return text

    def _hmac(self, key: str, text: str) -> str:
        return hmac.new(self._token, f"{key}\0{text}".encode(), hashlib.sha256).hexdigest()


def token_prefix(token: str) -> str:
    """Return the prefix of the attempt's keys: no other process sets them by accident, and it does not reveal the token."""
    return hmac.new(token.encode(), b"keys", hashlib.sha256).hexdigest()[:32]
