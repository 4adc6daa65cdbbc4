"""Process groups that are made one after the other with one store are told apart, on all ranks alike."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import pytest
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  # the backend "fake"

from asynctp_passes.torch_private import process_groups

WORLD = "0"  # torch's name of the default group


@contextlib.contextmanager
def life(store: dist.Store, rank: int = 0) -> Iterator[Any]:
    """A default group that communicates with no one, but has a store."""
    dist.init_process_group("fake", store=dist.PrefixStore("default_pg", store), rank=rank, world_size=2)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def another_process() -> Iterator[None]:
    """What this process knows of groups is put aside."""
    with (
        mock.patch.object(process_groups, "_lives", WeakKeyDictionary()),
        mock.patch.object(process_groups, "_newest", {}),
    ):
        yield


def asked() -> str:
    return process_groups.group_generation(WORLD)


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def test_each_life_has_its_number(store: dist.Store) -> None:
    found = []
    for _ in range(3):
        with life(store):
            found += [asked(), asked()]
    assert found == ["0.0", "0.0", "0.1", "0.1", "0.2", "0.2"]


def test_a_rank_that_never_asked_before_gets_the_same(store: dist.Store) -> None:
    with life(store, rank=0):
        assert asked() == "0.0"
    with another_process(), life(store, rank=1):
        assert asked() == "0.1"
    with life(store, rank=1):
        assert asked() == "0.2", "ranks may change places, too"


def test_a_group_that_is_held_on_to_ends_with_the_next_one(store: dist.Store) -> None:
    with life(store) as held:
        assert asked() == "0.0"
    gc.collect()
    assert not store.check([f"default_pg/{WORLD}//{process_groups._ended(0)}"])
    with life(store):
        assert asked() == "0.1"
    assert held is not None


def test_a_number_that_was_read_too_early_is_read_again(store: dist.Store) -> None:
    """A rank with a new group asks before a peer, which still holds the old one, ends that."""
    with life(store):
        assert asked() == "0.0"
        process_groups._c10d()._get_process_group_store(dist.group.WORLD).set(process_groups._ended(0), "1")
        assert asked() == "0.1"
    with life(store):
        assert asked() == "0.2"


def test_restarts_of_torchrun_count_apart(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash nobody has ended anything."""
    with another_process(), life(store):
        assert asked() == "0.0"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with another_process(), life(store):
        assert asked() == "1.0"


def test_a_store_that_is_gone_ends_nothing(store: dist.Store) -> None:
    gone = mock.Mock()
    gone.set.side_effect = dist.DistNetworkError("connection reset")
    process_groups._end_life(gone, 0)
    gone.set.assert_called_once()


PROGRAM = """
import os, sys, time, torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # the backend "fake"
from asynctp_passes.torch_private import process_groups

rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)

def meet(place):
    store.add(f"{restarts} {place}", 1)
    while store.add(f"{restarts} {place}", 0) < 2:
        time.sleep(0.01)

found = []
for life in range(3):
    dist.init_process_group("fake", store=dist.PrefixStore("default_pg", store), rank=int(rank), world_size=2)
    meet(f"begin {life}")
    found.append(process_groups.group_generation("0") if life or rank == "0" else "-")
    meet(f"end {life}")
    if life < 2:
        dist.destroy_process_group()
        meet(f"ended {life}")
with open(f"rank {rank} life {restarts}", "w") as file:  # lines of two processes would mix on one pipe
    print(*found, file=file)
meet("exit")
os._exit(restarts == "0")  # as in a crash, nothing ends the last group
"""


@pytest.mark.ranks
def test_lives_and_restarts_under_torchrun(tmp_path: Path) -> None:
    """In the first life only rank 0 asks. Then all processes end with an error, and torchrun starts them again."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path / "program.py")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = {path.name: path.read_text().split() for path in tmp_path.glob("rank *")}
    assert found == {
        "rank 0 life 0": ["0.0", "0.1", "0.2"],
        "rank 1 life 0": ["-", "0.1", "0.2"],
        "rank 0 life 1": ["1.0", "1.1", "1.2"],
        "rank 1 life 1": ["-", "1.1", "1.2"],
    }
