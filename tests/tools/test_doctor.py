"""The doctor: made-up machines and what it says of them, and this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from asynctp_kernels import errors, torch_private
from asynctp_kernels.cuda.checks import WORLD_SIZES
from asynctp_kernels.cuda.choose import select
from asynctp_kernels.cuda.runtime import driver

import asynctp_passes
from asynctp_passes import doctor
from asynctp_passes.doctor import (
    Facts,
    Finding,
    Gpu,
    bug_report,
    diagnose,
    last_reports,
    render,
    usable,
    without_places,
)
from asynctp_passes.reporting.report import Note, Report

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "check-your-machine.md"

H200 = Gpu("NVIDIA H200", (9, 0), stream_ops=True)
A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0), stream_ops=True)
CPU = Facts(version="0.2.0", installed="0.2.0", python=(3, 12, 3), torch="2.13.1+cpu", triton="3.7.0")
GPU = replace(
    CPU,
    torch="2.13.1+cu130",
    torch_cuda="13.0",
    driver=13000,
    peer_writes=True,
    gpus=(H200,) * 4,
    symmetric_memory="CUDA",
    table_path="tuning.json",
    table_gpus=("NVIDIA H200",),
)
ALL_PAIRS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))

CPU_ONLY = "CPU only: the reference implementation runs"
INTERPRETED = "CPU only: the interpreted kernels run"
OVERLAPPED = "the fused ops run overlapped here"
NO_GEMM = "the fused ops run overlapped here, without the fused GEMM"
SEQUENTIAL = "the fused ops run sequentially here: "
FAILED = "not usable as asked: "


def env(**values: str) -> dict[str, Any]:
    return {"environment": values}


# base machine, what is different on it; the findings that warn or fail, in order; how the verdict begins
CASES: dict[str, tuple[Facts, dict[str, Any], list[str], str]] = {
    "nothing at all": (Facts(), {}, ["fail torch"], FAILED + "torch: cannot be imported"),
    "cpu": (CPU, {}, [], CPU_ONLY),
    "cpu without triton": (CPU, {"triton": None, "kernels_error": "no triton"}, [], CPU_ONLY),
    "cpu, old triton": (CPU, {"triton": "3.5.1"}, ["warn triton"], CPU_ONLY),
    "cpu, kernels do not import": (CPU, {"kernels_error": "OSError: x"}, ["warn kernels"], CPU_ONLY),
    "cpu, another Gluon": (CPU, {"gluon_error": "ImportError: x"}, [], CPU_ONLY),
    "cpu torch, driver": (CPU, {"driver": 12080}, ["warn torch build"], CPU_ONLY),
    "cuda torch, no driver": (CPU, {"torch_cuda": "13.0"}, [], CPU_ONLY),
    "cuda torch, GPUs hidden": (CPU, {"torch_cuda": "13.0", "driver": 13000}, ["warn GPUs"], CPU_ONLY),
    "driver of an older major": (
        CPU, {"torch_cuda": "13.0", "driver": 12080}, ["fail driver", "warn GPUs"], FAILED + "driver: knows CUDA 12.8",
    ),
    "driver of an older minor": (GPU, {"torch_cuda": "13.2"}, [], OVERLAPPED),
    "torch 2.10": (CPU, {"torch": "2.10.1"}, ["warn torch"], CPU_ONLY),
    "torch 2.15": (CPU, {"torch": "2.15.2"}, [], CPU_ONLY),
    "torch 2.16 nightly": (CPU, {"torch": "2.16.0.dev20261101"}, ["warn torch"], CPU_ONLY),
    "torch 2.11": (CPU, {"torch": "2.11.0"}, ["warn torch bug"] * 3, CPU_ONLY),
    "torch 2.12": (CPU, {"torch": "2.12.1"}, ["warn torch bug"] * 3, CPU_ONLY),
    "torch 2.13.0": (CPU, {"torch": "2.13.0+cpu"}, ["warn torch bug"] * 2, CPU_ONLY),
    "torch 2.13.1": (CPU, {"torch": "2.13.1"}, [], CPU_ONLY),
    "in-tree pass on, 2.13.1": (CPU, {"torch": "2.13.1", "micro_pipeline": True}, ["warn torch bug"], CPU_ONLY),
    "in-tree pass on, 2.14": (CPU, {"torch": "2.14.0", "micro_pipeline": True}, [], CPU_ONLY),
    "interpreter works": (CPU, {"interpreted": True, **env(ASYNCTP_CPU_IMPLEMENTATION="interpreted")}, [], INTERPRETED),
    "interpreter asked for and broken": (
        CPU, {"interpreter_fault": "it counts to 3", **env(ASYNCTP_CPU_IMPLEMENTATION="interpreted")},
        ["fail interpreter"], FAILED + "interpreter: it counts to 3",
    ),
    "4 H200": (GPU, {}, [], OVERLAPPED),
    "4 H200, no triton": (
        GPU, {"triton": None, "kernels_error": "no triton", "symmetric_memory": None}, ["warn triton"],
        SEQUENTIAL + "triton is missing",
    ),
    "4 H200, old triton": (GPU, {"triton": "3.5.0"}, ["fail triton"], FAILED + "triton: 3.5.0 is too old"),
    "4 H200, kernels do not import": (GPU, {"kernels_error": "OSError: x"}, ["fail kernels"], FAILED + "kernels"),
    "4 H200, another Gluon": (GPU, {"gluon_error": "ImportError: x"}, ["warn kernels"], OVERLAPPED),
    "4 H200, no C compiler": (GPU, {"native_error": "RuntimeError: x"}, ["warn call sites"], OVERLAPPED),
    "4 H200, CUDA 13.1": (GPU, {"driver": 13010, "peer_writes": False}, [], OVERLAPPED),
    "4 H200, interpreter on": (
        GPU, {"interpreted": True}, ["fail TRITON_INTERPRET"], FAILED + "TRITON_INTERPRET: Triton runs its interpreter",
    ),
    "4 H200, no peer access": (
        GPU, {"unreachable": ALL_PAIRS}, ["warn peer access"], SEQUENTIAL + "no GPU reaches another one's memory",
    ),
    "4 H200, two islands": (
        GPU, {"unreachable": ALL_PAIRS[1:5]}, ["warn peer access"], SEQUENTIAL + "groups with GPUs 0-2, 0-3, 1-2, 1-3 ",
    ),
    "4 H200, no symmetric memory": (
        GPU, {"symmetric_memory": None}, ["warn symmetric memory"],
        SEQUENTIAL + "torch has no symmetric memory for CUDA",
    ),
    "4 H200, NVSHMEM": (GPU, {"symmetric_memory": "NVSHMEM"}, ["warn symmetric memory"], OVERLAPPED),
    "1 H200": (GPU, {"gpus": (H200,)}, [], SEQUENTIAL + "there is one GPU"),
    "9 H200": (GPU, {"gpus": (H200,) * 9}, [], OVERLAPPED),
    "4 A100": (GPU, {"gpus": (A100,) * 4}, [], NO_GEMM),
    "H200 and A100": (GPU, {"gpus": (H200, A100)}, ["warn GPU count"], NO_GEMM),
    "no stream memory operations": (
        GPU, {"gpus": (replace(H200, stream_ops=False), H200)}, ["warn stream memory operations"], OVERLAPPED,
    ),
    "sequential asked for": (
        GPU, env(ASYNCTP_CUDA_IMPLEMENTATION="sequential"), [], SEQUENTIAL + "ASYNCTP_CUDA_IMPLEMENTATION asks for it",
    ),
    "fused asked for": (GPU, env(ASYNCTP_CUDA_IMPLEMENTATION="fused"), [], OVERLAPPED),
    "fused asked for on A100": (
        GPU, {"gpus": (A100,) * 2, **env(ASYNCTP_CUDA_IMPLEMENTATION="fused")}, ["fail ASYNCTP_CUDA_IMPLEMENTATION"],
        FAILED + "ASYNCTP_CUDA_IMPLEMENTATION: 'fused' cannot run on NVIDIA A100",
    ),
    "an implementation of its own": (
        GPU, {"implementations": ("fast",), **env(ASYNCTP_CUDA_IMPLEMENTATION="fast")}, [], OVERLAPPED,
    ),
    "invalid values": (
        CPU,
        env(ASYNCTP_TIMEOUT_S="0", ASYNCTP_CPU_IMPLEMENTATION="x", ASYNCTP_CUDA_IMPLEMENTATION="y",
            ASYNCTP_TUNING_TABLE=""),
        ["fail ASYNCTP_TIMEOUT_S", "fail ASYNCTP_CPU_IMPLEMENTATION", "fail ASYNCTP_CUDA_IMPLEMENTATION",
         "fail ASYNCTP_TUNING_TABLE"],
        FAILED + "ASYNCTP_TIMEOUT_S: '0' is not valid",
    ),
    "valid values": (
        CPU,
        env(ASYNCTP_TIMEOUT_S="2.5", ASYNCTP_CPU_IMPLEMENTATION="reference", ASYNCTP_CUDA_IMPLEMENTATION="auto"),
        [], CPU_ONLY,
    ),
    "variables of CUDA and torch": (
        GPU,
        env(CUDA_DEVICE_MAX_CONNECTIONS="1", CUDA_VISIBLE_DEVICES="0,1,2,3"),
        [], OVERLAPPED,
    ),
    "broken table": (
        GPU, {"table_gpus": None, "table_error": "line 1"}, ["fail tuning table"], FAILED + "tuning table: tuning.json",
    ),
    "table named and not there": (
        GPU, {"table_gpus": None, **env(ASYNCTP_TUNING_TABLE="tuning.json")}, ["warn tuning table"], OVERLAPPED,
    ),
    "table named and not there, without GPUs": (
        CPU, {"table_path": "t.json", "table_gpus": None, **env(ASYNCTP_TUNING_TABLE="t.json")},
        ["warn tuning table"], CPU_ONLY,
    ),
    "no table": (GPU, {"table_gpus": None}, [], OVERLAPPED),
    "table of another GPU": (GPU, {"table_gpus": ("NVIDIA H100",)}, [], OVERLAPPED),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_machines(case: str) -> None:
    base, changes, expected, verdict = CASES[case]
    *findings, last = diagnose(replace(base, **changes))
    assert [f"{found.status} {found.name}" for found in findings if found.status in ("warn", "fail")] == expected
    assert last.name == "verdict"
    assert last.text.startswith(verdict)
    assert verdict.endswith(last.text) or verdict.startswith((FAILED, SEQUENTIAL)), "exact, unless a reason follows"
    assert usable([*findings, last]) == (not any(text.startswith("fail") for text in expected))
    assert all(finding.remedy for finding in findings if finding.status == "fail" and finding.name != "interpreter")


def said(facts: Facts, name: str) -> list[tuple[str, str]]:
    return [(finding.status, finding.text) for finding in diagnose(facts) if finding.name == name]


@pytest.mark.parametrize(
    ("changes", "name", "status", "text"),
    [
        ({}, "GPUs", "ok", "4 × NVIDIA H200, compute capability 9.0: every implementation"),
        ({"gpus": (A100,) * 2}, "GPUs", "info", "the fused GEMM is for 9.0"),
        ({"gpus": (H200,)}, "GPU count", "info", "one GPU has no peer"),
        ({"gpus": (H200,), "environment": {"CUDA_VISIBLE_DEVICES": "3"}}, "GPU count", "info", "see one each"),
        ({"gpus": (H200,) * 9}, "GPU count", "info", "more than 8 ranks run sequentially"),
        ({"gpus": (H200, A100)}, "GPU count", "warn", "hang"),
        ({}, "peer access", "ok", "between all GPUs"),
        ({"unreachable": ALL_PAIRS}, "peer access", "warn", "0-1, 0-2, 0-3, 1-2 and 2 other pairs"),
        ({}, "stream memory operations", "ok", "supported"),
        ({"gpus": (replace(H200, stream_ops=None),)}, "stream memory operations", "info", "not known"),
        ({}, "peer signals", "ok", "stream memory operations"),
        ({"peer_writes": False}, "peer signals", "info", "4-byte copy"),
        ({}, "driver", "ok", "CUDA 13.0"),
        ({"symmetric_memory": None, "kernels_error": "x"}, "symmetric memory", "info", "not known"),
        ({}, "tuning table", "ok", "tuning.json: measured on these GPUs"),
        (
            {"table_gpus": None},
            "tuning table",
            "info",
            "none (tuning.json): the shipped table and the cost model choose",
        ),
        ({"table_gpus": ("X",)}, "tuning table", "info", "nothing of NVIDIA H200"),
        (env(CUDA_DEVICE_MAX_CONNECTIONS="1"), "CUDA_DEVICE_MAX_CONNECTIONS", "info", "overlap less"),
        (env(CUDA_VISIBLE_DEVICES=""), "CUDA_VISIBLE_DEVICES", "info", "'': torch sees no other GPUs"),
        (
            env(ASYNCTP_TIMEOUT_S="2"),
            "ASYNCTP_TIMEOUT_S",
            "info",
            "'2': seconds after which a wait for a peer gives up",
        ),
        ({"torch": "2.13.1", "micro_pipeline": True}, "torch bug", "warn", "fused_scaled_matmul_reduce_scatter"),
    ],
)
def test_what_it_says(changes: dict[str, Any], name: str, status: str, text: str) -> None:
    [(found_status, found_text)] = said(replace(GPU, **changes), name)
    assert found_status == status
    assert text in found_text


def test_known_bugs_by_version() -> None:
    counts = {v: len(said(replace(CPU, torch=v), "torch bug")) for v in ("2.10.9", "2.11.0", "2.11.1+cu130", "2.12.0")}
    assert counts == {"2.10.9": 0, "2.11.0": 3, "2.11.1+cu130": 3, "2.12.0": 3}
    assert [len(said(replace(CPU, torch=v), "torch bug")) for v in ("2.13.0a0+git1", "2.13.1", "2.14.0")] == [2, 0, 0]


def test_names_are_those_of_the_code() -> None:
    """The doctor must import without the modules that own these names, so it repeats them."""
    assert set(doctor.CUDA_IMPLEMENTATIONS) <= set(select.offered())
    assert (doctor.CUDA_VARIABLE, doctor.TABLE_VARIABLE) == (select.VARIABLE, select.TABLE_VARIABLE)
    assert doctor.TIMEOUT_VARIABLE == errors.TIMEOUT_VARIABLE
    assert WORLD_SIZES.stop - 1 == doctor.MAX_RANKS


def test_what_config_refuses_counts_in_the_verdict() -> None:
    findings = diagnose(replace(CPU, options_error="strict='x' is not valid"))
    assert [finding.name for finding in findings[-2:]] == ["options", "verdict"]
    assert findings[-1].text == "not usable as asked: options: strict='x' is not valid"
    assert not usable(findings)


@pytest.mark.parametrize(
    ("installed", "text"),
    [
        ("0.2.0", "0.2.0; passes in /a, kernels in /b"),
        ("0.1.0", "0.2.0, where 0.1.0 is installed; passes in /a, kernels in /b"),
        ("", "0.2.0, where none is installed; passes in /a, kernels in /b"),
    ],
)
def test_the_versions_of_asynctp_and_torch_come_first(installed: str, text: str) -> None:
    first, second, *_ = diagnose(replace(CPU, installed=installed, places=("/a", "/b")))
    assert first == Finding("asynctp", "ok", text)
    assert second == Finding("torch", "ok", "2.13.1+cpu")


def test_render() -> None:
    rows = [Finding("a", "ok", "fine", "unseen"), Finding("long", "warn", "slow", "do x")]
    findings = [*rows, Finding("verdict", "ok", "all")]
    assert render(findings) == "ok    a     fine\nwarn  long  slow\n            → do x\n\nall"
    assert render(findings[-1:]) == "\nall"


def test_the_page_shows_what_is_printed() -> None:
    """The example of the how-to is this made-up machine's."""
    facts = replace(GPU, torch="2.13.0+cu130", triton="3.7.1", table_gpus=None)
    facts = replace(facts, table_path="~/.cache/asynctp/tuning.json", environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    [example] = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    folder = "/opt/venv/asynctp_"
    own = asynctp_passes.__version__
    facts = replace(facts, version=own, installed=own, places=(f"{folder}passes", f"{folder}kernels"))
    assert example == render(diagnose(facts)) + "\n"


# --- for an issue ------------------------------------------------------------------------------------------------
def a_report(graph: str, **changes: Any) -> Report:
    return Report(
        graph, "forward", (), torch_version="2.13.1", notes=(Note("torch", "at /home/ada/net/model.py:12"),), **changes
    )


def test_what_an_issue_needs() -> None:
    facts = replace(CPU, places=("/home/ada/asynctp_passes", "/opt/kernels"), **env(ASYNCTP_REPORT_FILE="~/r.jsonl"))
    said = bug_report(facts, diagnose(facts), [a_report("one"), a_report("two")], ("ada", "box.lab", "box"))
    assert said.startswith("### asynctp 0.2.0, torch 2.13.1+cpu\n")
    for wanted in (CPU_ONLY, "ASYNCTP_REPORT_FILE=…/r.jsonl", "Report 1 of 2", "Report 2 of 2", "at …/model.py:12"):
        assert wanted in said
    assert not re.search(r"ada|/home|/opt|~", said)
    nothing = bug_report(CPU, diagnose(CPU), [], ())
    assert "no variable of asynctp's is set" in nothing
    assert "none: set ASYNCTP_REPORT_FILE to a file" in nothing


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("in /home/ada/x/model.py:12, line", "in …/model.py:12, line"),
        ("('/data/run 3/a.pt')", "('… …/a.pt')"),
        ("~/.cache/asynctp/tuning.json: none", "…/tuning.json: none"),
        ("../x/y and ./z", "… and …"),
        ("nets/ada/model.py", "…/model.py"),
        ("file:///srv/data", "file:…"),
        ("of ada on box.lab, box; adage, 'box2'", "of … on …, …; adage, 'box2'"),
        ("H100/H200, 3/4, all_gather/matmul", "H100/H200, 3/4, all_gather/matmul"),
        ("/home/ada", "…"),
    ],
)
def test_no_paths_and_no_names(text: str, shown: str) -> None:
    assert without_places(text, ("ada", "box.lab", "box", "")) == shown


