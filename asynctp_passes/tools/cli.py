"""The `asynctp` command.

Exit codes: 0 done; 1 it ran and the answer is no (the demo's curves disagree, a collective was not fused, a measured
result is wrong, or the doctor found what will not work); 2 it could not run (bad arguments, an unreadable file, a
missing compiler); 3 a rank failed; 130 interrupted, and 143 terminated, with all ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import importlib
import importlib.util
import io
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from asynctp_passes import doctor
from asynctp_passes.config import can_be_written, required
from asynctp_passes.reasons import CATALOGUE, Reason
from asynctp_passes.reporting import files
from asynctp_passes.reporting.report import Remark, Report
from asynctp_passes.tools import profile

_EPILOG = (
    "exit codes: 0 done; 1 the demo's curves disagree, a collective was not fused, a measured result is wrong, or "
    "the doctor found what will not work; 2 could not run; "
    "3 a rank failed; 130 interrupted; 143 terminated"
)


class UsageError(Exception):
    """The command cannot do what it was asked; the message says why and what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: The command line without the program's name; `sys.argv[1:]` when None.

    Returns:
        The exit code.
    """
    if required():
        importlib.import_module("asynctp_passes.reporting.at_exit").waive()
    options = _options(sys.argv[1:] if arguments is None else list(arguments))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names from files may be no text that can be encoded
            stream.reconfigure(errors="backslashreplace")
    try:
        with _sigterm_raises():
            code: int = options.run(options)
    except UsageError as error:
        print(f"asynctp: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output left, as `head` does
        sys.stderr.close()
        return 0
    except OSError as error:  # a file of the user's, or a full disk
        print(f"asynctp: {error}", file=sys.stderr)
        return 2
    return code


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM, as `timeout` and schedulers send it, end a command as an interrupt does: its ranks are stopped."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Parser(argparse.ArgumentParser):
    """A parser that names the nearest word to a mistake."""

    def error(self, message: str) -> NoReturn:
        """Show the usage and the message, and end."""
        wrong = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)|unrecognized arguments: (\S+)", message)
        if wrong is not None:
            choices = re.findall(r"[\w-]+", wrong[2]) if wrong[2] else self._option_string_actions
            near = difflib.get_close_matches(wrong[1] or wrong[3].partition("=")[0], choices, 1, 0.7)
            message += f"; did you mean {near[0]}?" if near else ""
        super().error(message)


def _options(arguments: list[str]) -> argparse.Namespace:
    """The options of a command line. A mistake is said by the command that was meant, and ends the process."""
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    command = getattr(options, "parser", parser)
    if unknown:
        named = arguments.index(command.prog.split()[-1]) if command is not parser else len(arguments)
        meant = parser if arguments.index(unknown[0]) < named else command
        meant.error(f"unrecognized arguments: {' '.join(unknown)}")
    if command is parser:
        parser.error("the following arguments are required: COMMAND")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="asynctp", description="Asynchronous tensor parallelism for torch.compile.", epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"asynctp-passes {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    demo = commands.add_parser("demo", help="train a small model with and without asynctp on this machine")
    demo.add_argument("--steps", type=int, default=60, help="training steps of each run (default: %(default)s)")
    demo.add_argument("--ranks", type=int, help="processes: 2, 4 or 8 (default: one a GPU, 2 without GPUs)")
    demo.add_argument("--out", type=Path, default=Path("asynctp-out"), help="folder to write to (default: %(default)s)")
    demo.set_defaults(run=_demo, parser=demo)

    machine = commands.add_parser("doctor", help="say what will work on this machine, and what to do about the rest")
    form = machine.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON array instead")
    form.add_argument(
        "--report", action="store_true",
        help="print what a bug report needs, without paths and names: this, the environment, and the last reports of "
        "ASYNCTP_REPORT_FILE or of the newest such file here",
    )  # fmt: skip
    machine.set_defaults(run=_doctor, parser=machine)

    bench = commands.add_parser(
        "bench", help="time the fused ops against cuBLAS + NCCL and PyTorch's in-tree ops on this machine's GPUs"
    )
    bench.add_argument("--e2e", action="store_true", help="time whole transformer blocks under each compiler instead")
    bench.add_argument("--cpu", action="store_true", help="with --e2e: 2 processes on the CPU, a tiny model")
    _add_ranks(bench)
    add_bench_options(bench)
    add_table_options(bench)
    add_end_to_end_options(bench)
    bench.set_defaults(run=_bench, parser=bench, command="bench")

    tune = commands.add_parser("tune", help="measure what is fastest here, for programs to choose by: bench --tune")
    _add_ranks(tune)
    add_bench_options(tune, end_to_end=False)
    tune.set_defaults(
        run=_bench, parser=tune, command="tune", all=False, tune=True, e2e=False, **dict.fromkeys(_END_TO_END)
    )

    profiled = commands.add_parser(
        "profile", help="say how much communication a torch.profiler trace shows exposed, and draw it"
    )
    profiled.add_argument("traces", type=Path, nargs="+", metavar="TRACE.json", help="two are compared: before, after")
    profiled.add_argument("--json", action="store_true", help="print one JSON array instead")
    profiled.add_argument("--layer", metavar="NAME", help="only the first record_function range of this name")
    profiled.add_argument("--device", type=int, help="only this GPU (default: all; of a picture, the first)")
    profiled.add_argument(
        "--timeline", type=Path, metavar="FILE.svg", help="draw one GPU's streams, of several traces on one time scale"
    )
    profiled.add_argument(
        "--rule", action="append", default=[], metavar="KIND=REGEX",
        help="count events of such names as communication, compute or other, before the built-in rules; repeatable",
    )  # fmt: skip
    profiled.set_defaults(run=_profile, parser=profiled)

    reasons = commands.add_parser(
        "reasons", help="explain why a chain was not fused; of one CODE, show a program mended"
    )
    reasons.add_argument("code", nargs="?", metavar="CODE", help="a code or a name, as ATP105 or COMPUTED_BETWEEN")
    reasons.set_defaults(run=_reasons, parser=reasons)

    report = commands.add_parser("report", help="print the reports that Config.report_file collected")
    report.add_argument("file", type=Path, metavar="FILE.jsonl", help="one report a line")
    report.add_argument("--json", action="store_true", help="print one JSON array instead")
    report.set_defaults(run=_report, parser=report)
    return parser


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, help="processes, one a GPU: 2 to 8 (default: all GPUs)")


def _version() -> str:
    try:
        return metadata.version("asynctp-passes")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _demo(options: argparse.Namespace) -> int:
    from asynctp_passes.tools.demo import DemoError, RankError, run_demo  # imports torch.distributed: slow

    try:
        return 0 if run_demo(options.steps, options.ranks, options.out) else 1
    except (DemoError, OSError) as error:
        raise UsageError(f"demo: {error}") from error
    except RankError as error:
        print(f"asynctp: demo: {error}", file=sys.stderr)
        return 3


def _doctor(options: argparse.Namespace) -> int:
    facts = doctor.gather_facts()
    findings = doctor.diagnose(facts)
    if options.report:
        reports = doctor.last_reports(os.environ, Path.cwd())
        print(doctor.bug_report(facts, findings, reports, doctor.own_names()))
    elif options.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        print(doctor.render(findings))
    return 0 if doctor.usable(findings) else 1


def add_bench_options(parser: argparse.ArgumentParser, end_to_end: bool = True) -> None:
    """The options of a measurement, for the command and for its worker processes; `tune` has no `--e2e` to explain."""
    kinds = "; with --e2e of bf16,fp8,fp8-rowwise: bf16,fp8-rowwise" if end_to_end else ""
    rows = "; with --e2e --parallel tp tokens of a forward: 1,8,64,256,1024,4096" if end_to_end else ""
    timeout = "; with --e2e 300, and what does not fit is left out" if end_to_end else ""
    parser.add_argument(
        "--report", type=Path, metavar="FILE.jsonl",
        help="measure the fused calls of a program, from the file that Config.report_file names, not built-in shapes",
    )  # fmt: skip
    parser.add_argument(
        "--rows", type=_numbers, help=f"values of M, as 512,2048 (default: powers of 2, 64 to 16384{rows})"
    )
    parser.add_argument(
        "--shapes", type=_words, help="MxKxN, as 16x2048x8192,64x7168x8192, in place of the built-in K and N and --rows"
    )
    parser.add_argument("--ops", type=_words, help="of gather,scatter,all_reduce (default: all)")
    parser.add_argument(
        "--kinds", type=_words, help="of bf16,fp8,fp8-rowwise, and without fast accumulation fp8-precise,"
        f"fp8-rowwise-precise (default: bf16{kinds})",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7, help="rounds to take the median of (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for the raw results, and a plot")
    parser.add_argument(
        "--timeout", type=int, help=f"end after so many seconds (default: 1800{timeout})"
    )  # fmt: skip


def add_table_options(parser: argparse.ArgumentParser) -> None:
    """The further options of a measurement of ops, for the command and for its worker processes."""
    parser.add_argument("--all", action="store_true", help="time each of our implementations too")
    parser.add_argument("--tune", action="store_true", help="write the fastest of each row to the tuning table")


def add_end_to_end_options(parser: argparse.ArgumentParser) -> None:
    """The further options of `--e2e`, for the command and for its worker processes."""
    end_to_end = parser.add_argument_group("with --e2e")
    end_to_end.add_argument("--sizes", type=_words, help="of debug,small,8b,70b (default: 70b,8b)")
    end_to_end.add_argument("--batches", type=_words, help="BATCHxSEQUENCE, as 1x8192,2x4096 (default: 1x8192)")
    end_to_end.add_argument(
        "--parallel", type=_words, help="of sp,tp: activations sharded over the sequence; replicated, also in a "
        "forward for inference, of --rows tokens (default: sp)",
    )  # fmt: skip
    end_to_end.add_argument("--backends", type=_words, help="of inductor,intree,asynctp (default: all)")
    end_to_end.add_argument("--blocks", type=int, help="transformer blocks (default: 2)")
    end_to_end.add_argument("--option", action="append", default=[], help="NAME=VALUE for torch.compile; repeatable")


def _numbers(text: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid value {text!r}; it must be numbers, as 512,2048") from None


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(text.split(",")))


KINDS = ("bf16", "fp8", "fp8-rowwise", "fp8-precise", "fp8-rowwise-precise")
OPS = ("gather", "scatter", "all_reduce")
_END_TO_END = ("sizes", "batches", "parallel", "backends", "blocks", "option", "cpu")
_OPS_ONLY = ("report", "shapes", "ops", "all", "tune")
_BUILT_IN_ONLY = ("rows", "shapes", "ops", "kinds")


def _bench(options: argparse.Namespace) -> int:
    """`bench` or `tune`: mistakes are said by the name that was given."""
    try:
        return _check_and_measure(options)
    except UsageError as error:
        raise UsageError(f"{options.command}: {error}") from error


def _check_and_measure(options: argparse.Namespace) -> int:
    for name in _OPS_ONLY if options.e2e else _END_TO_END:
        if getattr(options, name):
            remedy = "leave one of them out" if options.e2e else "add --e2e, or leave it out"
            raise UsageError(f"--{name} is not valid {'with' if options.e2e else 'without'} --e2e; {remedy}")
    if options.report is not None:
        for name in _BUILT_IN_ONLY:
            if getattr(options, name):
                raise UsageError(f"--{name} is not valid with --report, which has them; leave one of them out")
        options.ranks = _ranks_of_report(options.report, options.ranks)
    if options.e2e:
        settle_end_to_end(options, gpu=not options.cpu)
    _refuse(mistake(options, options.e2e))
    ranks = _cpu_ranks(options.ranks) if options.cpu else _bench_ranks(options.ranks, options.e2e)
    if options.e2e:
        _refuse(size_mistake(options, ranks))
    elif options.ops and "all_reduce" not in options.ops and options.rows and all(m % ranks for m in options.rows):
        raise UsageError(f"--rows {options.rows} is not valid; it must have a multiple of the {ranks} ranks")
    return _measure(options, ranks)


def _refuse(said: str) -> None:
    if said:
        raise UsageError(said)


def settle_end_to_end(options: argparse.Namespace, gpu: bool) -> None:
    """Fill in the defaults of `--e2e`, of the command and of its worker processes."""
    from asynctp_passes.tools.demo.recipe import BACKENDS  # imports torch: slow

    defaults = {
        "sizes": ["70b", "8b"] if gpu else ["debug"],
        "kinds": ["bf16", "fp8-rowwise"] if gpu else ["fp32"],
        "batches": ["1x8192"] if gpu else ["2x64"],
        "parallel": ["sp"],
        "backends": list(BACKENDS),
        "blocks": 2,
        "timeout": 300,
        "gpu": gpu,
    }
    for name, value in defaults.items():
        if getattr(options, name, None) is None:
            setattr(options, name, value)
    if "tp" in options.parallel and options.rows is None:
        options.rows = [1, 8, 64, 256, 1024, 4096] if gpu else [1, 64]


def mistake(options: argparse.Namespace, end_to_end: bool) -> str:
    """The mistake in an option of a measurement; empty when there is none. That of `--e2e` is settled."""
    at_least_1 = [(name, getattr(options, name, None)) for name in ("rounds", "timeout", "blocks")]
    for name, number in [*at_least_1, *(("rows", each) for each in options.rows or ())]:
        if number is not None and number < 1:
            return f"--{name} {number} is not valid; it must be at least 1"
    for name, valid in _choices(end_to_end).items():
        for word in getattr(options, name) or ():
            if word not in valid:
                return f"--{name} {word!r} is not valid; it must be of {', '.join(valid)}"
    for text in getattr(options, "shapes", None) or ():
        if not re.fullmatch("[1-9][0-9]*x[1-9][0-9]*x[1-9][0-9]*", text):
            return f"--shapes {text!r} is not valid; it must be MxKxN, as 16x2048x8192"
        if options.rows:
            return "--rows is not valid with --shapes, which have them; leave one of them out"
    if options.out is not None and not can_be_written(str(options.out), folder=True):
        return f"--out {options.out} is not valid; it must be a folder that can be written, or made"
    return _end_to_end_mistake(options) if end_to_end else ""


def _end_to_end_mistake(options: argparse.Namespace) -> str:
    from asynctp_passes.tools.demo.recipe import BACKENDS, RecipeError, compile_options  # imports torch: slow

    for text in options.batches:
        if not re.fullmatch("[1-9][0-9]*x[1-9][0-9]*", text):
            return f"--batches {text!r} is not valid; it must be BATCHxSEQUENCE, as 2x4096"
    if options.rows and "tp" not in options.parallel:
        return "--rows is not valid with --e2e --parallel sp; add --parallel tp, or leave it out"
    for size in options.sizes:
        if size != "debug" and not options.gpu:
            return f"--sizes {size!r} is not valid without GPUs; it must be debug"
    if options.backends[0] != BACKENDS[0]:
        limit = f"{BACKENDS[0]} first: it is what the others are compared with"
        return f"--backends {','.join(options.backends)!r} is not valid; it must be {limit}"
    try:
        compile_options(options.option)
    except RecipeError as error:
        return str(error)
    return ""


def size_mistake(options: argparse.Namespace, ranks: int) -> str:
    """Which model or batch of `--e2e`, settled, the ranks do not split evenly; empty when they do."""
    from asynctp_passes.tools.demo.model import PRESETS  # imports torch: slow

    for size, batch in itertools.product(options.sizes, options.batches):
        sequence = int(batch.split("x")[1]) if "sp" in options.parallel else ranks
        try:
            dataclasses.replace(PRESETS[size], sequence=sequence).require_divisible(ranks)
        except ValueError as error:
            return f"--sizes {size} --batches {batch}: {error}"
    return ""


def _start_ranks(module: str, ranks: int, arguments: Sequence[str], cpu: bool = False) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""} if cpu else None
    launcher = None
    try:
        with _signals_held():
            launcher = subprocess.Popen([*command, "-m", module, *arguments], env=environment)
        return launcher.wait()
    except BaseException:
        if launcher is not None:
            launcher.terminate()  # and not kill: it ends its ranks
            launcher.wait()
        raise


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Signals that end a command come at the end of this. A child ignores those that this process ignores."""
    came: list[int] = []
    heard = [one for one in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(one) is not signal.SIG_IGN]
    before = {one: signal.signal(one, lambda number, frame: came.append(number)) for one in heard}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    for number in came:
        signal.raise_signal(number)


