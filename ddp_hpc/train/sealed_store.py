"""Short texts between the ranks of an attempt, which nobody else can make, waited for while their writer moves.

Any process that reaches the port of PyTorch's store can read, set and delete its keys. Each text is sealed with the
attempt's token, which only the user's own processes can read; a text with another seal is not used, as if it were not
there. Texts are JSON or numbers, so that nothing from the store is ever unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable

import torch.distributed as dist

from ddp_hpc.errors import WorkerError

SIGN_INTERVAL_S = 2.0
"""How often a rank that others wait for says that it moves."""
_SHORTEST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.25


class SealedStore:
    """One connection to the store, for one thread: a waiting client blocks all users of its connection."""

    def __init__(self, store: dist.Store, token: str, *, silence_s: float = 600.0) -> None:
        self._store = store
        self._token = token.encode()
        self._silence_s = silence_s
        self._num_signs = 0
        self._signed_at = float("-inf")

    def set(self, key: str, text: str) -> None:
        """Give a text to whoever asks for the key."""
        self._store.set(key, f"{self._seal(key, text)} {text}")

    def sign(self, key: str) -> None:
        """Say that what will be set as `key` is being worked on; nearly free when it was said a moment ago."""
        now = time.monotonic()
        if now - self._signed_at >= SIGN_INTERVAL_S:
            self._signed_at = now
            self._num_signs += 1
            self.set(_sign_of(key), str(self._num_signs))

    def look(self, key: str) -> str | None:
        """Return the text of a key, or None where none of ours is there."""
        if not self._store.check([key]):
            return None
        seal, _, text = self._store.get(key).decode(errors="replace").partition(" ")
        return text if hmac.compare_digest(seal.encode(), self._seal(key, text).encode()) else None

    def get(self, key: str, *, on_sign: Callable[[], object] = lambda: None, silence_s: float | None = None) -> str:
        """Wait for the text of a key, as long as its writer moves; `on_sign` is called when it says that it does.

        Raises:
            WorkerError: where nothing was heard of the writer for `silence_s`.
        """
        silence_s = self._silence_s if silence_s is None else silence_s
        sign, seen, pause = _sign_of(key), None, _SHORTEST_PAUSE_S
        heard_at = looked_at = time.monotonic()
        while True:
            text = self.look(key)
            if text is not None:
                return text
            now = time.monotonic()
            if now - looked_at >= SIGN_INTERVAL_S / 2:
                looked_at = now
                signed = self.look(sign)
                if signed != seen:
                    seen, heard_at = signed, now
                    on_sign()
            if now - heard_at >= silence_s:
                raise WorkerError(f"Nothing was heard of {key!r} for {silence_s:.0f} s: its rank does not move.")
            time.sleep(pause)
            pause = min(pause * 1.2, _LONGEST_PAUSE_S)

    def _seal(self, key: str, text: str) -> str:
        return hmac.new(self._token, f"{key}\0{text}".encode(), hashlib.sha256).hexdigest()


def prefix_of(token: str) -> str:
    """Return what the attempt's keys begin with: nobody sets one by accident, and it does not give the token away."""
    return hmac.new(token.encode(), b"keys", hashlib.sha256).hexdigest()[:32]


def _sign_of(key: str) -> str:
    return f"{key}/sign"
