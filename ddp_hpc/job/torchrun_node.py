"""One node's torchrun, told which node hosts the rendezvous and by which address the others reach this one.

    python -m ddp_hpc.job.torchrun_node --num-workers 4 --meet "ADDRESS PORT" -- OPTIONS OF TORCHRUN ...

torchrun guesses both from names: the host is the node whose own name resolves to the endpoint. Where a node's own name
means 127.0.1.1, as Debian's installer has it, no node is, and all wait for each other.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ddp_hpc import processes
from ddp_hpc.job.meeting import Meeting, network_defaults, own_address
from ddp_hpc.job.surroundings import torch_defaults
from ddp_hpc.slurm.allocation import step_place


def main(argv: Sequence[str] | None = None) -> None:
    """Become torchrun."""
    parser = argparse.ArgumentParser(prog="ddp_hpc.job.torchrun_node", description=__doc__)
    parser.add_argument("--num-workers", type=int, required=True)
    parser.add_argument("--cpus-per-worker", type=int)
    parser.add_argument("--meet", type=Meeting.parse, required=True, metavar="'ADDRESS PORT'")
    parser.add_argument("options", nargs="+", help="of torchrun, and what it is to start")
    arguments = parser.parse_args(argv)
    address = arguments.meet.address
    num_threads = processes.threads_per_worker(
        sorted(os.sched_getaffinity(0)), arguments.num_workers, arguments.cpus_per_worker
    )
    is_host = step_place(os.environ).node_rank == 0
    told = [f"--rdzv-conf=is_host={int(is_host)}", f"--local-addr={own_address(address)}"]
    os.execve(  # noqa: S606  # no shell
        sys.executable,
        [sys.executable, "-m", "torch.distributed.run", *told, *arguments.options],
        {**torch_defaults(num_threads), **network_defaults(address), **os.environ},
    )


if __name__ == "__main__":
    main()