def test_the_last_reports(tmp_path: Path) -> None:
    """Of the file that the variable names; else of the newest file here that has any."""
    assert last_reports({}, tmp_path) == []
    file, other = tmp_path / "reports.jsonl", tmp_path / "losses.jsonl"
    file.write_text("".join(a_report(str(number)).to_json() + "\n" for number in range(5)))
    other.write_text('{"loss": 1}\n')
    os.utime(file, (1, 1))
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    assert [report.graph for report in last_reports({}, tmp_path)] == ["2", "3", "4"]
    named = tmp_path / "named"
    named.write_text(a_report("x").to_json())
    assert [report.graph for report in last_reports({"ASYNCTP_REPORT_FILE": str(named)}, tmp_path)] == ["x"]
    assert last_reports({"ASYNCTP_REPORT_FILE": str(tmp_path / "none")}, tmp_path) == []


# --- gathering -------------------------------------------------------------------------------------------------
class FakeCuda:
    """Two pairs of GPUs: access within a pair, and from 0 to 2 one way only."""

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 4

    def get_device_name(self, index: int) -> str:
        return f"GPU {index}"

    def get_device_capability(self, index: int) -> tuple[int, int]:
        return 9, index

    def can_device_access_peer(self, a: int, b: int) -> bool:
        return a // 2 == b // 2 or (a, b) == (0, 2)


