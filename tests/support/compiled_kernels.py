"""Compile kernels for compute capability 9 without a GPU, and read their PTX. See `test_compiled_kernels`."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from asynctp_kernels.cuda.choose.tiles import Tiles
from asynctp_kernels.cuda.gemm import own_matmul
from asynctp_kernels.cuda.gemm.arguments import Matrices
from asynctp_kernels.cuda.runtime.launch import (
    BESIDE_REGISTERS,
    BESIDE_SHARED,
    BESIDE_WARPS,
    FUSION,
    Launch,
    fit_together,
)
from asynctp_kernels.signals import IS_INTERPRETED
from cuda_stubs import FP8, Machine, Prepared, gather_call, machine


def missing() -> str:
    """Why nothing can be compiled here; empty when it can."""
    if IS_INTERPRETED:
        return "Triton interprets in this process (TRITON_INTERPRET=1)"
    import triton

    for tool in ("ptxas", "cuobjdump"):
        try:
            getattr(triton.knobs.nvidia, tool)
        except (RuntimeError, AttributeError) as error:
            return f"no {tool}: {error}"
    return ""


MOST_SHARED = 227 << 10  # bytes that one CTA may have (CUDA C++ Programming Guide, compute capability 9.0)
FP8_WIDE = torch.float8_e5m2
TYPES = {torch.bfloat16: "bf16", torch.float16: "f16", FP8: "e4m3", FP8_WIDE: "e5m2"}


class NamedDevice:
    """What Triton asks of a driver before it compiles."""

    def get_current_device(self) -> str:
        return "a device of compute capability 9"

    def get_current_stream(self, device: Any) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.fixture(autouse=True)
def _sm90() -> Iterator[None]:
    from triton.runtime import driver

    before = driver._active
    driver.set_active(NamedDevice())
    yield
    driver.set_active(before)


@dataclass(frozen=True)
class Compiled:
    """A kernel as it would be loaded. `stack`: bytes a thread, which is where spilled registers go."""

    ptx: Ptx
    ttgir: str
    threads: int
    registers: int
    stack: int
    shared: int

    @property
    def launch(self) -> Launch:
        """As `fit_together` looks at it."""
        return Launch(lambda stream, values: None, self.threads, self.registers, self.shared)


def compiled(prepared: Prepared, folder: Path) -> Compiled:
    """What `launch.prepare` would have compiled."""
    options = {**prepared.constants, **prepared.options, **FUSION, "num_warps": prepared.num_warps}
    kernel = prepared.kernel.warmup(*prepared.args, grid=(prepared.programs, 1, 1), **options)
    kernel = kernel.result() if hasattr(kernel, "result") else kernel
    registers, stack = resources(kernel.asm["cubin"], folder)
    threads = 32 * kernel.metadata.num_warps  # more than asked for where warps have tasks of their own
    return Compiled(Ptx(kernel.asm["ptx"]), kernel.asm["ttgir"], threads, registers, stack, kernel.metadata.shared)


def resources(cubin: bytes, folder: Path) -> tuple[int, int]:
    """(registers, bytes of stack) of a thread."""
    import triton

    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


_INSTRUCTION = re.compile(r"(?:@!?(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_REGISTER = re.compile(r"%(?:r|rd|rs|p|f|fd)\d+\b")
_NO_RESULT = ("st.", "red.", "bar.", "bra", "cp.", "fence", "mbarrier.", "stmatrix", "ret", "membar", "griddepcontrol")
TMA_LOAD, TMA_STORE = "cp.async.bulk.tensor.%dd.shared::", "cp.async.bulk.tensor.3d.global.shared::cta"


@dataclass(frozen=True)
class Instruction:
    """`asm`: the number of the inline assembly that it is in."""

    op: str
    operands: str
    predicate: str | None
    asm: int | None

    @property
    def has_result(self) -> bool:
        return not self.op.startswith(_NO_RESULT)

    @property
    def writes(self) -> set[str]:
        if not self.has_result:
            return set()
        first = re.match(r"\{[^}]*\}|[^,]*", self.operands)
        return set(_REGISTER.findall(first[0])) if first else set()

    @property
    def reads(self) -> set[str]:
        found = _REGISTER.findall(self.operands)
        return set(found if not self.has_result else found[len(self.writes) :]) | ({self.predicate} - {None})


class Ptx:
    """The instructions of one kernel, in the order of the text, and what a register's value comes from."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.instructions = list(self._parse())

    def _parse(self) -> Iterator[Instruction]:
        asm, inside = -1, False
        for line in self.text.splitlines():
            if "begin inline asm" in line:
                asm, inside = asm + 1, True
            elif "end inline asm" in line:
                inside = False
            for part in line.split("//")[0].split(";"):
                found = _INSTRUCTION.fullmatch(part.strip().removeprefix("{ "))
                if found:
                    yield Instruction(found[2], found[3], found[1], asm if inside else None)

    def find(self, start: str) -> list[Instruction]:
        """Instructions whose name starts so."""
        return [instruction for instruction in self.instructions if instruction.op.startswith(start)]

    def inside(self, asm: int) -> list[str]:
        """The instructions of one inline assembly, in words."""
        return [f"{each.op} {each.operands}" for each in self.instructions if each.asm == asm]

    def assemblies(self, op: str) -> set[int]:
        """Which inline assemblies have an instruction of that name."""
        return {instruction.asm for instruction in self.find(op) if instruction.asm is not None}

    @cached_property
    def _sources(self) -> dict[str, list[Instruction]]:
        sources: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for register in instruction.writes:
                sources.setdefault(register, []).append(instruction)
        return sources

    def origins(self, registers: Iterable[str]) -> set[int]:
        """The inline assemblies that these registers' values come from, at any distance."""
        seen, left, found = set(), list(registers), set()
        while left:
            register = left.pop()
            if register in seen:
                continue
            seen.add(register)
            for source in self._sources.get(register, ()):
                found |= {source.asm} - {None}
                left += source.reads
        return found


