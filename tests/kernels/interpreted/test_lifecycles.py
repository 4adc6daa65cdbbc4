"""First calls of groups that go wrong, with processes for ranks: they end in time, name the cause and can be mended."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run_ranks
from scripts import start_forked

pytestmark = pytest.mark.ranks


def _call(group: Any, rows: int = 4) -> str:
    """A gather of the group: "right", "WRONG", or its error in one line."""
    import asynctp_passes.ops  # noqa: F401

    rank, world = group.rank(), group.size()
    x, w = torch.full((rows, 16), rank + 1.0), torch.ones(16, 8)
    try:
        (y,) = torch.ops.asynctp.all_gather_matmul(x, [w], [None], 0, False, world, group.group_name)
    except BaseException as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    want = torch.arange(1.0, world + 1).repeat_interleave(rows)[:, None].expand(-1, 8) * 16
    return "right" if torch.equal(y, want) else "WRONG"


def _mend(group: Any) -> str:
    """Release on every rank, once every rank has raised, and call again."""
    import asynctp_kernels
    import torch.distributed as dist

    dist.barrier()
    asynctp_kernels.release(group)
    dist.barrier()
    return _call(group)


@contextlib.contextmanager
def _fault(place: str, fault: Callable[..., Any], here: bool) -> Iterator[None]:
    """On one rank, `fault` instead of what `asynctp_kernels.cuda.<place>` does."""
    import importlib

    module, name = place.rsplit(".", 1)
    patch = mock.patch.object(importlib.import_module(f"asynctp_kernels.cuda.{module}"), name, fault)
    with patch if here else contextlib.nullcontext():
        yield


def _raise(error: BaseException) -> Callable[..., Any]:
    def fault(*_: Any, **__: Any) -> Any:
        raise error

    return fault


# --- late, often, in vain ----------------------------------------------------------------------------------------
def _late(rank: int, world: int) -> dict[str, list[str]]:
    import asynctp_kernels
    import torch.distributed as dist

    found: dict[str, list[str]] = {}
    group = dist.new_group()
    if rank == 1:
        time.sleep(3)
    found["late"] = [_call(group), _call(group), _mend(group), _call(group, 1 << 16), _mend(group)]
    group = dist.new_group()
    if rank == 0:  # three times, of which the other knows nothing
        found["often"] = []
        for _ in range(3):
            found["often"].append(_call(group))
            asynctp_kernels.release(group)
    dist.barrier()
    found.setdefault("often", []).append(_mend(group))
    group = dist.new_group()
    said = [_call(group)] if rank == 0 else []
    dist.barrier()
    if rank == 1:
        said.append(_call(group))
    found["one after the other"] = [*said, _mend(group)]
    return found


def test_attempts_need_not_be_equal_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCTP_TIMEOUT_S", "2")
    outcomes = run_ranks(2, _late)
    for rank, found in enumerate(outcomes):
        timed_out = f"PeerTimeout: first call: rank {rank} waited 2 s for an answer of rank {1 - rank}."
        first, again, *others = found["late"]
        assert first.startswith(timed_out)
        assert again.startswith("SymmetricMemoryError: the memory of group")
        assert "out of step since: PeerTimeout" in again
        assert "asynctp_kernels.release(group)" in again
        assert others == ["right"] * 3
        *failed, mended = found["often"]
        assert len(failed) == (3 if rank == 0 else 0)
        assert all(each.startswith(timed_out) for each in failed)
        assert mended == "right"
        (said, mended) = found["one after the other"]
        assert said.startswith(timed_out)
        assert mended == "right"


# --- a fault of one rank -----------------------------------------------------------------------------------------
FAULTS: dict[str, tuple[str, BaseException]] = {
    "interrupted": ("runtime.memory._new", KeyboardInterrupt()),
    "interrupted before": ("runtime.enroll.rank_facts", KeyboardInterrupt()),
    "ended": ("runtime.interpreted.rendezvous", SystemExit(1)),
    "no memory": ("runtime.interpreted.reserve", torch.OutOfMemoryError("CUDA out of memory")),
    "no memory later": ("runtime.memory._new", MemoryError()),
    "bad table": ("choose.select.read_tuned", ValueError("asynctp: t.json is no tuning table")),
}


def _faults(rank: int, world: int) -> dict[str, list[Any]]:
    import torch.distributed as dist
    from asynctp_kernels.cuda.choose import select

    found: dict[str, list[Any]] = {"": [_call(dist.group.WORLD)]}
    for name, (place, error) in FAULTS.items():
        group = dist.new_group()
        select.refresh()
        dist.barrier()
        start = time.monotonic()
        with _fault(place, _raise(error), rank == 1):
            said = _call(group)
        took = time.monotonic() - start
        alone = _call(group) if name.startswith("no memory") else ""  # of all ranks alike: nothing is out of step
        found[name] = [said, took, alone, _mend(group)]
    return found


def test_a_fault_of_one_rank_is_an_error_of_all_at_once() -> None:
    outcomes = run_ranks(2, _faults)
    for name, (_, error) in FAULTS.items():
        (peer, *of_peer), (own, *of_own) = (found[name] for found in outcomes)
        for took, alone, mended in (of_peer, of_own):
            assert took < 15, name
            assert alone in ("", "right"), name
            assert mended == "right", name
        if name.startswith("no memory"):
            for said in (peer, own):
                assert said.startswith("SymmetricMemoryError: rank 1: "), name
                assert ("The GPU has no room for it" in said) == (name == "no memory")
        else:
            assert own.startswith(type(error).__name__), name
            said = f": rank 1 failed, so that rank 0 cannot go on: {type(error).__name__}"
            assert peer.startswith("PeerFailed: "), name
            assert said in peer, name


_KILLED = """
import os, signal, sys, time
import torch.distributed as dist
from test_lifecycles import _call, _fault

folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
assert _call(dist.group.WORLD) == "right"
group = dist.new_group()
start = time.monotonic()
with _fault("runtime.memory._new", lambda *_: os.kill(os.getpid(), signal.SIGKILL), rank == 1):
    said = _call(group)
print(time.monotonic() - start < 15, said)
"""


def _environment(seconds: float) -> dict[str, str]:
    """For a process that imports this file and the package as this one does."""
    here, root = Path(__file__).parent, Path(__file__).parents[3]
    path = os.pathsep.join(map(str, (here, root / "tests" / "support", root, root / "kernels")))
    return dict(os.environ, ASYNCTP_TIMEOUT_S=str(seconds), OMP_NUM_THREADS="1", PYTHONPATH=path)


def _forked(
    folder: Path, program: str, *arguments: str, seconds: float = 60, out: str | Path = os.devnull
) -> BaseProcess:
    """A program that starts at once: its process has torch already."""
    path = folder / "program.py"
    path.write_text(program)
    return start_forked(path, *arguments, environment=_environment(seconds), paths=True, files=[Path(out)])


def test_a_rank_that_is_killed_is_named_at_once(tmp_path: Path) -> None:
    """Nobody has taken note of its end yet: it is a zombie."""
    command, environment = [sys.executable, "-c", _KILLED, str(tmp_path)], _environment(60)
    first, second = (
        subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, text=True) for rank in range(2)
    )
    said = first.communicate(timeout=120)[0]
    assert second.wait() == -signal.SIGKILL
    assert said.startswith("True PeerFailed: ")
    assert "rank 1 failed, so that rank 0 cannot go on: its process (" in said
    assert ") has ended" in said


# --- groups made again -------------------------------------------------------------------------------------------
_AGAIN = """
import os, sys, time
import torch.distributed as dist
from test_lifecycles import _call

process, address, port = int(sys.argv[1]), "127.0.0.1", int(sys.argv[2])
store = dist.TCPStore(address, port, is_master=False)
said = []
for life, (swapped, late) in enumerate([(False, False), (True, False), (False, True), (True, False)]):
    rank = 1 - process if swapped else process
    new = dist.PrefixStore(f"{sys.argv[3]} {life}", store)
    dist.init_process_group("gloo", store=new, rank=rank, world_size=2)
    # gloo itself finds its peers through keys that must be new; ours are in one place for all lives
    from asynctp_kernels import torch_private, meeting
    meeting.group_store = lambda group: dist.PrefixStore("the same", store)
    if late and rank == 1:
        time.sleep(4)
    said.append(_call(dist.group.WORLD).partition(":")[0])
    dist.barrier()
    dist.destroy_process_group()
print(*said)
"""


def test_groups_made_again_on_one_store(tmp_path: Path) -> None:
    """Destroyed and made again, with ranks swapped, and after a life in which all failed; then by new processes."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    for job in range(2):
        files = [tmp_path / f"{job}.{number}" for number in range(2)]
        processes = [
            _forked(tmp_path, _AGAIN, str(number), str(store.port), str(job), seconds=2.5, out=file)
            for number, file in enumerate(files)
        ]
        for process in processes:
            process.join(120)
            assert process.exitcode == 0
        outputs = [file.read_text().split() for file in files]
        assert outputs == [["right", "right", "PeerTimeout", "right"]] * 2