def test_gpus_are_asked() -> None:
    fake = SimpleNamespace(cuda=FakeCuda(), version=SimpleNamespace(cuda="13.0"))
    attributes = {(0, 122): 1, (0, 123): 1, (1, 122): 0, (1, 123): 0, (2, 122): 0, (2, 123): 1}
    attribute = SimpleNamespace(device_attribute=lambda index, number: attributes[index, number])
    gpus = doctor._gpus(fake, attribute)
    assert [gpu.stream_ops for gpu in gpus] == [True, False, True, None]
    assert gpus[3] == Gpu("GPU 3", (9, 3), None)
    assert doctor._unreachable(fake, 4) == ((0, 2), (0, 3), (1, 2), (1, 3))
    assert doctor._gpus(SimpleNamespace(cuda=FakeCuda(), version=SimpleNamespace(cuda=None)), attribute) == ()
    assert doctor._gpus(None, None) == ()


class FakeDriverFunction:
    """A function of a driver with GPUs 0 and 1, handles 70 and 71; an attribute's value is handle + number."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any) -> int:
        if self.name == "cuDeviceGet":
            args[0]._obj.value = 70 + args[1]
            return 0 if args[1] < 2 else 101
        if self.name == "cuDeviceGetAttribute":
            args[0]._obj.value = args[2].value + args[1]
        if self.name == "cuGetErrorString":
            args[1]._obj.value = b"invalid device ordinal"
        return 0


class FakeLibrary:
    def __getattr__(self, name: str) -> FakeDriverFunction:
        return FakeDriverFunction(name)


def test_device_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "library", lambda: FakeLibrary())
    assert driver.device_attribute(1, 122) == 71 + 122
    with pytest.raises(driver.CudaError, match=r"cuDeviceGet: invalid device ordinal \(101\)"):
        driver.device_attribute(2, 122)


def test_table_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    assert doctor._read_table(str(path), select.read_tuned) == doctor._read_table("", select.read_tuned) == (None, "")
    path.write_bytes(Path(select.__file__).with_name("measured.json").read_bytes())
    gpus, fault = doctor._read_table(str(path), select.read_tuned)
    assert (gpus, fault) == (tuple(select.shipped()), "")
    path.write_text("{")
    gpus, fault = doctor._read_table(str(path), select.read_tuned)
    assert gpus is None
    assert str(path) in fault


def test_facts_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCTP_TIMEOUT_S", "7")
    monkeypatch.setenv("ASYNCTP_TUNING_TABLE", "no/such/file")
    facts = doctor.gather_facts()
    assert (facts.python, facts.torch) == (sys.version_info[:3], torch.__version__)
    assert (facts.torch_cuda, len(facts.gpus)) == (torch.version.cuda, torch.cuda.device_count())
    assert facts.kernels_error is None
    assert facts.implementations == select.offered()
    assert facts.environment["ASYNCTP_TIMEOUT_S"] == "7"
    assert (facts.table_path, facts.table_gpus, facts.table_error) == ("no/such/file", None, "")
    if torch.version.cuda is None:
        assert facts.symmetric_memory is None


def test_micro_pipeline_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not torch_private.micro_pipeline_enabled()
    monkeypatch.setitem(sys.modules, "torch._inductor.config", SimpleNamespace(_micro_pipeline_tp=True))
    assert torch_private.micro_pipeline_enabled()
    monkeypatch.delitem(sys.modules, "torch._inductor.config")
    assert not torch_private.micro_pipeline_enabled()


# --- the command -----------------------------------------------------------------------------------------------
BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
from asynctp_passes.tools.cli import main
sys.exit(main({arguments!r}))
"""


