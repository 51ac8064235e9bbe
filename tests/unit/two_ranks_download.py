"""One of two ranks that want the same data; run by test_rank_zero_first as `two_ranks_download.py RANK DIRECTORY`.

It writes rank-RANK.json: what this rank got, after how long, and what it was told when the download failed. The download takes longer than
the process group's timeout.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from urllib.error import URLError

import torch.distributed as dist

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.train.recipes.rank_zero_first import rank_zero_first

TIMEOUT_S = 0.1


class SlowDownload:
    """Behaves like torchvision's data, and keeps count of its downloads."""

    def __init__(self, root: Path, *, download: bool) -> None:
        if download:
            with (root / "downloads").open("a") as count:
                count.write(f"rank {dist.get_rank()}\n")
            time.sleep(5 * TIMEOUT_S)
            (root / "data").write_text("the data")
        if not (root / "data").exists():
            raise RuntimeError("Dataset not found. You can use download=True to download it")
        self.text = (root / "data").read_text()


def _fail(_may_write: bool) -> SlowDownload:
    raise URLError("no route to host")


def main(rank: int, root: Path) -> None:
    """Ask twice, once in vain."""
    dist.init_process_group("gloo", init_method=f"file://{root}/meeting", rank=rank, world_size=2)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S))  # once they have met, which takes longer
    began = time.monotonic()
    got = rank_zero_first(lambda may_write: SlowDownload(root, download=may_write)).text
    seconds = time.monotonic() - began
    try:
        told = f"nothing, but got {rank_zero_first(_fail).text}"
    except ConfigError as error:
        told = str(error)
    (root / f"rank-{rank}.json").write_text(json.dumps({"got": got, "seconds": seconds, "told": told}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
