"""Pictures of measurements, read from matplotlib's figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from asynctp_passes.tools import plots
from asynctp_passes.tools.plots import draw_calls, draw_steps

pytest.importorskip("matplotlib")
RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
PNG = b"\x89PNG"


def call(op: str = "gather", m: int = 64, k: Any = 8192, n: Any = 2560, **times: float) -> dict[str, Any]:
    """A row of `bench.json` whose bound is 10 µs."""
    timings = {name: {"graph": time, "eager": time, "host": 1.0} for name, time in times.items()}
    return {"op": op, "kind": "bf16", "m": m, "k": k, "n": n, "timings": timings, "wrong": [], "bound": 10.0}


def told(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"machine": "4 x NVIDIA H200", "torch": "2.11.0", "date": "2026-11-22", "rows": rows}


def step(backend: str, time: float, forward: float, size: str = "70b", right: bool = True) -> dict[str, Any]:
    """A row of `e2e.json`."""
    problem = {"size": size, "kind": "bf16", "batch": 1, "sequence": 8192, "blocks": 2}
    return {"problem": problem, "backend": backend, "step": time, "forward": forward, "right": right}


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are closed, newest last."""
    found: list[Any] = []
    monkeypatch.setattr(plots.pyplot(), "close", found.append)
    return found


def within(axis: Any) -> bool:
    """All points and bars of an axis lie in it."""
    low, high = axis.get_ylim()
    values = [value for line in axis.get_lines() for value in line.get_ydata()]
    return all(low <= value <= high for value in [*values, *(bar.get_height() for bar in axis.patches)])