def run_doctor(*arguments: str, blocked: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    """`asynctp doctor` on this machine without the modules `blocked`, and with no variables of ours but those given."""
    program = BLOCKED.format(blocked=blocked, arguments=["doctor", *arguments])
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ASYNCTP_") and k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", program]
    environment = {**kept, **variables, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, encoding="utf-8", timeout=120, check=False
    )


# That these runs see no GPU is a matter of CUDA_VISIBLE_DEVICES; a driver too old for torch would fail them.
@pytest.mark.parametrize("blocked", [(), ("triton",)], ids=["all", "no triton"])
def test_command_here(blocked: tuple[str, ...]) -> None:
    done = run_doctor(blocked=blocked)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "CPU only: the reference implementation runs"
    assert ("cannot be imported: the fused ops run sequentially" in done.stdout) == (blocked == ("triton",))


def test_command_for_an_interpreter_that_is_off() -> None:
    done = run_doctor(ASYNCTP_CPU_IMPLEMENTATION="interpreted")
    assert (done.returncode, done.stderr) == (1, "")
    assert "needs TRITON_INTERPRET=1 in the environment before triton is imported" in done.stdout


def test_command_says_no() -> None:
    done = run_doctor("--json", ASYNCTP_CPU_IMPLEMENTATION="fast", ASYNCTP_STRICT="maybe")
    findings = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (1, "")
    assert [finding["name"] for finding in findings if finding["status"] == "fail"] == [
        "ASYNCTP_CPU_IMPLEMENTATION",
        "options",
        "verdict",
    ]
    assert set(findings[0]) == {"name", "status", "text", "remedy"}
    assert "strict='maybe'" in next(finding["text"] for finding in findings if finding["name"] == "options")