def in_order(instructions: Iterable[str], *wanted: str) -> bool:
    """Whether instructions with these beginnings occur in this order."""
    rest = iter(instructions)
    return all(any(each.startswith(start) for each in rest) for start in wanted)


WAIT = ("ld.acquire.sys.global.s32", "bar.sync", "fence.proxy.async")
PUBLISH = ("cp.async.bulk.wait_group 0", "bar.sync", "fence.proxy.async", "red.release.gpu.global.add")


def waits(ptx: Ptx) -> set[int]:
    """The inline assemblies of `await_word`; each acquires, then joins the threads, then orders TMA behind that.

    All threads skip all of that together, and only where there is something to know.
    """
    found = ptx.assemblies("ld.acquire")
    for asm in found:
        assert in_order(ptx.inside(asm), *WAIT)
    assert len(_KNOWN.findall(without_lines(ptx))) == len(found)
    return found


def without_lines(ptx: Ptx) -> str:
    """The text without the numbers of the source's lines."""
    return re.sub(r"\t\.loc\b.*\n", "", ptx.text)


#: `bra.uni` where what is known is not 0, over the wait and the fence
_KNOWN = re.compile(
    r"setp\.ne\.s32 q, %r\d+, 0;\s*@q bra\.uni KNOWN;(?:(?!KNOWN).)*fence\.proxy\.async;\s*KNOWN:", re.DOTALL
)


def late_loads(ptx: Ptx, loads: Iterable[Instruction], registers: Callable[[Instruction], set[str]]) -> list[str]:
    """The loads whose address does not come from a wait: these could be made before it."""
    found = waits(ptx)
    return [load.operands for load in loads if not ptx.origins(registers(load)) & found]


def block_coordinate(load: Instruction) -> set[str]:
    """The registers of a 3-D TMA access's slowest coordinate: the block of rows."""
    coordinates = re.search(r"\{([^}]*)\}", load.operands)
    assert coordinates is not None
    return set(_REGISTER.findall(coordinates[1].split(",")[2]))


#: all of `publish`: 0 skips the rest, and one thread adds the same number
_PUBLISHED = re.compile(
    r"setp\.eq\.s32 q, (%r\d+), 0;\s*@q bra\.uni NOTHING;\s*cp\.async\.bulk\.wait_group 0;\s*bar\.sync 0;\s*"
    r"mov\.u32 t, %tid\.x; setp\.eq\.u32 p, t, 0;\s*@p fence\.proxy\.async;\s*"
    r"@p red\.release\.gpu\.global\.add\.u32 \[%rd\d+\], \1;\s*NOTHING:"
)
#: `prefetch`, where the mask is true
_PREFETCHED = re.compile(r"setp\.ne\.s32 p, %r\d+, 0;\s*@p prefetch\.global\.L1 \[%rd\d+\];")


