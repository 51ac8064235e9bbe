"""What an exception concerns, and whether another attempt may get past it: asked in the process that has caught it.

Two failures of the same sample end a run at once (`requeue.repeated_sample`). So what is not proved to last may recover, and only the
loader of a recipe proves it (`train/data/loader.py`): a message that quotes a file does not say that the file was decoded.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

from ddp_hpc.base.errors import text_of
from ddp_hpc.base.patience import ask_in_threads

_DATA_ERRORS = (ValueError, LookupError, ArithmeticError)
"""What code raises that meets content which it does not expect. TypeError, AttributeError and AssertionError are left out, because
some readers return None where a file system fails (`cv2.imread`); RuntimeError, because PyTorch raises it for devices, the network
and processes that are gone; EOFError, because `multiprocessing` raises it where a peer is gone."""
_DECODING_ERROR_NAMES = frozenset(
    {
        *("PIL.UnidentifiedImageError", "builtins.UnicodeDecodeError", "json.decoder.JSONDecodeError"),
        *("_lzma.LZMAError", "lzma.LZMAError", "_pickle.UnpicklingError", "pickle.UnpicklingError"),
        *("_csv.Error", "binascii.Error", "gzip.BadGzipFile", "struct.error", "zipfile.BadZipFile", "zlib.error"),
    }
)
"""The exceptions by which a decoder says that bytes are not of its format."""
_SETTLED_S = 60.0
"""A file that was written more recently may still be written."""
ANSWER_S = 5.0
"""How long to wait for a file system, which may hang; the report of the failure waits as long."""
_MOST_IN_CHAIN = 20
_MOST_PATH_CHARS = 1000


@dataclass(frozen=True, kw_only=True)
class AffectedEntity:
    """What an exception concerns."""

    entity: str = ""
    """The sample, `train_data[17]`, or the file; empty where none is known."""
    version: str = ""
    """Size and time of the file, as it was; of a sample that is proved to last, size and hash of its file."""
    may_recover: bool = True
    """Whether another attempt may get past it; false only where the records of this process prove the opposite."""
    place: str = ""
    """`file.py in function`, where it was raised."""


def affected_entity(error: BaseException) -> AffectedEntity:
    """Return what an exception concerns; one that carries its own answer (`affected`) knows more."""
    known = vars(error).get("affected")
    if isinstance(known, AffectedEntity):
        return known
    files = [] if isinstance(error, OSError) and error.errno is not None else quoted_files(text_of(error))
    version = _size_and_mtime(files[0]) if len(files) == 1 else ""
    return AffectedEntity(entity=files[0] if version else "", version=version, place=raising_place(error))


def is_content_error(error: BaseException) -> bool:
    """Tell whether code has met content that it does not accept, and nothing of a file system, the network or a device.

    All exceptions that led to this one count, also those that `raise ... from None` hides.
    """
    return all(
        (isinstance(one, _DATA_ERRORS) and not isinstance(one, OSError)) or _is_format_error(one)
        for one in _error_chain(error)
    )


def is_decoder_error(error: BaseException) -> bool:
    """Tell whether a decoder has rejected content, and all that led to it is of content, too."""
    return is_content_error(error) and any(map(_is_format_error, _error_chain(error)))


def raising_place(error: BaseException) -> str:
    """Return `file.py in function`, where an exception was raised."""
    frame = _innermost_frame(error)
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)} in {frame.f_code.co_name}"  # noqa: PTH119  a name of any system


def _error_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that led to it; the exception of a process that passed it on has none."""
    waiting, seen = [error], set[int]()
    while waiting and len(seen) < _MOST_IN_CHAIN:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [other for other in (one.__cause__, one.__context__) if other is not None]


def _is_format_error(error: BaseException) -> bool:
    """Tell whether a decoder found that bytes are not of its format."""
    frame = _innermost_frame(error)
    module = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    if module == "torch._utils":  # passed on by a loader process; what led to it is not known here
        return False
    if any(f"{kind.__module__}.{kind.__name__}" in _DECODING_ERROR_NAMES for kind in type(error).__mro__):
        return not isinstance(error, OSError) or error.errno is None
    # Pillow says of a truncated image `OSError`, without a number. What the operating system reports has one.
    # Other modules of it say the same where a font or a colour profile cannot be opened.
    is_of_images = module in ("PIL.Image", "PIL.ImageFile") or (module.startswith("PIL.") and module.endswith("Plugin"))
    return type(error) is OSError and error.errno is None and is_of_images


