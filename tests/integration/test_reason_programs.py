"""Every MISSED code has a program that gives it, and the same program mended, which is fused: the page shows both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from compiled_training import QUICK, start
from ranks import imagined_ranks
from torch import Tensor

import asynctp_passes
from asynctp_passes import Remark
from asynctp_passes.reasons import CATALOGUE
from asynctp_passes.tools.reason_programs import PROGRAMS, RANKS, Program, script_of, source_of


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group whose first rank this process is, and a cache of its own."""
    cache = str(tmp_path_factory.mktemp("cache"))
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache), imagined_ranks(RANKS):
        yield
    torch._dynamo.reset()


def tensor(sizes: list[Any]) -> Tensor:
    """A tensor of ones as a program takes it; a dynamic dimension has 12 elements."""
    *sizes, dtype = sizes if sizes and isinstance(sizes[-1], torch.dtype) else (*sizes, torch.float32)
    out = torch.ones([12 if isinstance(size, str) else size for size in sizes]).to(dtype)
    for dim, size in enumerate(sizes):
        if isinstance(size, str):
            torch._dynamo.mark_dynamic(out, dim)
    return out


def remarks_of(program: Program) -> list[Remark]:
    start()
    options = {"strict": "off", **QUICK, **program.options}
    call = torch.compile(program.call, backend="asynctp", options=options)
    with torch.no_grad():
        call(*map(tensor, program.tensors), dist.group.WORLD)
    return [remark for report in asynctp_passes.reports() for remark in report.remarks]


@pytest.mark.parametrize("code", PROGRAMS)
def test_the_first_program_is_missed_and_the_second_is_fused(code: str) -> None:
    missed, mended = PROGRAMS[code]
    assert {remark.code for remark in remarks_of(missed) if remark.outcome == "MISSED"} == {code}
    outcomes = {remark.outcome for remark in remarks_of(mended)}
    assert "FUSED" in outcomes
    assert "MISSED" not in outcomes


@pytest.mark.parametrize("code", ["ATP105", "ATP106", "ATP108", "ATP114"])
def test_printed_programs_run(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    start()
    with mock.patch.object(dist, "init_process_group"), torch.no_grad():
        exec(compile(script_of(code), f"{code}.py", "exec"), {})
    missed, mended = asynctp_passes.reports()
    assert [remark.code for remark in missed.missed] == [code]
    assert mended.fused
    assert not mended.missed
    assert str(mended) in capsys.readouterr().out


@pytest.mark.parametrize("code", PROGRAMS)
def test_every_printed_program_is_a_script(code: str) -> None:
    compile(script_of(code), f"{code}.py", "exec")
    assert "@takes" not in script_of(code)


def test_every_missed_code_has_programs_or_a_reason_why_not() -> None:
    missed = [reason for reason in CATALOGUE.values() if reason.in_scope]
    assert PROGRAMS.keys() == {reason.code for reason in missed if not reason.no_program}


@pytest.mark.parametrize("code", PROGRAMS)
def test_programs_are_a_pair_and_short(code: str) -> None:
    names = [program.call.__name__ for program in PROGRAMS[code]]
    assert names == [f"{code.lower()}_missed", f"{code.lower()}_mended"]
    assert len(source_of(code).splitlines()) <= 20