def check_publishing(ptx: Ptx, variant: Variant) -> None:
    """A tile is stored in so many parts, and published later: among products of a next one, or behind all.

    Or at once, where products are scaled before they are added.
    """
    text = without_lines(ptx)
    assert len(_PUBLISHED.findall(text)) == len(ptx.find("red.")) > 0
    assert len(_PREFETCHED.findall(text)) == len(ptx.find("prefetch."))
    letters = {"bra": "b", TMA_STORE: "s", "cp.async.bulk.commit_group": "c", "red.release": "p"}
    order = "".join(
        next((letter for start, letter in letters.items() if each.op.startswith(start)), "")
        for each in ptx.instructions
    )
    stored = "sc" * variant.tiles.split
    if len(variant.options.get("ks", "-")) > 1 and "scales" in variant.options:
        assert re.fullmatch(f"(b|{stored}bp)+", order), "the branch is for a tile that is not the last of its chunk"
        return
    assert re.fullmatch(f"(b|{stored}|bp)+", order)
    assert stored in order
    assert order.count("p") == 2
    assert order.endswith("p")


def epilogues(ptx: Ptx) -> list[list[str]]:
    """What orders the writes of a tile to shared memory before its TMA store, for each such store."""
    names = {"fence.proxy.async": "fence", "bar.sync": "join", TMA_STORE: "store"}
    found, current = [], []
    for instruction in ptx.instructions:
        current += [name for start, name in names.items() if instruction.op.startswith(start)]
        if instruction.op.startswith(TMA_STORE):
            found.append(current)
        if instruction.op.startswith(("wgmma.wait_group", TMA_STORE)):
            current = []
    return found


@dataclass(frozen=True)
class Variant:
    """A GEMM as a plan compiles it. `stack`: the bytes that it may spill, at most, of any Triton from 3.6 to 3.9."""

    options: dict[str, Any]
    tiles: Tiles
    stack: int = 0

    @property
    def types(self) -> str:
        dtype = self.options.get("dtype", torch.bfloat16)
        return f"{TYPES[dtype]}.{TYPES[self.options.get('b_dtype', dtype)]}"

    @property
    def plain(self) -> bool:
        """Nothing is loaded but operands."""
        return not self.options.get("bias") and not self.options.get("scales")


ROWWISE = {"dtype": FP8, "scales": "row"}
TENSORWISE = {"dtype": FP8, "scales": "tensor"}


MANY = (512, 128, 128, 264)


def small_and_gemm(here: Machine, folder: Path) -> tuple[Compiled, Compiled]:
    """The two kernels of the plan just made: what stages, keeps or reduces, and the GEMM."""
    small, gemm = here.prepared
    assert (small.name, gemm.name) in {
        (name, "gemm_kernel") for name in ("stage_kernel", "keep_kernel", "reduce_kernel")
    }
    return compiled(small, folder), compiled(gemm, folder)


def check_room(gemm: Compiled, small: Compiled) -> None:
    """One CTA of each fits on an SM; the arithmetic of `fit_together`, spelled out, and its own word."""
    registers = sum(-(-kernel.registers // 8) * 8 * kernel.threads for kernel in (gemm, small))
    assert registers <= 65536
    assert gemm.shared + small.shared + 2 * 1024 <= 228 * 1024
    assert fit_together(gemm.launch, small.launch)
    assert small.shared <= BESIDE_SHARED
    assert small.threads * small.registers <= 32 * BESIDE_WARPS * BESIDE_REGISTERS


def async_input_gemm(rows: int, ns: tuple[int, ...], k_major: bool) -> Prepared:
    call = gather_call((rows,), 512, ns, k_major=k_major)
    outs = [call.a_shard.new_empty(rows, n) for n in ns]
    with machine() as here:
        own_matmul.WholeGemm(Matrices(call.a_shard, call.bs, outs), chunks=8)
        (prepared,) = here.prepared
    return prepared


def loaded(source: str, folder: Path) -> ModuleType:
    """A module of kernels, of other source than the package's."""
    path = folder / "changed.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("asynctp_kernels.cuda.changed", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