def _innermost_frame(error: BaseException) -> FrameType | None:
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return None if at is None else at.tb_frame


def _size_and_mtime(path: str) -> str:
    """Return size and time of a file; empty where there is none, or it may still be written."""
    if len(path) > _MOST_PATH_CHARS or not path.isprintable():
        return ""

    def ask() -> os.stat_result | None:
        with suppress(OSError, ValueError):
            return os.stat(path)  # noqa: PTH116  a Path raises for some texts that are no path
        return None

    found = ask_in_threads(ANSWER_S, {path: ask}).get(path)
    if found is None:
        return ""
    is_settled = stat.S_ISREG(found.st_mode) and time.time() - found.st_mtime > _SETTLED_S
    return f"{found.st_size} bytes, {found.st_mtime_ns}" if is_settled else ""


_SAMPLE_PATTERN = re.compile(r"`((?:train|eval)_data\[-?\d+\])`")
_QUOTED_PATH_PATTERN = re.compile(r"""['"]((?:/|\.{1,2}/)?[^'"\s]*/[^'"]+|[^'"\s/]+\.\w{1,8})['"]""")
_MOST_SEARCH_CHARS = 2000
"""Characters of a message: the search for a path takes quadratic time, and a message may have a million."""
_TMP_PATH_PATTERN = re.compile(r"(?:/tmp|/var/tmp|/dev/shm)(?:/|$)|/torch_\d")
_VARYING_PATTERNS = (
    (re.compile(r"/(?:tmp|var/tmp|dev/shm)/[^\s'\":,;]*"), "<tmp>"),
    (re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "<id>"),
    (re.compile(r"0x[0-9a-fA-F]+"), "<address>"),
    (re.compile(r"\[?(?:\d{1,3}\.){3}\d{1,3}\]?(?::\d+)?"), "<address>"),
    (re.compile(r"\[[0-9a-fA-F:]*::?[0-9a-fA-F:]*\]:\d+"), "<address>"),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?"), "<time>"),
    (re.compile(r"(?<!Errno )(?<![A-Za-z_])\d+(?:\.\d+)?"), "<n>"),
)
"""What differs from rank to rank, from node to node and from time to time."""


def invariant_text(text: str, *, hosts: tuple[str, ...] = ()) -> str:
    """Return a text without rank, node, time, addresses, temporary paths and counts."""
    if names := "|".join(map(re.escape, sorted({host for host in hosts if host}, key=len, reverse=True))):
        text = re.sub(rf"\b(?:{names})\b", "<node>", text)
    for pattern, word in _VARYING_PATTERNS:
        text = pattern.sub(word, text)
    return " ".join(text.split())


def fingerprint(failure: str, text: str, place: str, *, hosts: tuple[str, ...] = ()) -> str:
    """Return a short hash that two failures share if they are of one class, one text and one place in the code."""
    import hashlib  # late: agents and workers read error reports, but compute no hash

    whole = "\n".join([failure, invariant_text(text[:_MOST_SEARCH_CHARS], hosts=hosts), place])
    return hashlib.sha256(whole.encode("utf-8", errors="replace")).hexdigest()[:12]


def sample_or_file(text: str) -> str:
    """Return the sample or the file that a message names; empty where it names none, or a temporary file."""
    if sample := _SAMPLE_PATTERN.search(text):
        return sample[1]
    return next(iter(quoted_files(text)), "")


def quoted_files(text: str) -> Sequence[str]:
    """Return the paths in quotation marks, each once, without temporary ones."""
    paths = (found[1] for found in _QUOTED_PATH_PATTERN.finditer(text[:_MOST_SEARCH_CHARS]))
    return list(dict.fromkeys(path for path in paths if not _TMP_PATH_PATTERN.match(path)))
