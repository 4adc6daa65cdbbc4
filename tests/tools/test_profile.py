"""The trace reader, on traces written by hand whose answers are known."""

from __future__ import annotations

import gzip
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline

from asynctp_passes.tools import profile
from asynctp_passes.tools.cli import main
from asynctp_passes.tools.profile import Rule, TraceError


def event(name: str, start: float, end: float, stream: int = 7, device: int = 0, cat: str = "kernel") -> dict[str, Any]:
    """An event as Kineto writes it."""
    place = {"device": device, "stream": stream}
    return {"ph": "X", "cat": cat, "name": name, "pid": device, "tid": stream, "ts": start, "dur": end - start, "args": place}  # fmt: skip  # noqa: E501


def copy(start: float, end: float, stream: int = 20, name: str = "Memcpy PtoP (Device -> Device)") -> dict[str, Any]:
    return event(name, start, end, stream, cat="gpu_memcpy")


#: a gather in front of a GEMM and a scatter behind it: 100 to 1100 µs, all communication exposed
PLAIN = [
    event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 100, 400, stream=20),
    event("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT", 400, 800),
    event("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 800, 1050, stream=20),
    event("triton_poi_fused_add_0", 1060, 1100),
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 5000},
    {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
]

#: the same with copies beside the GEMM: 100 to 640 µs, of 320 µs of communication 40 are exposed
FUSED = [
    event("stage_kernel", 100, 120),
    event("gemm_kernel", 120, 560),
    copy(120, 220),
    copy(200, 300),
    copy(300, 400, stream=21),
    copy(560, 580),
    event("triton_poi_fused_add_0", 580, 620),
    event("Memcpy HtoD (Pageable -> Device)", 610, 640, stream=9, cat="gpu_memcpy"),
]


def write(path: Path, events: list[dict[str, Any]], **keys: Any) -> Path:
    path.write_text(json.dumps({"traceEvents": events, **keys}))
    return path


def summary_of(tmp_path: Path, events: list[dict[str, Any]], *rules: Rule) -> profile.Summary:
    (found,) = profile.summarize(profile.read(write(tmp_path / "trace.json", events), rules))
    return found


def figures(found: profile.Summary) -> tuple[float, ...]:
    return found.span, found.compute, found.communication, found.exposed, found.idle


def test_all_exposed(tmp_path: Path) -> None:
    assert figures(summary_of(tmp_path, PLAIN)) == (1000, 440, 550, 550, 10)


def test_mostly_hidden(tmp_path: Path) -> None:
    """Overlapping copies count once; those beside the GEMM are hidden; one from the host neither hides nor is one."""
    assert figures(summary_of(tmp_path, FUSED)) == (540, 480, 320, 40, 20)


@pytest.mark.parametrize(
    ("communication", "compute", "exposed"),
    [
        ([(0, 10)], [], 10),
        ([(0, 10)], [(0, 10)], 0),
        ([(0, 10)], [(2, 4), (3, 7)], 5),
        ([(0, 10), (5, 20)], [(8, 12), (15, 30)], 11),
        ([(0, 10), (20, 30)], [(10, 20)], 20),
        ([(0, 10), (20, 30)], [(5, 25)], 10),
        ([(3, 4)], [(0, 1), (1, 2), (3.5, 9)], 0.5),
        ([], [(0, 5)], 0),
    ],
)
def test_exposed_is_communication_less_compute(
    communication: list[tuple[float, float]], compute: list[tuple[float, float]], exposed: float, tmp_path: Path
) -> None:
    events = [event("ncclKernel", *each, stream=1) for each in communication] + [event("k", *each) for each in compute]
    found = summary_of(tmp_path, events)
    assert found.exposed == pytest.approx(exposed)
    assert found.span == pytest.approx(found.compute + found.exposed + found.idle)


