"""Run a Python script as a user would."""

from __future__ import annotations

import atexit
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch._inductor
from ranks import PATIENCE, forking, take_environment

_TESTS = Path(__file__).resolve().parents[1]


def run_script(path: Path, *arguments: str, cwd: Path, anew: bool = False) -> str:
    """Its standard output. No option of asynctp is set from outside; if it fails, so does the test, with its output.

    Args:
        path: The script.
        arguments: Its arguments.
        cwd: The folder in which it runs.
        anew: Start Python for it. Else it is forked from a process that has torch, which takes seconds to import, and
            Inductor calls aten's kernels there: C++ takes most of the time, and its graph passes are the same.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ASYNCTP_")}
    if anew:
        done = subprocess.run(
            [sys.executable, str(path), *arguments],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            stdin=subprocess.DEVNULL,
        )
    else:
        done = run_forked(path, *arguments, cwd=cwd, environment=environment)
    assert done.returncode == 0, f"{path.name} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_forked(
    path: Path,
    *arguments: str,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    paths: bool = False,
    timeout_s: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run a script in a process that is forked from one with torch, where Inductor compiles no C++.

    Args:
        path: The script.
        arguments: Its arguments.
        cwd: The folder in which it runs.
        environment: Its environment; this process's if not given.
        paths: Let it import what is in the folders of tests.
        timeout_s: Seconds, times `PATIENCE`, after which it is killed and the test fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("out", "err")]
        process = start_forked(path, *arguments, cwd=cwd, environment=environment, paths=paths, files=files)
        process.join(timeout_s * PATIENCE)
        late = process.is_alive()
        process.kill()
        process.join()
        out, err = (file.read_text() if file.exists() else "" for file in files)
        assert not late, f"{path.name} did not end:\n{out}\n{err}"
        return subprocess.CompletedProcess([str(path), *arguments], process.exitcode, out, err)


def run_forked_ranks(path: Path, *arguments: str, cwd: Path, ranks: int = 2) -> str:
    """The first rank's output and errors; a script is run as torchrun would, on ranks that are forked on the CPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "CUDA_VISIBLE_DEVICES": ""}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ASYNCTP_")} | shared
    environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(ranks)]
        processes = [
            start_forked(
                path,
                *arguments,
                cwd=cwd,
                environment=environment | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
                files=[file, file],
            )
            for rank, file in enumerate(files)
        ]
        for process in processes:
            process.join(400)
            process.kill()
            process.join()
        codes, outputs = [process.exitcode for process in processes], [file.read_text() for file in files]
    assert codes == [0] * ranks, f"{path.name} ended with {codes}:\n" + "\n".join(outputs)
    return outputs[0]


def start_forked(
    path: Path,
    *arguments: str,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    paths: bool = False,
    files: Sequence[Path] = (),
) -> BaseProcess:
    """Start a script as `run_forked` does. files: for its output, and its errors; this process's where not given."""
    given = (path, arguments, cwd or Path.cwd(), dict(os.environ if environment is None else environment), paths)
    process: BaseProcess = forking().Process(target=_run, args=(*given, files))
    process.start()
    return process


def _run(
    path: Path,
    arguments: tuple[str, ...],
    cwd: Path,
    environment: dict[str, str],
    paths: bool,
    files: Sequence[Path],
) -> None:
    for stream, file in enumerate(files, 1):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, stream)
        os.close(opened)
    os.chdir(cwd)
    take_environment(environment)
    if "fallback_by_default" in torch._inductor.list_options():
        torch._inductor.config.fallback_by_default = True
    sys.argv[:] = [str(path), *arguments]
    sys.path[:] = [
        str(path.parent),
        *(each for each in sys.path if paths or _TESTS not in (p := Path(each), *p.parents)),
    ]
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        atexit._run_exitfuncs()
