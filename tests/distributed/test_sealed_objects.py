"""Ranks of a script that send each other Python objects, and a stranger who comes in the place of one of them."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.test_scripts import TWO, Place

SENDS_OBJECTS = """
import os
import pickle
import torch.distributed as dist

class Mine:
    def __eq__(self, other):
        return isinstance(other, Mine)

class Odd(pickle.Pickler):
    # As libraries do that send what pickle cannot.
    def persistent_id(self, value):
        return "a function" if value is SENT_BY_NAME else None

class OddBack(pickle.Unpickler):
    def persistent_load(self, name):
        return name

SENT_BY_NAME = lambda: None
dist.distributed_c10d._pickler, dist.distributed_c10d._unpickler = Odd, OddBack
dist.init_process_group("gloo")
found = [None, None]
dist.all_gather_object(found, SENT_BY_NAME)
assert found == ["a function"] * 2, found
dist.destroy_process_group()
# At a file: in a store that is met at twice, PyTorch may find the addresses of the group before.
place = {"init_method": "file://" + os.path.abspath("meet"), "rank": int(os.environ["RANK"]), "world_size": 2}
dist.init_process_group("gloo", **place)
rank = dist.get_rank()
for group in (None, dist.new_group([0, 1])):
    found = [None, None]
    dist.all_gather_object(found, {"rank": rank, "own": Mine()}, group=group)
    assert found == [{"rank": 0, "own": Mine()}, {"rank": 1, "own": Mine()}], found
    dist.gather_object(rank, found if rank == 0 else None, group=group)
    assert rank == 1 or found == [0, 1], found
    values = ["text", Mine(), b"x" * 5_000_000] if rank == 0 else [None] * 3
    dist.broadcast_object_list(values, src=0, group=group)
    assert values == ["text", Mine(), b"x" * 5_000_000]
    own = [None]
    dist.scatter_object_list(own, ["for 0", Mine()] if rank == 0 else None, src=0, group=group)
    assert own == ["for 0" if rank == 0 else Mine()], own
    if rank == 0:
        dist.send_object_list([Mine()], dst=1, group=group)
    else:
        dist.recv_object_list(own, src=0, group=group)
        assert own == [Mine()], own
dist.destroy_process_group()
print("all equal")
"""

LETS_A_STRANGER_IN = """
import os, subprocess, sys
import torch.distributed as dist

if os.environ["RANK"] == "1":
    sys.exit(subprocess.call([sys.executable, "stranger.py"]))
dist.init_process_group("gloo")
found = [None, None]
dist.all_gather_object(found, "of rank zero")
"""

STRANGER = """
import datetime, os, pathlib, time
import torch.distributed as dist

class Trap:
    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path("unpickled").absolute(),)

store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
while not (found := [key for key in store.list_keys() if key.endswith("/0//cpu//0/0")]):
    time.sleep(0.05)
mine = dist.PrefixStore(found[0].removesuffix("/0//cpu//0/0"), store)
dist.init_process_group("gloo", store=mine, rank=1, world_size=2, timeout=datetime.timedelta(seconds=20))
print("joined", flush=True)
found = [None, None]
dist.all_gather_object(found, Trap())
"""

MEETS_ELSEWHERE = """
import os, socket, subprocess, sys
import torch.distributed as dist

if os.environ["RANK"] == "0":
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    os.environ.update(MASTER_PORT=str(port), WORLD_SIZE="2")
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    code = "import torch.distributed as d; d.init_process_group('gloo'); f = [0, 0]; d.all_gather_object(f, 'other'); d.destroy_process_group()"
    other = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "RANK": "1"})
    dist.init_process_group("gloo")
    found = [None, None]
    dist.all_gather_object(found, "script")
    print(found, flush=True)
    sys.exit(other.wait())
"""


SAYS_WHERE = """
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank, world_size, url=None):
    if url is None:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", sys.argv[1]
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world_size)
    total = torch.ones(1)
    dist.all_reduce(total)
    os.write(1, f"sum {total.item()}\\n".encode())  # whole: spawned ranks share one log
    dist.destroy_process_group()

if __name__ == "__main__":
    if sys.argv[2] == "spawns":
        mp.spawn(work, args=(2,), nprocs=2)
    else:
        work(int(os.environ["RANK"]), 2, f"tcp://localhost:{sys.argv[1]}" if sys.argv[2] == "url" else None)
