"""A kernel launch of Triton's, made again with other addresses: the driver's host time and little more.

Triton's launcher inspects every argument of every call, and encodes every TMA descriptor. The calls of one plan differ
in addresses only. So a launch is recorded once, in a CUDA graph that never runs: the driver gives back the function,
its grid, and the bytes of each parameter. An address is found among them by what it was in the recording. Of Triton's
layout this knows one thing: a descriptor is a parameter of 128 bytes, and these are in the order of the arguments.

One launch at a time: as all of a group's calls, those of a plan come one after the other.

Source: CUDA Driver API, "Graph Management" (cuGraphKernelNodeGetParams: the parameters are the caller's to read while
the node lives), "Execution Control" (cuFuncGetParamInfo, of CUDA 12.4; cuLaunchKernel), "Tensor Map Object Management".
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from . import driver
from .driver import CudaError

_MAP_BYTES = 128
_NON_BLOCKING, _RELAXED = 1, 2
_INVALID_VALUE = 1
_MARK = 0x5A5A << 40  # no address of a GPU; with an argument's number in it, the place where that argument goes


class _Node(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("params", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class Replay:
    """`run(*values, *constants, stream=stream)`, where only addresses differ from `args`.

    Args:
        run: Triton's compiled kernel for one grid.
        args: Example arguments: a tensor or descriptor where calls have addresses, else what all calls have.
        constants: What follows them.

    Raises:
        CudaError: The driver is too old for this, or the kernel takes its parameters in a way that this cannot read.
    """

    def __init__(self, run: Callable[..., None], args: Sequence[Any], constants: Sequence[Any]) -> None:
        pointers = {_MARK | number << 8: number for number, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
        marked = [_MARK | number << 8 if isinstance(arg, torch.Tensor) else arg for number, arg in enumerate(args)]
        self._owner = run  # of the function's module
        with _recorded(lambda stream: run(*marked, *constants, stream=stream)) as node:
            self._function = node.function
            params = [ctypes.string_at(node.params[i], size) for i, size in enumerate(_sizes(self._function))]
            self._shape = (*node.grid, *node.block, node.shared)
        # TMA's maps are to be aligned by 64 bytes; every parameter is, which keeps this simple
        starts = [0]
        for param in params:
            starts.append(starts[-1] + -(-len(param) // 64) * 64)
        self._memory = ctypes.create_string_buffer(starts[-1] + 64)
        base = -(-ctypes.addressof(self._memory) // 64) * 64
        places = [base + start for start in starts[:-1]]
        for place, param in zip(places, params, strict=True):
            ctypes.memmove(place, param, len(param))
        self._table = (ctypes.c_void_p * len(places))(*places)
        self._pointers = [
            (ctypes.c_uint64.from_address(place), pointers.pop(mark))
            for place, param in zip(places, params, strict=True)
            if len(param) == 8 and (mark := int.from_bytes(param, "little")) in pointers
        ]
        maps = [place for place, param in zip(places, params, strict=True) if len(param) == _MAP_BYTES]
        described = [number for number, arg in enumerate(args) if isinstance(arg, TensorDescriptor)]
        if pointers or len(maps) != len(described):
            raise CudaError(f"{len(pointers)} of a kernel's addresses, or its descriptors, were not found again")
        self._maps = [
            [place, number, args[number].base.data_ptr()] for place, number in zip(maps, described, strict=True)
        ]

    def __call__(self, stream: int, values: Sequence[Any]) -> None:
        """Launch with these arguments: addresses as integers, descriptors as `launch.Tma`."""
        for slot, number in self._pointers:
            slot.value = values[number]
        for entry in self._maps:
            place, number, last = entry
            address = values[number].address
            if address != last:
                _replace_address(place, address)
                entry[2] = address
        _launch(self._function, *self._shape, stream, self._table, None)


_u32, _ref = ctypes.c_uint, ctypes.c_void_p
_launch = driver._function("cuLaunchKernel", _ref, *[_u32] * 7, _ref, _ref, _ref)
_replace_address = driver._function("cuTensorMapReplaceAddress", _ref, _ref)


@contextlib.contextmanager
def _recorded(launch: Callable[[int], None]) -> Iterator[_Node]:
    """The kernel node of the graph that `launch(stream)` makes; its parameters can be read inside."""
    stream, graph, node = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    count, found = ctypes.c_size_t(1), _Node()
    with contextlib.ExitStack() as undo:
        mode = ctypes.c_int(_RELAXED)  # of this thread, so that a capture of the program's is not disturbed
        driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        undo.callback(driver.call, "cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        driver.call("cuStreamCreate", ctypes.byref(stream), _u32(_NON_BLOCKING))
        undo.callback(driver.call, "cuStreamDestroy_v2", stream)
        driver.call("cuStreamBeginCapture_v2", stream, _u32(_RELAXED))
        try:
            launch(stream.value or 0)
        finally:
            driver.call("cuStreamEndCapture", stream, ctypes.byref(graph))
            undo.callback(driver.call, "cuGraphDestroy", graph)
        driver.call("cuGraphGetNodes", graph, ctypes.byref(node), ctypes.byref(count))
        driver.call("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(found))
        if not found.params or not found.function:
            raise CudaError("a kernel's parameters come in one piece, or it has no function")
        yield found


def _sizes(function: int) -> list[int]:
    """Bytes of each parameter of a kernel."""
    library = driver.library()
    if not hasattr(library, "cuFuncGetParamInfo"):
        raise CudaError("cuFuncGetParamInfo is of CUDA 12.4 and later")
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while True:
        code = library.cuFuncGetParamInfo(
            _ref(function), ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)
        )
        if code == _INVALID_VALUE:
            return sizes
        driver.check("cuFuncGetParamInfo", code)
        sizes.append(size.value)