# --- groups, threads, forks --------------------------------------------------------------------------------------
def _several(rank: int, world: int) -> dict[str, Any]:
    import torch.distributed as dist
    from asynctp_kernels.cuda.runtime import memory

    found: dict[str, Any] = {}
    groups = [dist.new_group() for _ in range(3)]

    def memory_of(number: int) -> Any:  # Triton's interpreter takes no calls of several threads
        time.sleep(0.2 * (number if rank else 2 - number))
        return memory.group_memory(groups[number], torch.device("cpu"))

    with ThreadPoolExecutor(6) as pool:
        made = [pool.submit(memory_of, number) for number in (0, 0, 1, 1, 2, 2)]
        held = [each.result() for each in made]
    found["threads"] = [
        all(a is b for a, b in zip(held[0::2], held[1::2], strict=True)),
        len({id(each) for each in held}),
    ]
    group = dist.new_group()
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(0)
    found["before a fork"] = _call(group)
    child_ended = os.waitpid(child, 0)[1]
    child = os.fork()
    if child == 0:
        group = None  # its memory goes in the child only
        gc.collect()
        os._exit(0)
    found["after a fork"] = [child_ended, os.waitpid(child, 0)[1], _call(groups[0]), _call(groups[1], 1 << 12)]
    return found


def test_groups_threads_and_forks() -> None:
    for found in run_ranks(2, _several):
        assert found == {
            "threads": [True, 3],
            "before a fork": "right",
            "after a fork": [0, 0, "right", "right"],
        }


# --- what ranks must share ---------------------------------------------------------------------------------------
def _unlike(rank: int, world: int, folder: str) -> dict[str, Any]:
    import torch.distributed as dist
    from asynctp_kernels import cuda
    from asynctp_kernels.cuda.choose import select
    from asynctp_kernels.cuda.runtime import enroll, memory

    found: dict[str, Any] = {}
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("asynctp_kernels").addHandler(handler)

    def outcome(name: str) -> None:
        group = dist.new_group()
        says = [_call(group) for _ in range(2)]
        held = memory.existing_memory(group)
        found[name] = [says, list(heard), cuda.last_implementation(group), held and len(held.table.get("a GPU", {}))]
        heard.clear()
        dist.barrier()

    with _fault("runtime.enroll.sources_digest", lambda: "another", rank == 1):
        outcome("sources")
    with _fault("runtime.enroll.host_name", lambda: f"node{rank}", True):
        outcome("hosts")
    with mock.patch.dict(os.environ, {select.VARIABLE: "direct"} if rank else {}):
        outcome("forced")
    key = {"gather:2:float32:16:8": {"8": "direct"}}
    for name, tables in {"apart": rank == 1, "alike": True}.items():
        if tables:
            path = Path(folder, f"{name}{rank}.json")
            os.environ[select.TABLE_VARIABLE] = str(path)
            path.write_text(enroll.tables.as_text({"Triton's interpreter": key, "a GPU": key}))
        select.refresh()
        outcome(name)
    return found


def test_ranks_that_differ_agree_on_what_becomes_of_the_group(tmp_path: Path) -> None:
    outcomes = run_ranks(2, _unlike, str(tmp_path))
    for rank, found in enumerate(outcomes):
        says, heard, ran, _ = found["sources"]
        assert (says, ran, len(heard)) == (["right", "right"], "sequential", 1)
        assert "runs the sequential program: its ranks have unlike files of asynctp_kernels (rank 0: " in heard[0]
        assert "; rank 1: another)" in heard[0]
        says, heard, ran, _ = found["hosts"]
        assert (says, ran, len(heard)) == (["right", "right"], "sequential", 1)
        assert "its ranks are on 2 hosts (node0, node1), not on one" in heard[0]
        says, heard, _, held = found["forced"]
        assert says[0] == (
            "ValueError: asynctp: ASYNCTP_CUDA_IMPLEMENTATION differs among the ranks of a group (rank 0: auto; rank "
            "1: direct); set it to one value on all of them, or unset it"
        )
        assert "release(group)" in says[1]
        assert held is None
        says, heard, ran, held = found["apart"]
        assert (says, ran != "sequential", held) == (["right", "right"], True, 0), rank
        assert "by the shipped table alone, as its ranks were tuned apart (digests: rank 0: none; rank 1:" in heard[0]
        says, heard, ran, held = found["alike"]
        assert (says, heard, held) == (["right", "right"], [], 1)


# --- files -------------------------------------------------------------------------------------------------------
_WAITS = """
import os, sys, time
import torch, torch.distributed as dist
import asynctp_passes.ops
from asynctp_kernels import host

folder, rank, where = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
real = getattr(host, where)

def waits(*args):
    if where == "_reserve":
        real(*args)
    open(f"{folder}/there{rank}", "w")
    time.sleep(60 if rank else 0)  # until it is killed, and the other waits for it
    if where == "host_name":
        return real(*args)

setattr(host, where, waits)
torch.ops.asynctp.all_gather_matmul(torch.ones(4, 16), [torch.ones(16, 8)], [None], 0, False, 2, "0")
"""