def test_command_without_the_kernels() -> None:
    done = run_doctor(blocked=("asynctp_kernels",))
    assert (done.returncode, done.stderr) == (0, "")
    assert "the kernels cannot be imported: ModuleNotFoundError" in done.stdout


def test_command_without_torch() -> None:
    done = run_doctor("--json", blocked=("torch",))
    assert (done.returncode, done.stderr) == (1, "")
    first, second, *_ = json.loads(done.stdout)
    assert (first["name"], first["text"].startswith(asynctp_passes.__version__)) == ("asynctp", True)
    assert (second["name"], second["status"]) == ("torch", "fail")


def test_command_for_an_issue(tmp_path: Path) -> None:
    """With the reports of the file that the program wrote, and none of this machine's paths or names."""
    file = tmp_path / "r.jsonl"
    file.write_text(a_report("my_graph").to_json() + "\n")
    done = run_doctor("--report", ASYNCTP_REPORT_FILE=str(file), ASYNCTP_STRICT="all")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"### asynctp {asynctp_passes.__version__}, torch {torch.__version__}\n")
    assert "my_graph" in done.stdout
    assert "ASYNCTP_STRICT=all" in done.stdout
    for private in (str(tmp_path), str(ROOT), str(Path.home()), *filter(None, doctor.own_names())):
        assert not re.search(rf"(?<!\w){re.escape(private)}(?!\w)", done.stdout), private
