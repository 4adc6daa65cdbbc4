"""Programs of the kinds that models have: each collective is fused, or the report says truly why not."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import found_programs
import pytest
import torch
import torch.distributed as dist
from compiled_training import QUICK, start
from found_programs import FOUND
from model_programs import OF_KINDS_SHOWN, PROGRAMS, RANKS, ModelProgram
from passes import outcomes
from profiles import thorough
from ranks import imagined_ranks
from torch import Tensor

import asynctp_passes


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group whose first rank this process is, and a cache of its own."""
    cache = str(tmp_path_factory.mktemp("cache"))
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache), imagined_ranks(RANKS):
        yield
    torch._dynamo.reset()


def tensor(sizes: list[Any], trains: bool) -> Tensor:
    """A tensor of ones; a dynamic dimension has 12 elements."""
    *sizes, dtype = sizes if sizes and isinstance(sizes[-1], torch.dtype) else (*sizes, torch.float32)
    out = torch.ones([12 if isinstance(size, str) else size for size in sizes]).to(dtype)
    for dim, size in enumerate(sizes):
        if isinstance(size, str):
            torch._dynamo.mark_dynamic(out, dim)
    return out.requires_grad_(trains and dtype.is_floating_point)


def test_kinds_are_shown_by_programs_that_always_run() -> None:
    names = {program.call.__name__ for program in PROGRAMS}
    assert OF_KINDS_SHOWN.keys() <= names
    always = (names - OF_KINDS_SHOWN.keys()) | (FOUND.keys() - found_programs.OF_KINDS_SHOWN.keys())
    assert set(OF_KINDS_SHOWN.values()) <= always
    assert set(found_programs.OF_KINDS_SHOWN.values()) <= always


@pytest.mark.parametrize(
    "program",
    [thorough(program) if program.call.__name__ in OF_KINDS_SHOWN else program for program in PROGRAMS],
    ids=[program.call.__name__ for program in PROGRAMS],
)
def test_program(program: ModelProgram) -> None:
    start()
    call = torch.compile(program.call, backend="asynctp", options={"strict": "off", **QUICK})
    tensors = [tensor(sizes, program.trains) for sizes in program.tensors.values()]
    groups = [dist.group.WORLD] + [dist.new_group()] * ("other" in inspect.signature(program.call).parameters)
    with torch.set_grad_enabled(program.trains):
        out = call(*tensors, *groups)
    if program.trains:
        out.sum().backward()
    reports = asynctp_passes.reports()
    assert [outcome for report in reports for outcome in outcomes(report)] == program.expected, "\n".join(
        map(str, reports)
    )
    others = [remark for report in reports for remark in report.remarks if remark.outcome != "FUSED"]
    assert not program.fact or program.fact in others[-1].message