@pytest.mark.parametrize("where", ["host_name", "_reserve"])
def test_nothing_stays_in_shared_memory_of_a_rank_that_is_killed(where: str, tmp_path: Path) -> None:
    """Before memory is made no rank has a file; after that, a rank that is left removes the files of all."""
    before = set(os.listdir("/dev/shm"))
    processes = [_forked(tmp_path, _WAITS, str(tmp_path), str(rank), where) for rank in range(2)]
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("there*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(list(tmp_path.glob("there*"))) == 2
        time.sleep(0.3)
        seen = set(os.listdir("/dev/shm")) - before
        processes[1].kill()
        processes[1].join()
        if where == "_reserve":
            processes[0].join(60)
            assert processes[0].exitcode == 1, "it raises PeerFailed"
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert len({name for name in seen if name.startswith("asynctp")}) == (2 if where == "_reserve" else 0)
    assert {name for name in os.listdir("/dev/shm") if name.startswith("asynctp")} <= before


def _files(rank: int, world: int) -> list[Any]:
    """Modes of the files of all ranks while they have names, what their memory holds, and the names that are left."""
    import asynctp_kernels
    import torch.distributed as dist
    from asynctp_kernels import host

    modes: list[int] = []
    real = host._map

    def mapped(path: Path, size: int) -> torch.Tensor:
        modes.append(path.stat().st_mode & 0o777)
        return real(path, size)

    with mock.patch.object(host, "_map", mapped):
        memory = asynctp_kernels.rendezvous(dist.group.WORLD, 5000)
    memory.get_buffer(rank, [5000], torch.uint8).fill_(rank + 1)
    dist.barrier()
    seen = [int(memory.get_buffer(peer, [5000], torch.uint8).sum()) for peer in range(world)]
    return [seen, modes, [name for name in os.listdir("/dev/shm") if name.startswith("asynctp")]]


def test_files_are_the_users_own_and_lose_their_names() -> None:
    assert run_ranks(2, _files) == [[[5000, 10000], [0o600, 0o600], []]] * 2


def _not_shared(rank: int, world: int, folder: str) -> str:
    """Each rank has a /dev/shm of its own, as in containers that share nothing else."""
    import asynctp_kernels
    import torch.distributed as dist
    from asynctp_kernels import host

    own = Path(folder, str(rank))
    own.mkdir()
    with mock.patch.object(host, "SHARED_FOLDER", own), pytest.raises(asynctp_kernels.SymmetricMemoryError) as caught:
        asynctp_kernels.rendezvous(dist.group.WORLD, 64)
    return f"{caught.value} {os.listdir(own)}"


def test_ranks_that_do_not_share_the_folder_are_told(tmp_path: Path) -> None:
    for said in run_ranks(2, _not_shared, str(tmp_path)):
        assert "rank 0: the segment 'asynctp_" in said
        assert "rank 1: the segment 'asynctp_" in said
        assert "the ranks must share one" in said
        assert said.endswith(" []")


def _full(rank: int, world: int) -> list[str]:
    import asynctp_kernels
    import torch.distributed as dist
    from asynctp_kernels import host

    fault = OSError(28, "No space left on device")
    full = mock.patch.object(host.os, "posix_fallocate", side_effect=fault if rank == 1 else None)
    said = []
    before = len(os.listdir("/proc/self/fd"))
    with full, pytest.raises(asynctp_kernels.SymmetricMemoryError) as caught:
        asynctp_kernels.rendezvous(dist.group.WORLD, 64)
    said.append(str(caught.value))
    said.append(str(len(os.listdir("/proc/self/fd")) - before))
    asynctp_kernels.rendezvous(dist.group.WORLD, 64)
    return said


def test_a_full_folder_on_one_rank_is_an_error_on_all() -> None:
    for said, files in run_ranks(2, _full):
        assert said.startswith(
            "rank 1: cannot reserve 4096 bytes under /dev/shm: [Errno 28] No space left on device. Make"
        )
        assert "docker run --shm-size" in said
        assert files == "0"


# --- a rank that meets the others without a call of its own -------------------------------------------------------
def _meets(rank: int, world: int, alone: bool) -> str:
    """Meet the others twice, and then alone, while they are in a call."""
    import torch.distributed as dist
    from asynctp_kernels import SymmetricMemoryError, cuda

    group, device = dist.group.WORLD, torch.device("cpu")
    assert _call(group) == "right"
    cuda.meet(group, device, 5)
    cuda.meet(group, device, 6)
    if not alone or rank:
        return _call(group)
    try:
        cuda.meet(group, device, 7)
    except SymmetricMemoryError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("alone", [False, True])
def test_ranks_that_meet_must_all_do_so(alone: bool) -> None:
    found = run_ranks(3, _meets, alone)
    for said in found if alone else ():
        assert said.startswith("UnlikeCalls: ")
        assert "of accord 7" in said
    assert alone or found == ["right"] * 3
