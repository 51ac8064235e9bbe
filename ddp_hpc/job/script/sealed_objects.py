"""Lets the ranks of a script unpickle only what a rank of the same attempt has pickled.

`all_gather_object`, `broadcast_object_list` and their like unpickle what arrives. PyTorch's store and gloo ask nobody who he is (PyTorch's
wheels have gloo without TLS: "unsupported gloo device" in 2.15), so another user of the cluster may come in a rank's place. All these
functions, on gloo and on NCCL, pickle by two names of `torch.distributed.distributed_c10d`. Here what they make begins with an
HMAC by the attempt's token, which only the user can read; what arrives without it is refused before anything is unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import IO, Any
from urllib.parse import urlsplit

from ddp_hpc.base.errors import WorkerError
from ddp_hpc.cluster.rendezvous.worker_env import ENDPOINT, HOSTED_STORE_VARIABLES

_MEETING_VARIABLES = (*ENDPOINT, "WORLD_SIZE", "RANK")
_NUM_SEAL_BYTES = hashlib.sha256().digest_size


def seal_at_rendezvous(
    environ: Mapping[str, str], token: Callable[[], str], *, on_refusal: Callable[[], object] = lambda: None
) -> bool:
    """Seal this process's objects, and hide its keys, from the moment at which it meets the other ranks where `environ` says.

    Return whether PyTorch asks here before it meets.

    A world that the script makes elsewhere has no seal, because programs without one may belong to it, and its rank zero hosts its store:
    PyTorch would take a MASTER_ADDR and MASTER_PORT that the script has set for ours, and wait for ever. `on_refusal` is called where
    this PyTorch pickles objects in another way.
    """
    rendezvous, c10d = (sys.modules.get(f"torch.distributed.{name}") for name in ("rendezvous", "distributed_c10d"))
    handlers = getattr(rendezvous, "_rendezvous_handlers", None)
    if c10d is None or not isinstance(handlers, dict):
        return False

    sealed: list[ModuleType] = []

    def sealing(handler: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def meet(*args: object, **options: object) -> Iterator[Any]:
            if HOSTED_STORE_VARIABLES.items() <= environ.items():
                for name in HOSTED_STORE_VARIABLES:
                    os.environ[name] = str(_is_meeting_place(environ, str(args[0])))
            if any(os.environ.get(name) != environ.get(name) for name in _MEETING_VARIABLES):
                return handler(*args, **options)
            key = token().encode()
            if not sealed:  # a script may leave its group and meet again
                sealed.append(c10d)
                if not seal_objects(c10d, key):
                    on_refusal()
            prefix = hmac.new(key, b"keys of scripts", hashlib.sha256).hexdigest()
            return ((c10d.PrefixStore(prefix, store), *ranks) for store, *ranks in handler(*args, **options))

        return meet

    handlers.update({scheme: sealing(handler) for scheme, handler in handlers.items()})
    return True


def _is_meeting_place(environ: Mapping[str, str], url: str) -> bool:
    """Tell whether ranks that meet at a URL meet where `environ` says."""
    at = urlsplit(url)
    place = (at.hostname, str(at.port)) if at.scheme == "tcp" else tuple(map(os.environ.get, ENDPOINT))
    return place == tuple(map(environ.get, ENDPOINT))


def seal_objects(c10d: ModuleType, key: bytes) -> bool:
    """Have PyTorch's module of collectives send objects with a seal, and unpickle none without it; return False where it cannot be had.

    What it unpickles then raises `WorkerError` where the seal is missing or another one.
    """
    own_pickler: Any = getattr(c10d, "_pickler", None)  # pickle's, or what the script has put there
    own_unpickler: Any = getattr(c10d, "_unpickler", None)
    if own_pickler is None or own_unpickler is None:
        return False

    class SealedPickler:
        def __init__(self, file: IO[bytes]) -> None:
            self._file = file

        def dump(self, value: object) -> None:
            buffer = io.BytesIO()
            own_pickler(buffer).dump(value)
            plain = buffer.getvalue()
            self._file.write(hmac.digest(key, plain, "sha256") + plain)

    class SealedUnpickler:
        def __init__(self, file: IO[bytes]) -> None:
            self._file = file

        def load(self) -> object:
            seal, plain = self._file.read(_NUM_SEAL_BYTES), self._file.read()
            if not hmac.compare_digest(seal, hmac.digest(key, plain, "sha256")):
                raise WorkerError(
                    "An object that another rank has sent does not carry this attempt's seal, so it is not unpickled. Either a process "
                    "of another user has joined in a rank's place, or a rank is a program that `ddp-hpc` does not start itself."
                )
            result: object = own_unpickler(io.BytesIO(plain)).load()
            return result

    c10d._pickler, c10d._unpickler = SealedPickler, SealedUnpickler  # type: ignore[attr-defined]  # noqa: SLF001
    return True
