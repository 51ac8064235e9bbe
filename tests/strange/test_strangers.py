"""Other users of the machine who reach the port of the ranks' store: nothing of theirs is believed or run."""

from __future__ import annotations

import os
import pickle
import stat
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_hpc.base.errors import WorkerError
from ddp_hpc.run.checkpoints.checkpoint_names import checkpoint_path
from ddp_hpc.run.checkpoints.checkpoint_store import verify_checkpoint
from ddp_hpc.run.run_dir.ownership import claim_run
from ddp_hpc.run.run_dir.records import read_rendezvous_token, write_rendezvous_token
from ddp_hpc.run.spec import CheckpointSpec
from ddp_hpc.train import process_group
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.sealed_store import HEARTBEAT_INTERVAL_S, SealedStore
from ddp_hpc.train.state.checkpoint import Checkpointer
from tests.distributed.processes import in_group
from tests.made_run import make_run
from tests.unit.made_state import make_checkpointers, make_state, take_step

FORGED = ['{"error": "a stranger"}', "null", '"a stranger"', "0", ""]


class Trap:
    """Says when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os._exit, ("unpickled",)


def disturb(port: int, is_over: threading.Event) -> None:
    """Set every key that a stranger can guess, again and again."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
    checkpoint = [f"checkpoint/1/{name}" for name in ("verdict", "0", "1", "read/1")]
    keys = [f"start-0/{part}/{name}" for part in ("main", "side") for name in (*checkpoint, "resume")]
    while not is_over.is_set():
        for key in keys:
            for text in (*FORGED, pickle.dumps(Trap(), protocol=0).decode("ascii")):
                store.set(key, text)
        time.sleep(0.01)


def test_a_stranger_who_guesses_keys_fails_no_save_and_no_resume(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    claim_run(run, 0)

    def train(group: Group) -> int | None:
        state = make_state(rank=group.rank_info.rank, world_size=2)
        checkpointer = Checkpointer(run, group, attempt=0, keep=CheckpointSpec())
        is_over = threading.Event()
        if group.rank_info.is_rank_zero:
            threading.Thread(target=disturb, args=(group.rank_info.master_port, is_over), daemon=True).start()
            time.sleep(0.5)
        take_step(state)
        checkpointer.save_and_wait(state)
        step = Checkpointer(run, group, attempt=0, keep=CheckpointSpec()).restore_newest(state, seed=0)
        if group.rank_info.is_rank_zero:
            group.store.get("over")  # the store is in this process
            is_over.set()
        else:
            group.store.set("over", "")
        return step

    steps = in_group(2, train, tmp_path / "ranks")

    assert steps == [1, 1]
    assert verify_checkpoint(checkpoint_path(run, 1)).world_size == 2


def test_a_text_with_another_seal_is_as_if_it_were_not_there() -> None:
    plain = dist.HashStore()
    ours, theirs = SealedStore(plain, "secret"), SealedStore(plain, "guess")
    theirs.set("key", "forged")
    assert ours.try_get("key") is None
    with pytest.raises(WorkerError, match="sent neither that nor a heartbeat"):
        ours.get("key", silence_s=0.0)

    ours.set("other", "true")
    plain.set("key", plain.get("other").decode())  # replayed under another name

    assert ours.try_get("key") is None
    assert ours.get("other") == "true"


# --- waiting for who moves -------------------------------------------------------------------------------------------


def test_a_rank_waits_as_long_as_the_other_says_that_it_moves_and_no_longer() -> None:
    plain = dist.HashStore()
    heard: list[float] = []
    began = time.monotonic()

    def work() -> None:
        writer = SealedStore(plain, "secret")
        while time.monotonic() - began < 3 * HEARTBEAT_INTERVAL_S:
            writer.heartbeat("key")
            time.sleep(0.05)

    working = threading.Thread(target=work)
    working.start()
    with pytest.raises(WorkerError, match="'key'"):
        SealedStore(plain, "secret").get(
            "key", silence_s=1.5 * HEARTBEAT_INTERVAL_S, on_heartbeat=lambda: heard.append(time.monotonic())
        )
    working.join()

    assert len(heard) >= 2
    assert time.monotonic() - began >= 3 * HEARTBEAT_INTERVAL_S


# --- the token -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_the_token_of_an_attempt_can_be_read_by_its_user_alone_and_is_new_each_time(umask: int, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    before = os.umask(umask)
    try:
        write_rendezvous_token(run.rendezvous_token(0))
        first = read_rendezvous_token(run.rendezvous_token(0))
        write_rendezvous_token(run.rendezvous_token(0))
    finally:
        os.umask(before)

    assert stat.S_IMODE(run.rendezvous_token(0).stat().st_mode) == 0o600
    assert len(first) == 64
    assert read_rendezvous_token(run.rendezvous_token(0)) != first


def test_nothing_in_the_package_unpickles_what_came_from_another_process() -> None:
    package = Path(process_group.__file__).parents[1]
    sealed = package / "job" / "script" / "sealed_objects.py"  # unpickles what a seal of the attempt lets through
    text = "\n".join(path.read_text() for path in package.rglob("*.py") if path != sealed)

    for name in ("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object", "pickle.load"):
        assert name not in text
    assert torch.distributed.is_available()


def test_rank_zeros_main_thread_hears_that_another_rank_still_writes(tmp_path: Path) -> None:
    """So that no watchdog takes a long save for a hang."""
    run = make_run(tmp_path)
    first, second = make_checkpointers(run, world_size=2)
    states = [make_state(rank=rank, world_size=2) for rank in range(2)]
    for state in states:
        take_step(state)
    heard = threading.Event()
    first.on_progress = heard.set
    first.save(states[0])
    waiting = threading.Thread(target=first.wait)
    waiting.start()
    time.sleep(1.5)  # so that what rank zero has written itself is heard of
    heard.clear()

    deadline = time.monotonic() + 60
    while not heard.is_set() and time.monotonic() < deadline:
        second._send_heartbeat(second._key(1, "1"))
        time.sleep(0.1)
    second.save(states[1])
    waiting.join()

    assert heard.is_set()
    assert verify_checkpoint(checkpoint_path(run, 1)).world_size == 2
