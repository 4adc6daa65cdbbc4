"""What computing and communicating cost: by rates that are those of the raw results, and as all parts of the program
count them."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from unittest import mock

import pytest
import torch
from graph_builder import GraphBuilder
from passes import run_pass

from asynctp_passes.planning import cost_model
from asynctp_passes.planning.cost_model import Cost, Machine

RESULTS = Path(__file__).parents[2] / "docs" / "results"
H200 = cost_model._H200
FP8 = torch.float8_e4m3fn


# --- rates -----------------------------------------------------------------------------------------------------------
def speeds(folder: str, kind: str) -> list[float]:
    """Operations per microsecond of cuBLAS alone, 2048 rows and more."""
    rows = json.loads((RESULTS / folder / "bench.json").read_text())["rows"]
    return [2 * row["m"] * row["k"] * row["n"] / row["timings"]["cublas"]["graph"]
            for row in rows if row["kind"] == kind and row["m"] >= 2048]  # fmt: skip


def test_matmuls_are_as_fast_as_measured() -> None:
    two, four = "2026-11-21-h200x2", "2026-11-21-h200x4"
    bf16 = [statistics.geometric_mean(speeds(folder, "bf16")) for folder in (two, four)]
    assert statistics.geometric_mean(bf16) == pytest.approx(H200.flops_per_us, rel=0.01)
    for kind in ("fp8", "fp8-rowwise"):
        assert statistics.geometric_mean(speeds(two, kind)) / bf16[0] == pytest.approx(cost_model.FP8_SPEED, rel=0.01)


def test_links_are_as_fast_as_measured() -> None:
    text = (RESULTS / "2026-11-21-h200x4" / "driver-calls.txt").read_text()
    times = {
        int(size): float(us) for size, us in re.findall(r"^pull (8|32) MB .* graph +([\d.]+) us", text, re.MULTILINE)
    }
    assert (24 << 20) / (times[32] - times[8]) == pytest.approx(H200.link_bytes_per_us, rel=0.01)


def test_the_selector_and_the_benchmark_count_with_the_same_link() -> None:
    pytest.importorskip("triton")
    from asynctp_kernels.cuda.choose.select import Rates

    from asynctp_passes.tools import bench

    assert Rates().copy == bench.COPY_BYTES_PER_US == H200.link_bytes_per_us


@pytest.mark.parametrize(
    ("device", "dtype", "known"),
    [
        ("NVIDIA H200", torch.bfloat16, True),
        ("NVIDIA H200", FP8, True),
        ("NVIDIA H200", torch.float8_e5m2, True),
        ("NVIDIA H200", torch.float32, False),
        ("NVIDIA H200", torch.uint8, False),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, True),
        ("NVIDIA B200", torch.bfloat16, False),
    ],
)
def test_machines_whose_rates_are_known(device: str, dtype: torch.dtype, known: bool) -> None:
    node = GraphBuilder().input("x", [4, 4], dtype)
    value = mock.Mock(device=torch.device("cuda"), dtype=dtype)
    with (
        mock.patch.object(cost_model, "tensor_of", return_value=value),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "get_device_name", return_value=device),
    ):
        machine = cost_model.machine_for(node)
    assert (machine is not None) == known
    if machine is not None:
        assert (machine.link_bytes_per_us, machine.flops_per_us) == (H200.link_bytes_per_us, H200.flops_per_us)


# --- work ------------------------------------------------------------------------------------------------------------
def test_work_is_counted_in_bf16() -> None:
    machine = Machine("some GPU", link_bytes_per_us=100.0, flops_per_us=1000.0)
    assert Cost(500, 1960).work == 1960
    assert Cost(500, 1960, fp8_flops=1960).work == 1000
    assert Cost(500, 2960, fp8_flops=1960).work == 2000
    assert Cost(500, None, fp8_flops=1960).work is None
    assert Cost(500, 1960, fp8_flops=1960).estimate_us(machine)["matmul"] == 1.0


def test_an_fp8_matmul_takes_half_the_time_and_hides_half_as_much() -> None:
    b = GraphBuilder()
    plain = b.mm(b.input("x", [256, 512], torch.bfloat16), b.input("w", [512, 128], torch.bfloat16))
    rows, weight = b.input("x8", [256, 512], FP8), b.input("w8", [512, 128], FP8, column_major=True)
    one = b.input("scale", [])
    scaled = b.scaled_mm(rows, weight, one, one)
    flops = 2 * 256 * 512 * 128
    assert (cost_model.work_of(plain), cost_model.work_of(scaled)) == (flops, round(flops / cost_model.FP8_SPEED))
    least = flops / H200.flops_per_us * H200.link_bytes_per_us
    assert cost_model.overlaps(int(least), flops, plain)
    assert not cost_model.overlaps(int(least), round(flops / cost_model.FP8_SPEED), scaled)
    assert cost_model.work_of(rows) is None


@pytest.mark.parametrize(
    ("columns", "dtype", "little"),
    [(8, torch.bfloat16, True), (1024, torch.bfloat16, False), (8, torch.float32, False)],
)
def test_a_fused_chain_that_overlaps_little_says_so(columns: int, dtype: torch.dtype, little: bool) -> None:
    """A router's matmul beside the gather of all tokens, and a projection beside it."""
    b = GraphBuilder()
    x, w = b.input("x", [1024, 4096], dtype), b.input("w", [4096, columns], dtype)
    (remark,) = run_pass(b.returns(b.mm(b.gather(x), w))).fused
    assert ("they take 1% of the time" in remark.message) == little
    assert ("little overlaps" in remark.message) == little


def test_a_chain_of_few_bytes_is_mostly_latency() -> None:
    assert cost_model.overlaps_little(Cost(cost_model.LATENCY_BYTES - 1, 1), GraphBuilder().input("x", [4, 4])) == ""
