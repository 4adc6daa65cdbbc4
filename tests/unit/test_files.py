"""Files that a user names: pipes, devices, full disks, folders and damage give a clear word, and no wait."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from passes import run_pass
from profiles import THOROUGH
from test_internal import Surprise, program
from torch.fx import Graph

from asynctp_passes import AsyncTPPass, Config, ConfigError, Report, backend
from asynctp_passes.reporting import files, graph_page
from asynctp_passes.reporting.files import write_whole
from asynctp_passes.reporting.report import SCHEMA
from asynctp_passes.tools import cli, profile
from asynctp_passes.torch_private import dynamo


@pytest.fixture
def umask() -> Iterator[None]:
    """A mask as careful people have it."""
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def compiled(**sinks: Any) -> Graph:
    """A graph that the pass has worked on, with its reports sent to these places."""
    backend.clear_reports()
    graph = program()
    AsyncTPPass(Config(**{"strict": "off", **sinks}))(graph)
    (report,) = backend.reports()
    assert len(report.fused) == 2
    return graph


# --- places to write to ----------------------------------------------------------------------------------------
def a_pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def a_pipe_that_is_full(folder: Path) -> Path:
    path = a_pipe(folder)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    os.write(writer, b"x" * (1 << 20))
    kept.extend([reader, writer])
    return path


def a_socket(folder: Path) -> Path:
    path = folder / "socket"
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))
    return path


def a_full_device(folder: Path) -> Path:
    return Path("/dev/full")


def a_folder_by_now(folder: Path) -> Path:
    (folder / "reports").mkdir()
    return folder / "reports"


def below_a_file_by_now(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file" / "reports"


kept: list[int] = []

PLACES: list[tuple[Callable[[Path], Path], str]] = [
    (a_pipe, "let something read the pipe"),
    (a_pipe_that_is_full, "read the pipe faster"),
    (a_socket, "let something read the pipe or socket"),
    (a_full_device, "make room there"),
    (a_folder_by_now, "name a file that can be written"),
    (below_a_file_by_now, "name a file that can be written"),
]


@pytest.mark.parametrize(("make", "remedy"), PLACES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_report_file_that_cannot_be_written(
    make: Callable[[Path], Path], remedy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make(tmp_path)
    with (
        mock.patch.object(files, "WAIT_S", 0.2),
        mock.patch("asynctp_passes.config.can_be_written", return_value=True),
    ):
        compiled(report_file=str(path))
    while kept:
        os.close(kept.pop())
    (warning,) = [record.getMessage() for record in caplog.records if "report_file" in record.getMessage()]
    assert f"report_file={str(path)!r} could not be written (" in warning
    assert f"Remedy: {remedy}" in warning


def test_a_pipe_that_is_read_gets_the_reports(tmp_path: Path) -> None:
    """More than a pipe holds, so that it is read while it is written."""
    path, text, read = a_pipe(tmp_path), "x" * (1 << 18) + "\n", bytearray()
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def drain() -> None:
        until = time.monotonic() + 30
        while len(read) < len(text) and time.monotonic() < until:
            with contextlib.suppress(BlockingIOError):
                read.extend(os.read(reader, 1 << 16))
            time.sleep(0.001)

    thread = threading.Thread(target=drain)
    thread.start()
    with mock.patch.object(files, "WAIT_S", 30.0):
        files.write(path, text, append=True)
    thread.join()
    os.close(reader)
    assert read.decode() == text


@pytest.mark.parametrize("make", [a_pipe, a_folder_by_now], ids=["pipe", "unwritable"])
def test_a_graph_dir_that_cannot_be_written(
    make: Callable[[Path], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make(tmp_path)
    if path.is_dir():
        path = path / ("x" * 300)
    with mock.patch("asynctp_passes.config.can_be_written", return_value=True):
        compiled(graph_dir=str(path))
    assert f"graph_dir={str(path)!r} could not be written (" in caplog.text


def test_half_a_page_is_not_left(tmp_path: Path) -> None:
    def full(self: Path, *args: Any, **kwargs: Any) -> Any:
        self.touch()
        file = mock.MagicMock()
        file.write.side_effect = OSError(28, "full")
        file.__exit__.return_value = False
        return file

    with mock.patch.object(Path, "open", full), pytest.raises(OSError, match="full"):
        graph_page._write_new(tmp_path, "graph", "page")
    assert list(tmp_path.iterdir()) == []


# --- permissions -----------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("umask")
def test_what_we_make_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    compiled(report_file=str(tmp_path / "a" / "b" / "reports"), graph_dir=str(tmp_path / "c" / "pages"))
    write_whole(tmp_path / "table.json", b"{}")
    pages = list((tmp_path / "c" / "pages").iterdir())
    assert len(pages) == 2, "a page and their list"
    folders = [tmp_path / name for name in ("a", "a/b", "c", "c/pages")]
    assert {mode(folder) for folder in folders} == {0o750}
    assert {mode(file) for file in (*pages, tmp_path / "a" / "b" / "reports", tmp_path / "table.json")} == {0o640}


def test_a_file_that_is_replaced_keeps_its_permissions_and_its_links(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    real.chmod(0o664)
    link.symlink_to(real)
    write_whole(link, b"new")
    assert (link.is_symlink(), real.read_text(), mode(real)) == (True, "new", 0o664)
    assert sorted(tmp_path.iterdir()) == [link, real]


def test_a_file_that_cannot_be_replaced_stays(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old")
    with mock.patch.object(Path, "replace", side_effect=OSError(28, "full")), pytest.raises(OSError, match="full"):
        write_whole(tmp_path / "real.json", b"new")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("real.json", "old")]


# --- sinks that fail -------------------------------------------------------------------------------------------
SINKS = [
    # what fails, and which sinks there are
    (backend, "_log", {}),
    (dynamo, "trace", {}),
    (Report, "to_json", {"report_file": "reports"}),
    (graph_page, "write_page", {"graph_dir": "pages"}),
    (graph_page, "_listing", {"graph_dir": "pages"}),
    (backend, "_copy", {"graph_dir": "pages"}),
    (backend, "_send_with_cache_entry", {}),
    (backend, "_publish_cached", {}),
]


@pytest.mark.usefixtures("internal_errors")
@pytest.mark.parametrize(("owner", "name", "sinks"), SINKS, ids=[name for _, name, _ in SINKS])
@pytest.mark.parametrize("error", [Surprise, RecursionError, UnicodeEncodeError])
def test_no_sink_ends_a_compile(
    owner: Any, name: str, sinks: dict[str, Any], error: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raised = error("ascii", "x", 0, 1, "bad") if error is UnicodeEncodeError else error("no such thing")
    placed = {key: value if value is True else str(tmp_path / value) for key, value in sinks.items()}
    graph = program()
    backend.clear_reports()
    with mock.patch.object(owner, name, side_effect=raised):
        AsyncTPPass(Config(**{"strict": "all", **placed}))(graph)
    assert any("asynctp" in str(node.target) for node in graph.nodes)
    assert len(backend.reports()) == 1
    assert "internal error ATP901" in caplog.text


@pytest.mark.usefixtures("internal_errors")
def test_a_cache_key_that_cannot_be_made_turns_caching_off() -> None:
    with mock.patch.object(backend, "sources_digest", side_effect=OSError(13, "denied")):
        assert AsyncTPPass(Config()).uuid() is None
    assert isinstance(AsyncTPPass(Config()).uuid(), bytes)


# --- places to read from ---------------------------------------------------------------------------------------
TRIES = 400 if THOROUGH else 120
ODD = (None, True, False, -1, 0, 0.5, 10**400, 2**70, float("inf"), float("nan"), "", "x", "\udc00", [], {}, [[]])


def damaged(value: Any, drawn: random.Random) -> Any:
    """The value with one entry at any depth replaced, removed, doubled or added."""
    if not isinstance(value, dict | list) or not value or drawn.random() < 0.15:
        return drawn.choice([*ODD, _deep(drawn.choice([3, 30, 600]))])
    changed: Any = dict(value) if isinstance(value, dict) else list(value)
    key = drawn.choice(list(changed) if isinstance(changed, dict) else range(len(changed)))
    if drawn.random() < 0.15:
        del changed[key]
    elif drawn.random() < 0.1 and isinstance(changed, dict):
        changed[f"{key}_"] = changed[key]
    else:
        changed[key] = damaged(changed[key], drawn)
    return changed


def _deep(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def written(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8", errors="surrogatepass")
    return path


@pytest.mark.parametrize("arguments", [["report"], ["report", "--json"]])
def test_damaged_reports(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, drawn = json.loads(run_pass(program()).to_json()), random.Random(0)
    assert cli.main([*arguments, str(written(tmp_path / "good", report))]) == 0
    codes = [cli.main([*arguments, str(written(tmp_path / "bad", damaged(report, drawn)))]) for _ in range(TRIES)]
    assert set(codes) == {0, 2}
    for line in capsys.readouterr().err.splitlines():
        assert line.startswith("asynctp: "), line


def test_damaged_reports_for_the_benchmark(tmp_path: Path) -> None:
    report, drawn = json.loads(run_pass(program()).to_json()), random.Random(1)
    report["remarks"] = [remark for remark in report["remarks"] if remark["call"]]
    assert len(cli.calls_of_report(written(tmp_path / "good", report))) == 2
    for _ in range(TRIES):
        remark = drawn.choice(report["remarks"])
        call = {**remark, "call": damaged(remark["call"], drawn)}
        path = written(tmp_path / "bad", {**report, "remarks": [call]})
        assert all(_can_be_made(arguments) for _, arguments, _ in _calls_or_refused(path))


def _calls_or_refused(path: Path) -> list[tuple[str, dict[str, Any], int]]:
    try:
        return cli.calls_of_report(path)
    except cli.UsageError:
        return []


def _can_be_made(arguments: dict[str, Any]) -> bool:
    tensors = [value for value in arguments.values() if isinstance(value, dict)]
    return all(len(tensor["shape"]) == len(tensor["stride"]) for tensor in tensors)


MESSAGES = [
    # what is changed in a report, and what the error says
    ({"remarks": [{"outcome": "FUSE"}]}, "the report's remarks[0] has no 'collective'"),
    (
        {"remarks": [{"outcome": "FUSE", "kind": "", "collective": ""}]},
        "must be one of 'FUSED', 'OVERLAPPED', 'ACCELERATED', 'BUCKETED', ",
    ),
    (
        {"remarks": [{"outcome": "FUSED", "kind": "", "collective": "", "flops": 2**64}]},
        "s flops is too large a number",
    ),
    ({"remarks": [], "phase": 3}, "the report's phase is 3; it must be of type <class 'str'>"),
    ({"remarks": [], "graph": "", "phase": "", "colour": 1}, "the report has 'colour', which is none of graph, phase"),
    ({"remarks": {}}, 'no JSON object with a list of "remarks"'),
]


@pytest.mark.parametrize(("changes", "message"), MESSAGES)
def test_what_is_wrong_with_a_report_is_said(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "reports.jsonl", {"schema": SCHEMA, "graph": "graph", "phase": "forward", **changes})
    assert cli.main(["report", str(path)]) == 2
    error = capsys.readouterr().err
    assert f"{path}:1 is not a report (" in error
    assert message in error


def gpu_event(name: str, start: float, length: float, **more: Any) -> dict[str, Any]:
    place = {"device": 0, "stream": 7, "rank": 0, "own": True}
    event = {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": length, "pid": 0, "tid": 7, "args": place}
    return {**event, **more}


TRACE = {
    "traceEvents": [
        gpu_event("ncclDevKernel_AllGather", 0, 5),
        gpu_event("sm90_gemm", 2, 6),
        gpu_event("rank 0", 3, 1, cat="gemm_tile"),
        gpu_event("layer", 0, 9, cat="gpu_user_annotation"),
    ]
}


@pytest.mark.parametrize(
    "arguments", [[], ["--json"], ["--layer", "layer"], ["--timeline", "OUT"]], ids=["page", "json", "layer", "picture"]
)
def test_damaged_traces(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = random.Random(2)
    arguments = [str(tmp_path / "picture.svg") if each == "OUT" else each for each in arguments]
    assert cli.main(["profile", str(written(tmp_path / "good.json", TRACE)), *arguments]) == 0
    for _ in range(TRIES):
        path = written(tmp_path / "bad.json", damaged(TRACE, drawn))
        assert cli.main(["profile", str(path), *arguments]) in (0, 2)
    for line in capsys.readouterr().err.splitlines():
        assert line.startswith(("asynctp: profile: ", "wrote ")), line


def test_a_number_of_a_trace_that_is_too_large(tmp_path: Path) -> None:
    for number in (10**400, float("inf"), float("nan"), 1e300):
        path = written(tmp_path / "bad.json", {"traceEvents": [gpu_event("k", 0, 1, ts=number)]})
        with pytest.raises(profile.TraceError, match=r"bad\.json: the event 'k'"):
            profile.read(path)


def test_a_picture_for_a_pipe_without_a_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, pipe = written(tmp_path / "good.json", TRACE), a_pipe(tmp_path)
    assert cli.main(["profile", str(trace), "--timeline", str(pipe)]) == 2
    assert str(pipe) in capsys.readouterr().err


def test_results_that_cannot_be_read(tmp_path: Path) -> None:
    assert cli._measured(tmp_path / "none.json") == {"rows": []}
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(cli.UsageError, match="--out"):
        cli._measured(tmp_path / "bad.json")


@pytest.mark.skipif(not hasattr(sys, "set_int_max_str_digits"), reason="this Python reads any number of digits")
def test_a_variable_with_thousands_of_digits() -> None:
    with pytest.raises(ConfigError, match="an integer >= 0"):
        Config.from_options(environ={"ASYNCTP_EXPECT": "9" * 10_000})