def _measure(options: argparse.Namespace, ranks: int) -> int:
    """Ops, or whole blocks. What was measured is kept when a rank fails or hangs: each row is written as it comes."""
    name = "e2e" if options.e2e else "bench"
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.out = options.out or Path(scratch)
        path = folder / f"{name}.json"
        path.unlink(missing_ok=True)
        failed = _start_ranks(f"asynctp_passes.tools.{name}", ranks, _bench_arguments(options), options.cpu)
        found = _measured(path)
        if str(folder) != scratch and path.exists():
            print(f"wrote {folder}: {', '.join(sorted(each.name for each in folder.iterdir()))}")
    if failed:
        print(f"asynctp: {options.command}: ended early; what was measured is above", file=sys.stderr)
        return 3
    if found.get("left_out") and not found["rows"] and not found["failed"]:
        raise UsageError("nothing was measured; why is above")
    return 0 if all(row["right"] for row in found["rows"]) and not found.get("failed") else 1


def _measured(path: Path) -> dict[str, Any]:
    """The text that the ranks have written so far; empty where there is none yet, or the disk is full."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"rows": []}
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the results in {path}: {error}; name another folder with --out") from error
    return dict(found)


def calls_of_report(path: Path) -> list[tuple[str, dict[str, Any], int]]:
    """The fused calls of a file of reports, each once: the op's name, its arguments, and the ranks of its group.

    Raises:
        UsageError: The file cannot be read, or is none of reports.
    """
    remarks = [remark for report in _read_reports(path) for remark in report.fused if remark.call]
    for remark in remarks:
        if wrong := _mistake_in_call(remark):
            raise UsageError(f"{path}: the call of {remark.collective} {wrong}; it must be one that report_file wrote")
    found = [(remark.op.removeprefix("asynctp::"), remark.call, remark.group_size) for remark in remarks]
    return list({json.dumps(each): each for each in found}.values())


_MOST_ELEMENTS = 2**40


def _mistake_in_call(remark: Remark) -> str:
    """Why a fused op cannot be called as a remark says; empty when it can."""
    import torch  # slow

    from asynctp_passes import ops  # noqa: F401  (registers torch.ops.asynctp)

    space, _, name = remark.op.partition("::")
    if space != "asynctp" or name not in dir(torch.ops.asynctp):
        return f"is of the op {remark.op!r}, which this version does not have"
    known = {one.name: one for one in getattr(torch.ops.asynctp, name).default._schema.arguments}
    needed = {each for each, one in known.items() if not one.has_default_value()} - {"group_name"}
    if not needed <= set(remark.call) <= set(known):
        return f"has the arguments {sorted(remark.call)}, not {sorted(needed)} and of {sorted(set(known) - needed)}"
    dtypes = [str(each).removeprefix("torch.") for each in vars(torch).values() if isinstance(each, torch.dtype)]
    for argument, value in remark.call.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict) and (wrong := _mistake_in_tensor(one, dtypes)):
                return f"has {argument} with {wrong}"
            if not isinstance(one, dict) and "Tensor" in str(known[argument].type) and one is not None:
                return f"has {argument}={one!r}, which is no tensor"
            if argument.endswith("dtype") and one is not None and one not in dtypes:
                return f"has {argument}={one!r}, which is no dtype"
    return ""


def _mistake_in_tensor(tensor: dict[str, Any], dtypes: Sequence[str]) -> str:
    dtype, shape, stride = (tensor.get(key) for key in ("dtype", "shape", "stride"))
    if set(tensor) != {"dtype", "shape", "stride"} or dtype not in dtypes:
        return f"dtype={dtype!r}, shape={shape!r}, stride={stride!r}"
    for key, numbers in (("shape", shape), ("stride", stride)):
        if not isinstance(numbers, list) or any(type(one) is not int or one < 0 for one in numbers):
            return f"{key}={numbers!r}"
    if len(shape or ()) != len(stride or ()) or math.prod(shape or ()) > _MOST_ELEMENTS:
        return f"shape={shape!r} and stride={stride!r}"
    return ""


def _ranks_of_report(path: Path, wanted: int | None) -> int:
    """How many processes measure a report's calls: as many as their groups have ranks."""
    sizes = sorted({ranks for _, _, ranks in calls_of_report(path)})
    if not sizes:
        raise UsageError(
            f"{path} has no fused call with its sizes; it must be what report_file collected of a program, "
            "compiled with static shapes by this version"
        )
    if wanted is None and len(sizes) > 1:
        raise UsageError(f"{path} has groups of {_listed(sizes)} ranks; say which with --ranks")
    if wanted is not None and wanted not in sizes:
        raise UsageError(f"--ranks {wanted} is not valid; the groups in {path} have {_listed(sizes)} ranks")
    return sizes[0] if wanted is None else wanted


