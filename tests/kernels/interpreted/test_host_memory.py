"""Symmetric memory of one host: visibility, lifetime, and what it says when it cannot work."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import imagined_ranks, run_ranks

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("text", ["soon", "-1", "0", "inf", "nan", ""])
def test_a_bad_bound_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    from asynctp_kernels.errors import timeout_s

    monkeypatch.setenv("ASYNCTP_TIMEOUT_S", text)
    with pytest.raises(ValueError, match=f"ASYNCTP_TIMEOUT_S='{text}' is not valid; it must be a positive number"):
        timeout_s()


def test_a_group_in_any_spelling() -> None:
    """As the ops take it; what is none is no group that nothing has to be freed of."""
    import torch.distributed as dist
    from asynctp_kernels import cuda, release
    from asynctp_kernels.torch_private import process_group
    from torch.distributed.device_mesh import init_device_mesh

    with imagined_ranks(2):
        world, mesh = dist.group.WORLD, init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "dp"))
        tp = mesh.get_group("tp")
        for spelling in (tp, tp.group_name, mesh["tp"], (mesh, "tp"), (mesh, 0)):
            assert process_group(spelling) is tp
        assert process_group(world.group_name) is world
        for wrong in ("nobody", None, 7, mesh, (mesh, "pp"), (mesh, 0, 0)):
            for take in (release, cuda.last_implementation, cuda.shared_bytes):
                with pytest.raises(ValueError, match=r"group=.* is not valid; it must be a ProcessGroup, the name of"):
                    take(wrong)


def _mappings() -> int:
    """Shared segments of ours that this process has mapped."""
    return sum("/dev/shm/" in line for line in Path("/proc/self/maps").read_text().splitlines())


def _names() -> list[str]:
    return [path.name for path in Path("/dev/shm").glob("asynctp_*")]


def _memory(rank: int, world: int) -> list[str]:
    """Each check on one handle; the names of those that failed."""
    import asynctp_kernels as kernels
    import torch
    import torch.distributed as dist

    memory = kernels.rendezvous(dist.group.WORLD, 1000)
    own = memory.get_buffer(rank, [4, 5], torch.float32, storage_offset=10)
    fresh = bool(own.eq(0).all())
    dist.barrier()
    own.fill_(rank + 1)
    dist.barrier()
    seen = [memory.get_buffer(r, [60], torch.float32)[10:30].mean().item() for r in range(world)]
    checks = {
        "zeroed": fresh,
        "visible": seen == [r + 1.0 for r in range(world)],
        "identity": (memory.rank, memory.world_size, memory.buffer_size) == (rank, world, 1000),
        "pointers": own.data_ptr() == memory.buffer_ptrs[rank] + 40,
        "no names left": not _names(),
        "mapped": _mappings() == world,
        "bounds": _raises(ValueError, memory.get_buffer, rank, [251], torch.float32)
        and _raises(ValueError, memory.get_buffer, rank, [1], torch.float32, 250),
    }
    dist.barrier()
    del memory
    checks["views keep the memory"] = own.eq(rank + 1).all().item() and _mappings() == 1
    del own
    checks["freed"] = _mappings() == 0
    return [name for name, good in checks.items() if not good]


def _raises(error: type[Exception], fn, *args: object) -> bool:
    with pytest.raises(error):
        fn(*args)
    return True


def _lifetime(rank: int, world: int) -> list[int]:
    """Mappings after: two groups' first calls, a call that grows one, its release, and the end of the other."""
    import asynctp_kernels
    import torch
    import torch.distributed as dist

    import asynctp_passes.ops  # noqa: F401

    def gather(rows: int, group: dist.ProcessGroup) -> None:
        a, b = torch.ones(rows, 1024), torch.ones(1024, 1)
        torch.ops.asynctp.all_gather_matmul(a, [b], [None], 0, False, world, group.group_name)

    counts, other = [], dist.new_group()
    gather(2, dist.group.WORLD)
    gather(2, other)
    counts.append(_mappings())
    gather(1024, dist.group.WORLD)
    counts.append(_mappings())
    dist.barrier()
    asynctp_kernels.release(dist.group.WORLD.group_name)
    gc.collect()
    counts.append(_mappings())
    gather(2, dist.group.WORLD)
    counts.append(_mappings())
    dist.destroy_process_group(other)
    del other
    gc.collect()
    counts.append(_mappings())
    return counts


def _memory_of_one_host(rank: int, world: int) -> tuple[list[str], list[int]]:
    return _memory(rank, world), _lifetime(rank, world)


def test_buffers_and_lifetimes(capfd: pytest.CaptureFixture[str]) -> None:
    """A group has two shared segments a rank here: signals, and the outbox of the gathers."""
    assert run_ranks(2, _memory_of_one_host) == [([], [8, 8, 4, 8, 4])] * 2
    errors = capfd.readouterr().err
    assert "resource_tracker" not in errors
    assert "leaked" not in errors


def _refusals(rank: int, world: int) -> list[str]:
    """What a rendezvous says: about other hosts, sizes that differ, and a peer that does not come."""
    import asynctp_kernels as ops
    import torch.distributed as dist
    from asynctp_kernels import host

    group, said, real_host = dist.group.WORLD, [], host.host_name
    host.host_name = lambda: f"node{rank}"
    with pytest.raises(ops.SymmetricMemoryError) as caught:
        ops.rendezvous(group, 64)
    said.append(str(caught.value))
    host.host_name = real_host
    with pytest.raises(ops.SymmetricMemoryError) as caught:
        ops.rendezvous(group, 64 + rank)
    said.append(str(caught.value))
    dist.barrier()
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(ops.PeerTimeout) as late:
            ops.rendezvous(group, 64)
        assert time.monotonic() - start < 5
        said.append(str(late.value))
    dist.barrier()
    assert not _names()
    return said


def test_refusals_name_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCTP_TIMEOUT_S", "1")
    first, second = run_ranks(2, _refusals)
    assert first[0].startswith("rank 0 is on host 'node0', rank 1 on 'node1'")
    assert second[0].startswith("rank 1 is on host 'node1', rank 0 on 'node0'")
    assert first[1] == "rank 0 asks for 64 bytes, rank 1 for 65: the ranks make calls of different shapes"
    assert first[2].startswith("rendezvous: rank 0 waited 1 s for an answer of rank 1.")


def _crash(rank: int, world: int) -> None:
    """Rank 1 dies without a word while its memory is shared."""
    import asynctp_kernels as ops
    import torch.distributed as dist

    memory = ops.rendezvous(dist.group.WORLD, 4096)
    assert memory.world_size == world
    dist.barrier()
    if rank == 1:
        os._exit(7)
    time.sleep(0.5)


def test_a_crash_leaks_nothing() -> None:
    with pytest.raises(RuntimeError, match=r"\(1, 7\)"):
        run_ranks(2, _crash)
    assert not _names()


_WITHOUT_INTERPRETER = """
import torch
import torch.distributed as dist
import asynctp_passes.ops
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    torch.ops.asynctp.all_gather_matmul(torch.ones(2, 2), [torch.ones(2, 2)], [None], 0, False, 1, "0")
except RuntimeError as error:
    print(error)
"""


def test_without_the_interpreter_it_says_what_cpu_needs() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = Path(__file__).parents[3]
    environment["PYTHONPATH"] = os.pathsep.join((str(root), str(root / "kernels")))
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_INTERPRETER], env=environment, capture_output=True, text=True, check=True
    )
    assert "TRITON_INTERPRET=1 in the environment before triton is imported" in done.stdout