@pytest.mark.parametrize(
    ("name", "kind", "what"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication", "NCCL kernels"),
        ("ncclKernel_ReduceScatter_RING_LL_Sum_bfloat", "communication", "NCCL kernels"),
        ("Memcpy PtoP (Device -> Device)", "communication", "copies between GPUs"),
        ("push_gather_kernel", "communication", "asynctp's collective kernels"),
        ("reduce_kernel", "communication", "asynctp's collective kernels"),
        ("await_kernel", "communication", "asynctp's collective kernels"),
        ("void at::native::reduce_kernel<512, 1>(...)", "compute", "other kernels"),
        ("void c10d::symmetric_memory::barrier_kernel(...)", "communication", "PyTorch's symmetric-memory kernels"),
        (
            "void (anonymous namespace)::two_shot_all_reduce_kernel<16>",
            "communication",
            "PyTorch's symmetric-memory kernels",
        ),
        ("multimem_all_gather_kernel", "communication", "PyTorch's symmetric-memory kernels"),
        ("gemm_kernel", "compute", "asynctp's GEMM"),
        ("nvjet_sm90_tst_320x128", "compute", "other kernels"),
        ("triton_red_fused__to_copy_0", "compute", "other kernels"),
        ("Memcpy DtoD (Device -> Device)", "compute", "copies within a GPU"),
        ("Memset (Device)", "compute", "copies within a GPU"),
        ("Memcpy DtoH (Device -> Pinned)", "other", "copies from and to the host"),
    ],
)
def test_rules(name: str, kind: str, what: str, tmp_path: Path) -> None:
    trace = profile.read(write(tmp_path / "trace.json", [event(name, 0, 1)]))
    assert (trace.events[0].rule.kind, trace.events[0].rule.what) == (kind, what)


def test_all_kernels_of_collectives_communicate() -> None:
    """Those of the module of copies and reductions, and no other of the package."""
    kernels = pytest.importorskip("asynctp_kernels.cuda.gemm.copy_kernels")
    names = [name for name in vars(kernels) if name.endswith("_kernel")]
    assert "push_all_reduce_kernel" in names
    first = [next(rule for rule in profile.RULES if re.search(rule.pattern, name)) for name in names]
    assert {(rule.kind, rule.what) for rule in first} == {("communication", "asynctp's collective kernels")}


def test_own_rules_come_first(tmp_path: Path) -> None:
    events = [event("my_put", 0, 4), event("ncclKernel", 4, 9)]
    assert summary_of(tmp_path, events).exposed == 5
    assert summary_of(tmp_path, events, Rule("communication", "^my_", "mine")).exposed == 9
    assert summary_of(tmp_path, events, Rule("other", "^nccl", "not counted")).communication == 0


def test_steps_of_a_schedule_divide(tmp_path: Path) -> None:
    marks = [{"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{i}", "ts": 0, "dur": 1, "pid": 1, "tid": 1} for i in (3, 4)]  # fmt: skip  # noqa: E501
    found = summary_of(tmp_path, [*PLAIN, *marks])
    assert (found.steps, found.span, found.exposed) == (2, 500, 275)


def test_devices_apart_and_gzip(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    events = [*PLAIN, event("ncclKernel", 0, 8, device=1), event("k", 6, 10, device=1)]
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    first, second = profile.summarize(profile.read(path))
    assert (first.device, first.exposed) == (0, 550)
    assert (second.device, figures(second)) == (1, (10, 4, 8, 6, 0))


def test_a_range_of_the_program(tmp_path: Path) -> None:
    """Two layers of one name: the first is taken, and events that reach out of it are cut."""
    ranges = [event("layer 0", 300, 500, cat="gpu_user_annotation"), event("layer 0", 900, 950, cat="gpu_user_annotation")]  # fmt: skip  # noqa: E501
    trace = profile.read(write(tmp_path / "trace.json", [*PLAIN, *ranges]))
    window = profile.find_annotation(trace, "layer 0", 0)
    assert window == (300, 500)
    (found,) = profile.summarize(trace, window)
    assert figures(found) == (200, 100, 100, 100, 0)
    with pytest.raises(TraceError, match=r"no range 'layer 9' on GPU 0; there are layer 0. Name one in the program"):
        profile.find_annotation(trace, "layer 9", 0)


# --- files that are no trace -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "it must be a trace that torch.profiler exported"),
        ("3", "no list of traceEvents"),
        ('{"traceEvents": []}', "holds nothing that ran on a GPU; profile with"),
        (json.dumps({"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": "soon", "dur": 1}]}), "'k' lacks"),
    ],
)
def test_no_trace(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert main(["profile", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("asynctp: profile: ")
    assert str(path) in err
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "3"], "--device 3 is not valid"),
        (["--timeline", f"{__file__}/out.svg"], "out.svg is not valid; it must be a file that can be written"),
        (["--layer", "x"], "no range 'x'"),
        (["--rule", "compute"], "must be KIND=REGEX"),
        (["--rule", "gpu=x"], "rule kind 'gpu' is not valid; it must be one of communication, compute, other"),
        (["--rule", "compute=("], "rule pattern '(' is not valid"),
    ],
)
def test_bad_options(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(write(tmp_path / "t.json", PLAIN)), *arguments]) == 2
    assert message in capsys.readouterr().err