"""


SPAWNS_BESIDE_OTHERS = """
import os, sys
import torch.multiprocessing as mp
import says

def work(rank, argv):
    sys.argv = argv
    says.work(rank, 2)

if __name__ == "__main__":
    sys.argv[1] = sys.argv[1 + int(os.environ["RANK"])]
    mp.spawn(work, args=(sys.argv,), nprocs=2)
os.environ.setdefault("MASTER_PORT", "29500")
"""
EARLY = """
import os, sys
os.environ["OMP_NUM_THREADS"] = "1"
from where import told
import says
says.work(int(os.environ["RANK"]), 2, "env://")
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "settings"),
    [
        ("ranks", TWO),
        pytest.param("url", TWO, marks=pytest.mark.long),
        pytest.param("spawns", ("resources.workers_per_node=1",), marks=pytest.mark.long),
        pytest.param("ranks", (*TWO, "script.start=exec"), marks=pytest.mark.long),
    ],
)
def test_a_script_may_say_itself_where_its_ranks_meet(how: str, settings: Sequence[str], place: Place) -> None:
    """As PyTorch's tutorials do: nobody else hosts a store there."""
    (place.path / "says.py").write_text(SAYS_WHERE)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])

    done = place.submit(settings, "python", "says.py", port, how)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "sum 2.0" in place.log("says")


@pytest.mark.long
@pytest.mark.parametrize("command", ["bash run.sh", "python early.py", "python spawns.py"])
def test_a_shell_a_module_of_a_new_process_and_ranks_that_spawn_may_say_where_they_meet(
    command: str, place: Place
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [str(taken.getsockname()[1]) for taken in (one, other)]
    (place.path / "says.py").write_text(SAYS_WHERE)
    (place.path / "spawns.py").write_text(SPAWNS_BESIDE_OTHERS)
    (place.path / "early.py").write_text(EARLY)
    (place.path / "where.py").write_text(f"import os\ntold = os.environ['MASTER_PORT'] = '{ports[0]}'\n")
    (place.path / "run.sh").write_text(f"export MASTER_PORT={ports[0]}\n{sys.executable} says.py {ports[0]} ranks\n")

    done = place.submit((*TWO, "name=says"), *command.split(), *ports)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "sum 2.0" in place.log("says")


@pytest.mark.long
def test_ranks_exchange_objects_by_each_of_pytorchs_functions(place: Place) -> None:
    (place.path / "sends.py").write_text(SENDS_OBJECTS)

    done = place.submit(TWO, "python", "sends.py")

    assert done.returncode == 0, done.stdout + done.stderr
    assert [place.log("sends", rank).splitlines()[-1] for rank in (0, 1)] == ["all equal"] * 2


@pytest.mark.skipif(
    not hasattr(dist.TCPStore, "list_keys"), reason="this PyTorch shows nobody the keys that ranks meet by"
)
def test_a_stranger_who_joins_in_a_ranks_place_has_nothing_unpickled(place: Place) -> None:
    (place.path / "lets.py").write_text(LETS_A_STRANGER_IN)
    (place.path / "stranger.py").write_text(STRANGER)

    done = place.submit((*TWO, "restart.max_no_progress=1"), "python", "lets.py")

    assert done.returncode != 0, done
    assert "joined" in place.log("lets", 1)
    assert "WorkerError: An object that another rank has sent does not carry this attempt's seal" in place.log("lets")
    assert not (place.path / "unpickled").exists()


@pytest.mark.long
def test_what_a_script_exchanges_with_programs_of_its_own_elsewhere_stays_as_it_is(place: Place) -> None:
    (place.path / "elsewhere.py").write_text(MEETS_ELSEWHERE)

    done = place.submit(TWO, "python", "elsewhere.py")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "['script', 'other']" in place.log("elsewhere")


@pytest.mark.long
def test_a_pytorch_that_pickles_in_another_way_runs_the_script_and_says_that_nothing_is_sealed(place: Place) -> None:
    (place.path / "other.py").write_text(
        "import torch.distributed as dist\n"
        "del dist.distributed_c10d._pickler\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
    )

    done = place.submit(TWO, "python", "other.py")

    assert done.returncode == 0, done.stdout + done.stderr
    assert place.log("other").count("send each other carry no seal") == 1
    assert "carry no seal" not in place.log("other", 1)