# --- calls -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [1, 3, 5, 7, 21])
def test_no_axis_is_empty_and_no_point_is_cut(count: int, tmp_path: Path, figure: list[Any]) -> None:
    rows = [call(m=m, k=8192 + i, nccl=20.0, asynctp=6.0) for i in range(count) for m in (64, 16384)]
    assert draw_calls(told(rows), tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(PNG)
    (drawn,) = figure
    assert len(drawn.axes) == count
    assert all(len(axis.get_lines()) == 3 and within(axis) for axis in drawn.axes), "two variants and the bound"
    assert drawn.axes[0].get_ylim()[1] > 10 / 6
    assert sum(axis.get_xlabel() != "" for axis in drawn.axes) == len({axis.get_position().x0 for axis in drawn.axes})


def test_a_picture_of_calls_names_machine_date_and_model(tmp_path: Path, figure: list[Any]) -> None:
    assert draw_calls(told([call(asynctp=20.0)]), tmp_path / "bench.png")
    assert draw_calls(told([call(asynctp=20.0), call(k=7, asynctp=20.0)]), tmp_path / "bench.png")
    machine = "4 × NVIDIA H200, torch 2.11.0, 2026-11-22"
    assert [each.get_suptitle() for each in figure] == [
        f"Time of calls, shapes of Llama 3 70B and 8B: {machine}",
        f"Time of calls, shapes of one's own: {machine}",
    ]


def test_the_legend_is_outside_and_has_what_is_drawn(tmp_path: Path, figure: list[Any]) -> None:
    rows = [call(nccl=20.0, asynctp=15.0), call("all_reduce", k=2048, n=8192, twoshot=12.0, asynctp=11.0)]
    assert draw_calls(told(rows), tmp_path / "bench.png")
    (drawn,) = figure
    assert all(axis.get_legend() is None for axis in drawn.axes)
    names = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert names == ["cuBLAS + NCCL", "asynctp", "PyTorch's two-shot"]
    renderer = drawn.canvas.get_renderer()
    legend = drawn.legends[0].get_window_extent(renderer)
    assert not any(legend.overlaps(axis.get_window_extent(renderer)) for axis in drawn.axes)


def test_what_is_wrong_is_not_drawn(tmp_path: Path, figure: list[Any]) -> None:
    rows = [{**call(asynctp=1.0, nccl=20.0), "wrong": ["asynctp"]}, {**call(k=1, asynctp=1.0), "wrong": ["asynctp"]}]
    assert draw_calls(told(rows), tmp_path / "bench.png")
    assert len(figure[0].axes) == 1
    assert not draw_calls(told(rows[1:]), tmp_path / "none.png")
    assert not draw_calls(told([]), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/bench.png")), ids=lambda path: path.parent.name)
def test_pictures_of_results_can_be_drawn_again(path: Path, tmp_path: Path) -> None:
    assert draw_calls(json.loads(path.with_suffix(".json").read_text()), tmp_path / "bench.png")


# --- steps -----------------------------------------------------------------------------------------------------
def test_bars_have_their_values_and_no_legend_over_them(tmp_path: Path, figure: list[Any]) -> None:
    rows = [step("inductor", 40.0, 14.0), step("intree", 48.0, 13.0, right=False), step("asynctp", 32.0, 11.2),
            step("inductor", 10.0, 4.0, "8b"), step("asynctp", 8.0, 5.0, "8b")]  # fmt: skip
    assert draw_steps(told(rows), tmp_path / "e2e.png")
    assert (tmp_path / "e2e.png").read_bytes().startswith(PNG)
    (drawn,) = figure
    assert drawn.get_suptitle() == "Blocks of Llama 3 70B and 8B: 4 × NVIDIA H200, torch 2.11.0, 2026-11-22"
    first = drawn.axes[0]
    assert [each.get_text() for each in first.texts] == ["1.00", "1.00", "WRONG", "1.25", "1.25"]
    assert [each.get_text() for each in first.get_xticklabels()] == ["70B\nbf16\n1x8192", "8B\nbf16\n1x8192"]
    assert all(within(axis) and axis.get_legend() is None for axis in drawn.axes)
    renderer = drawn.canvas.get_renderer()
    legend = drawn.legends[0].get_window_extent(renderer)
    for axis in drawn.axes:
        assert not legend.overlaps(axis.get_window_extent(renderer))
        assert all(text.get_window_extent(renderer).y1 <= axis.get_window_extent(renderer).y1 for text in axis.texts)


def test_a_forward_without_a_step_has_bars_of_the_forward_alone(tmp_path: Path, figure: list[Any]) -> None:
    rows: list[dict[str, Any]] = [step("inductor", 40.0, 14.0), step("asynctp", 32.0, 11.2)]
    problem = {**rows[0]["problem"], "sequence": 8, "parallel": "tp", "part": "forward"}
    rows += [{**row, "problem": problem, "step": None} for row in rows]
    assert draw_steps(told(rows), tmp_path / "e2e.png")
    steps, forwards = figure[0].axes
    assert [each.get_text() for each in steps.get_xticklabels()] == ["70B\nbf16\n1x8192"]
    assert [each.get_text() for each in forwards.get_xticklabels()] == [
        "70B\nbf16\n1x8192", "70B\nbf16\n1x8\ntp\nforward",
    ]  # fmt: skip
    assert [each.get_text() for each in forwards.texts] == ["1.00", "1.00", "1.25", "1.25"]


def test_plain_inductor_on_cpus_is_not_called_pytorchs_async_tp(tmp_path: Path, figure: list[Any]) -> None:
    rows = [step("inductor", 40.0, 14.0), step("intree", 41.0, 14.0), step("asynctp", 32.0, 11.2)]
    assert draw_steps({**told(rows), "machine": "2 x CPU (gloo)"}, tmp_path / "e2e.png")
    (drawn,) = figure
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["plain Inductor", "asynctp"]
    assert [each.get_text() for each in drawn.axes[0].texts] == ["1.00", "1.25"]


def test_no_picture_without_rows_or_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not draw_steps(told([]), tmp_path / "none.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not draw_steps(told([step("inductor", 1.0, 1.0)]), tmp_path / "none.png")
    assert not draw_calls(told([call(asynctp=20.0)]), tmp_path / "none.png")
    assert list(tmp_path.iterdir()) == []