# --- what comes out ----------------------------------------------------------------------------------------------
def test_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("fused.json"), FUSED)
    assert main(["profile", "fused.json"]) == 0
    assert_expected_inline(
        capsys.readouterr().out,
        """\
fused.json: GPU 0
  span                 0.540 ms  100.0 %
  compute              0.480 ms   88.9 %
  communication        0.320 ms   59.3 %
    exposed            0.040 ms    7.4 %
  idle                 0.020 ms    3.7 %
    communication      0.320 ms in 4 x copies between GPUs
    communication      0.020 ms in 1 x asynctp's collective kernels
    compute            0.440 ms in 1 x asynctp's GEMM
    compute            0.040 ms in 1 x other kernels
    other              0.030 ms in 1 x copies from and to the host
""",
    )


def test_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("plain.json"), PLAIN)
    write(Path("fused.json"), FUSED)
    assert main(["profile", "plain.json", "fused.json"]) == 0
    assert_expected_inline(
        capsys.readouterr().out,
        """\
before: plain.json, GPU 0
after:  fused.json, GPU 0
  per step               before        after       change
  span                 1.000 ms     0.540 ms      -46.0 %
  compute              0.440 ms     0.480 ms       +9.1 %
  communication        0.550 ms     0.320 ms      -41.8 %
    exposed            0.550 ms     0.040 ms      -92.7 %
  idle                 0.010 ms     0.020 ms     +100.0 %
""",
    )


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "trace.json", PLAIN)
    assert main(["profile", str(path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["exposed"] == 550
    assert found["parts"]["NCCL kernels"] == ["communication", 2, 550]


SVG = "{http://www.w3.org/2000/svg}"


def boxes_of(root: ElementTree.Element) -> dict[str, ElementTree.Element]:
    """The boxes of events, by what their tooltips say."""
    return {each.findtext(f"{SVG}title", ""): next(each.iter(f"{SVG}rect")) for each in root.iter(f"{SVG}g")}


def texts_of(root: ElementTree.Element) -> list[str]:
    return [each.text or "" for each in root.iter(f"{SVG}text")]


def test_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One row a stream, one box an event, in its place and of its length."""
    source, picture = write(tmp_path / "trace.json", FUSED), tmp_path / "new" / "out.svg"
    assert main(["profile", str(source), "--timeline", str(picture)]) == 0
    assert f"wrote {picture}" in capsys.readouterr().err
    root = ElementTree.parse(picture).getroot()
    texts = texts_of(root)
    assert [each for each in texts if each.startswith("stream")] == ["stream 7", "stream 9", "stream 20", "stream 21"]
    assert "trace.json, GPU 0: 540 µs, exposed communication 40 µs" in texts
    assert len(boxes_of(root)) <= len(list(root.iter(f"{SVG}g"))) == len(FUSED)
    gemm = boxes_of(root)["gemm_kernel, 440.0 µs"]
    assert float(gemm.get("x", 0)) == pytest.approx(110 + 20 / 540 * 1000, abs=0.01)
    assert float(gemm.get("width", 0)) == pytest.approx(440 / 540 * 1000, abs=0.01)
    assert "prefers-color-scheme: dark" in picture.read_text(encoding="utf-8")


def test_timeline_of_two_traces(tmp_path: Path) -> None:
    """Both have the time scale of the longer one: a GEMM of 440 µs is as wide in either."""
    traces = [str(write(tmp_path / f"{name}.json", events)) for name, events in (("plain", PLAIN), ("fused", FUSED))]
    picture = tmp_path / "out.svg"
    assert main(["profile", *traces, "--timeline", str(picture)]) == 0
    root = ElementTree.parse(picture).getroot()
    titles = [each for each in texts_of(root) if "exposed communication" in each]
    assert [each.partition(",")[0] for each in titles] == ["plain.json", "fused.json"]
    assert "1000 µs" in titles[0]
    assert float(boxes_of(root)["gemm_kernel, 440.0 µs"].get("width", 0)) == pytest.approx(440, abs=0.01)
    ends = [each for each in root.iter(f"{SVG}line") if each.get("class") == "end"]
    assert [float(each.get("x1", 0)) for each in ends] == pytest.approx([1110, 650], abs=0.1)
    assert texts_of(root).count("400 µs") == 2, "a scale below each"
    places = [float(each.get("y", 0)) for each in root.iter(f"{SVG}rect") if each.get("class") == "box"]
    assert max(places) < float(root.get("height", 0))


@pytest.mark.parametrize(
    ("length", "ticks"),
    [
        (540, ["0 µs", "100 µs", "200 µs", "300 µs", "400 µs", "500 µs"]),
        (1000, [f"{each} µs" for each in range(0, 1001, 100)]),
        (10912, [f"{each} ms" for each in range(0, 11, 2)]),
        (5000, [f"{each / 2:g} ms" for each in range(11)]),
        (0.5, [f"{each / 100:g} µs" for each in range(0, 51, 5)]),
        (3e8, [f"{each} ms" for each in range(0, 300_001, 50_000)]),
    ],
)
def test_ticks_are_at_round_times(length: float, ticks: list[str]) -> None:
    lines = "".join(profile._scale(0, 10, 1000 / length, length))
    assert re.findall(r">([^<>]+)</text>", lines) == ticks


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("triton_red_fused__fused_rms_norm__to_copy_abs_all_gather_into_tensor_amax_clamp_exp2_0", "triton_red_…_0"),
        ("triton_poi_fused_add_29", "triton_poi_…_29"),
        ("ncclDevKernel_AllReduce_Sum_f64_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nccl AllReduce_Sum_f64"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nccl AllGather"),
        ("nvjet_sm90_qqtst_128x160_128x5_2x1_v_bz_coopA_algo2_TNT", "nvjet 128x160"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128", "cudnn flash_bprop"),
        ("Memcpy PtoP (Device -> Device)", "Memcpy PtoP"),
        ("void cudnn::fusion::fmha_reduce_head<true>(void const*, void*)", "fmha_reduce_head"),
        ("void at::native::(anonymous namespace)::fill<4, at::F<float>>(int)", "fill"),
        ("gemm_kernel", "gemm_kernel"),
        ("my_kernel_1", "my_kernel_1"),
    ],
)
def test_names_of_kernels_are_folded(name: str, short: str) -> None:
    assert profile.folded(name) == short


def test_a_box_has_as_much_of_a_name_as_fits(tmp_path: Path) -> None:
    def label(width: float) -> str:
        name = "triton_red_fused_abs_amax_view_13"
        event = profile.Event(name, 0, 7, 0.0, width, profile.RULES[-1])
        box = profile._box(event, 0.0, 0, 1.0)
        assert f"<title>{name}, {width:.1f} µs</title>" in box
        return "".join(re.findall(r">([^<>]*)</text>", box))

    assert [label(width) for width in (20, 60, 200)] == ["", "triton_…", "triton_red_…_13"]


def test_a_picture_says_which_gpus_and_when(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.json", FUSED)
    known = json.loads(path.read_text())
    base = 1_795_284_508_000_000_000
    more = {"deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], "baseTimeNanoseconds": base}
    for ranks, machine in (({"world_size": 4}, "4 × NVIDIA H200"), (None, "NVIDIA H200")):
        path.write_text(json.dumps({**known, **more, "distributedInfo": ranks}))
        trace = profile.read(path)
        assert (trace.machine, trace.date) == (machine, "2026-11-21")
        assert f"trace.json, GPU 0 of {machine}, 2026-11-21: 540 µs" in profile.timeline(profile.Panel(trace))
    for odd in ({"deviceProperties": "x"}, {"deviceProperties": [3]}, {"baseTimeNanoseconds": 10**40}):
        path.write_text(json.dumps({**known, **odd}))
        assert (profile.read(path).machine, profile.read(path).date) == ("", "")
