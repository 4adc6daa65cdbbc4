"""The process that serves the store of a group ends, and the group goes on: compiles do without what ranks agree on."""

from __future__ import annotations

import datetime
import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ranks import run_ranks
from torch import Tensor

import asynctp_passes
from asynctp_passes import DisagreementError

SERVER = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def served(rank: int, world_size: int) -> Callable[[], None]:
    """Let the default group have a store that another process serves; the result ends that."""
    server, port = None, [0]
    if rank == 0:
        server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        port = [int(server.stdout.readline())]
    dist.broadcast_object_list(port, 0)
    dist.barrier()
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port[0], is_master=False, timeout=datetime.timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dist.barrier()

    def end() -> None:
        dist.barrier()
        if server is not None:
            server.kill()
            server.wait()
        dist.barrier()

    return end


def two_sums(x: Tensor, w: Tensor, group: Any) -> Tensor:
    return funcol.all_reduce(x @ w, "sum", group) + funcol.all_reduce((x + 1) @ w, "sum", group)


def scaled(x: Tensor, w: Tensor, group: Any) -> Tensor:
    return 3 * two_sums(x, w, group)


def reduced(x: Tensor, w: Tensor, group: Any) -> Tensor:
    return funcol.all_reduce(x.sin(), "sum", group)


def gathered(x: Tensor, w: Tensor, group: Any) -> Tensor:
    return (funcol.all_gather_tensor_autograd(x, 0, group) @ w).sum()


def without_a_store(rank: int, world_size: int) -> tuple[list[bool], list[str], list[bool], list[str]]:
    """Whether values are right, the warnings, whether there are deviations, and the errors of a group that has some."""
    end, heard, right, errors = served(rank, world_size), list[str](), list[bool](), list[str]()
    x, w, group, deviating = torch.randn(4, 8), torch.randn(8, 8), dist.group.WORLD, dist.new_group([0, 1])

    def compiled(program: Callable[..., Tensor]) -> Callable[..., Tensor]:
        options: dict[str, Any] = {"strict": "off", "fallback_by_default": True}
        return torch.compile(program, backend="asynctp", options=options)  # type: ignore[no-any-return]

    met = compiled(two_sums)
    with torch.no_grad():
        right.append(torch.allclose(met(x, w, deviating), two_sums(x, w, deviating), atol=1e-4))
    (report,) = asynctp_passes.reports()
    right += [one.done for one in report.questions]
    end()
    asynctp_passes.clear_reports()
    log = logging.getLogger("asynctp_passes.ranks.accord")
    with mock.patch.object(log, "warning", lambda *of: heard.append(of[0] % of[1:])):
        with torch.no_grad():
            right.append(torch.allclose(compiled(scaled)(x, w, group), scaled(x, w, group), atol=1e-4))
        ours, theirs = (w.clone().requires_grad_() for _ in range(2))
        compiled(gathered)(x, ours, group).backward()
        gathered(x, theirs, group).backward()
        assert ours.grad is not None
        assert theirs.grad is not None
        right.append(torch.allclose(ours.grad, theirs.grad, atol=1e-4))
        done = [one.done for report in asynctp_passes.reports() for one in report.questions]
        for program in (met, compiled(reduced)):
            with pytest.raises(DisagreementError) as raised, torch.no_grad():
                program(x, w, deviating)
            errors.append(str(raised.value))
    return right, heard, done, errors


@pytest.mark.ranks
def test_a_store_that_is_gone_ends_no_compile_and_is_named_where_ranks_compare(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCTP_AGREE_S", "60")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for right, heard, done, errors in run_ranks(2, without_a_store, timeout_s=200):
        assert right == [True] * 4
        assert heard
        assert all("could not ask one another what they compile: the store of the group failed" in one for one in heard)
        assert done
        assert not any(done)
        assert len(errors) == 2
        for part in ("the store of group", "This rank has sent nothing. Remedy: restart all ranks"):
            assert all(part in error for error in errors)