def _listed(sizes: Sequence[int]) -> str:
    return " and ".join(map(str, sizes))


def _bench_arguments(options: argparse.Namespace) -> list[str]:
    """The command line of a worker."""
    given = []
    for name in (
        "report",
        "rows",
        "shapes",
        "ops",
        "kinds",
        "rounds",
        "out",
        "timeout",
        "sizes",
        "batches",
        "parallel",
        "backends",
        "blocks",
    ):
        value = getattr(options, name)
        if value is not None:
            given += [f"--{name}", ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    given += [word for text in options.option or () for word in ("--option", text)]
    return given + [f"--{name}" for name in ("all", "tune") if getattr(options, name)]


def _choices(end_to_end: bool) -> dict[str, Sequence[str]]:
    """The words that each option of a measurement takes."""
    if not end_to_end:
        return {"kinds": KINDS, "ops": OPS}
    from asynctp_passes.tools.demo.model import PRESETS  # imports torch: slow
    from asynctp_passes.tools.demo.recipe import BACKENDS, PRECISIONS

    return {"sizes": tuple(PRESETS), "kinds": PRECISIONS, "parallel": ("sp", "tp"), "backends": BACKENDS}


def _cpu_ranks(wanted: int | None) -> int:
    ranks = 2 if wanted is None else wanted
    if ranks < 2:
        raise UsageError(f"--ranks {ranks} is not valid; it must be at least 2")
    return ranks


def _bench_ranks(wanted: int | None, end_to_end: bool) -> int:
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = found if wanted is None else wanted
    if found < 2:
        remedy = "; or add --cpu, to time a tiny model on the CPU" if end_to_end else ""
        raise UsageError(f"{found} GPUs here, it needs at least 2 of one host; 'asynctp doctor' says more{remedy}")
    if not 2 <= ranks <= min(found, 8):
        raise UsageError(f"--ranks {ranks} is not valid; it must be 2 to {min(found, 8)}")
    return ranks


def _profile(options: argparse.Namespace) -> int:
    try:
        return _read_profiles(options)
    except (profile.TraceError, OSError) as error:
        raise UsageError(f"profile: {error}") from error


def _read_profiles(options: argparse.Namespace) -> int:
    if options.timeline is not None and not can_be_written(str(options.timeline), folder=False):
        raise UsageError(f"profile: --timeline {options.timeline} is not valid; it must be a file that can be written")
    rules = [_rule(text) for text in options.rule]
    traces = [profile.read(path, rules) for path in options.traces]
    found = [summary for trace in traces for summary in _summaries(trace, options)]
    if options.json:
        print(json.dumps([summary.to_json() for summary in found], indent=2))
    elif len(traces) == 2 and len(found) == 2:
        print(profile.compare(*found))
    else:
        print("\n\n".join(map(profile.render, found)))
    if options.timeline is not None:
        files.write(options.timeline, profile.timeline(*(_panel(trace, options) for trace in traces)))
        print(f"wrote {options.timeline}", file=sys.stderr)
    return 0


def _panel(trace: profile.Trace, options: argparse.Namespace) -> profile.Panel:
    """A trace as it is drawn: of one GPU, and the layer that is asked for."""
    device = trace.devices[0] if options.device is None else options.device
    window = profile.find_annotation(trace, options.layer, device) if options.layer else None
    name = Path(trace.name).name
    return profile.Panel(trace, device, window, f"{name}, {options.layer}" if options.layer else name)


def _rule(text: str) -> profile.Rule:
    kind, equals, pattern = text.partition("=")
    if not equals or not pattern:
        raise UsageError(f"profile: --rule {text!r} is not valid; it must be KIND=REGEX, as compute=^my_kernel")
    return profile.Rule(kind, pattern, f"--rule {text}")


def _summaries(trace: profile.Trace, options: argparse.Namespace) -> list[profile.Summary]:
    """A summary of each device that is asked for, over the whole trace or one range of it."""
    wanted = trace.devices if options.device is None else (options.device,)
    if not set(wanted) <= set(trace.devices):
        raise UsageError(f"profile: --device {options.device} is not valid; {trace.name} has {_listed(trace.devices)}")
    if options.layer is None:
        return [each for each in profile.summarize(trace) if each.device in wanted]
    windows = {device: profile.find_annotation(trace, options.layer, device) for device in wanted}
    return [each for device in wanted for each in profile.summarize(trace, windows[device]) if each.device == device]


def _reasons(options: argparse.Namespace) -> int:
    if options.code is not None:
        from asynctp_passes.tools import reason_programs  # imports torch: slow
    for reason in _selected(options.code):
        print(f"{reason.code} {reason.name} ({reason.outcome})\n    {reason.text}")
        print("".join(f"    {title}: {hint}\n" for title, hint in reason.remedies().items()), end="")
    if options.code is not None and (source := reason_programs.script_of(reason.code)):
        print(f"\n{source}", end="")
    return 0


def _selected(code: str | None) -> list[Reason]:
    reasons = sorted(CATALOGUE.values(), key=lambda reason: reason.code)
    if code is None:
        return reasons
    selected = [reason for reason in reasons if code.upper() in (reason.code, reason.name)]
    if not selected:
        near = difflib.get_close_matches(code.upper(), [word for one in reasons for word in (one.code, one.name)], 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"reasons: {code!r} is no code; {hint}'asynctp reasons' lists all of them")
    return selected


def _report(options: argparse.Namespace) -> int:
    reports = _read_reports(options.file)
    if options.json:
        print(json.dumps([json.loads(report.to_json()) for report in reports], indent=2))
    else:
        print("\n\n".join(str(report) for report in reports) or f"{options.file} holds no report")
    return 0


def _read_reports(path: Path) -> list[Report]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    reports = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            reports.append(Report.from_json(line))
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"{path}:{number} is not a report ({error}); the file must be one written by report_file"
            ) from error
    return reports


if __name__ == "__main__":
    sys.exit(main())
