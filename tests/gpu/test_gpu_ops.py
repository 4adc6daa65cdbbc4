"""The fused ops on real GPUs: every case against fp64, under stress, and in compiled programs; each by torchrun."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
IMPLEMENTATIONS = {"fused", "decomposed", "direct", "whole", "sequential"}
CALLS = 2000
#: parts of the names of cases for ranks that share GPUs
SHARED = ("k512-n512-dim0-bfloat16", "dim1-bfloat16", "row-travels", "bulk-gather-1024", "bulk-scatter-4096")
TIMEOUT_S = 1800

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"needs 2 CUDA GPUs of one host; there are {GPUS}"),
]
RANKS = pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(ranks, marks=pytest.mark.skipif(ranks > GPUS, reason=f"needs {ranks} CUDA GPUs; there are {GPUS}"))
        for ranks in (2, 4)
    ],
)


def torchrun(ranks: int, script: str, *arguments: str, **variables: str) -> list[dict[str, Any]]:
    """Run a script of this folder with one process a GPU; gives the JSON lines that it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    sources = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ASYNCTP_")}
    with alone():
        done = subprocess.run(
            [*command, str(HERE / script), *arguments],
            env={**kept, "PYTHONPATH": os.pathsep.join(filter(None, sources)), **variables},
            capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    found = json_lines(done.stdout)
    wrong = [line for line in found if line.get("ok") is False]
    assert done.returncode == 0, f"{wrong}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return found


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One at a time: kernels that wait for each other's GPU leave no room for those of another program."""
    with Path(tempfile.gettempdir(), "asynctp-gpu-tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def check_cases(found: Sequence[dict[str, Any]]) -> None:
    """Every case was run by every implementation, and each was right or had a reason not to run."""
    *cases, last = found
    assert last == {"failed": 0}
    names = [case["case"] for case in cases]
    assert len(set(names)) == len(names)
    by_case: dict[str, set[str]] = {}
    for name in names:
        case, implementation = name.rsplit("/", maxsplit=1)
        by_case.setdefault(case, set()).add(implementation)
    assert len(by_case) >= 40
    assert all(ran == IMPLEMENTATIONS for ran in by_case.values())
    assert [case for case in cases if not well(case)] == []
    right = {name.rsplit("/", maxsplit=1)[1] for name, case in zip(names, cases, strict=True) if case.get("ok")}
    assert right == IMPLEMENTATIONS


def well(case: dict[str, Any]) -> bool:
    """Right, with the same bits a second time; or left out, for a reason. The sequential program runs everything."""
    if "skipped" in case:
        return bool(case["skipped"]) and not case["case"].endswith("/sequential")
    return case["ok"] is True and case["same bits"] is True and "exception" not in case


def check_stress(found: Sequence[dict[str, Any]]) -> None:
    (result,) = found
    assert result["wrong"] == 0
    assert result["calls"] >= CALLS
    assert result["prepared"] >= 300
    assert result["replayed"] > 0
    assert result["launched"] > result["calls"] / 4


@RANKS
def test_every_case_against_fp64(ranks: int) -> None:
    check_cases(torchrun(ranks, "cases.py"))


@pytest.mark.parametrize("ranks", [4, 8])
def test_more_ranks_than_gpus(ranks: int) -> None:
    """They take turns on a GPU, so that each is away for milliseconds at any point of a call (`launched`)."""
    if ranks <= GPUS:
        pytest.skip(f"each of {ranks} ranks has a GPU of its own here")
    overlapped = IMPLEMENTATIONS - {"sequential"}
    *found, last = torchrun(ranks, "cases.py", *SHARED, IMPLS=",".join(sorted(overlapped)))
    assert last == {"failed": 0}
    assert [case for case in found if not well(case)] == []
    right = Counter(case["case"].rsplit("/", maxsplit=1)[1] for case in found if case.get("ok"))
    assert right.keys() == overlapped
    assert all(count >= 20 for count in right.values())


@RANKS
def test_stress(ranks: int) -> None:
    check_stress(torchrun(ranks, "stress.py", str(CALLS)))


@RANKS
def test_stress_with_one_hardware_queue(ranks: int) -> None:
    """Streams that share a queue of the GPU wait for each other in the order in which work was enqueued."""
    check_stress(torchrun(ranks, "stress.py", str(CALLS), CUDA_DEVICE_MAX_CONNECTIONS="1"))


@RANKS
def test_compiled_programs_with_and_without_cuda_graphs(ranks: int) -> None:
    *programs, last = torchrun(ranks, "compiled.py")
    assert last == {"failed": 0}
    assert len(programs) >= 10
    assert all(program["ok"] for program in programs)


@RANKS
def test_calls_from_generated_code_give_the_bits_of_the_op(ranks: int) -> None:
    found = torchrun(ranks, "call_sites.py")
    assert len(found) == 3 * 3 * 6  # ops, implementations, variants
    assert all(case["ok"] for case in found)
    assert all(case["direct"] > 0 for case in found if case["variant"] != "captured")


@RANKS
def test_a_rank_that_does_not_come_is_named(ranks: int) -> None:
    *cases, last = torchrun(ranks, "absent.py", ASYNCTP_TIMEOUT_S="2")
    assert last == {"failed": 0}
    assert len(cases) == 11


@RANKS
def test_like_collectives_and_unlike_uses(ranks: int) -> None:
    """Each rank does with a collective what it likes: `unlike`."""
    (result,) = torchrun(ranks, "unlike.py", "--calls", str(CALLS), "--sizes", "60")
    assert result["wrong"] == 0
    assert all(calls >= CALLS for calls in result["calls"])
    assert result["launched"] > 0
    for ran in result["ran"]:
        assert ran.keys() == IMPLEMENTATIONS - {"sequential"} | {"bulk", "mover", "chosen", "program"}


@RANKS
def test_unlike_calls_are_told_by_every_rank(ranks: int) -> None:
    (result,) = torchrun(ranks, "unlike.py", "--faults", ASYNCTP_TIMEOUT_S="2")
    assert result["bad"] == {}
    assert result["faults"] >= 25


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_rows_have_the_same_bits_in_any_batch(ranks: int) -> None:
    """Ranks may share GPUs for that."""
    *_, last = torchrun(ranks, "bits.py")
    assert last["unlike"] == 0
    assert last["elements"] > 1_000_000_000


@pytest.mark.parametrize("ranks", [2, 4])
def test_log_probabilities_have_the_same_bits_in_any_batch(ranks: int) -> None:
    decoded, last = torchrun(ranks, "decode.py")
    assert last == {"failed": 0}
    assert (decoded["prompts"], decoded["differ"]) == (64, 0)
