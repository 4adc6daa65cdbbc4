"""asynctp in vLLM: passes that its configuration names.

--compilation-config.inductor_passes.post_grad_custom_post_pass  asynctp_passes.vllm.asynctp
--compilation-config.inductor_passes.joint_custom_post_pass      asynctp_passes.vllm.asynctp_joint
--compilation-config.inductor_compile_config                     '{"shape_padding": false}'

The first fuses. The second notes the order of the program's collectives for it. Options of `Config` come from
`ASYNCTP_*` variables of the process that reads vLLM's configuration; they travel with it to all workers. So does
`invariant="batch"`, where `VLLM_BATCH_INVARIANT` is set there, and `ASYNCTP_INVARIANT` is not.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import uuid
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from vllm import envs
from vllm.compilation.passes.inductor_pass import InductorPass, get_pass_context
from vllm.distributed import parallel_state
from vllm.logger import init_logger

from asynctp_passes.backend import AsyncTPPass, RematerializePass
from asynctp_passes.config import Config
from asynctp_passes.errors import StrictError
from asynctp_passes.ir.nodes import called_name
from asynctp_passes.ir.registry import register_collective, register_matmul
from asynctp_passes.torch_private import dynamo, inductor_options, process_groups, triton_kernels

log = init_logger("vllm.asynctp")  # below vLLM's own logger, which shows what its workers say

_TAKEN = ("flashinfer_trtllm_fused_allreduce_norm", "rocm_aiter_fused_allreduce_rmsnorm")
"""Ops that vLLM's `fuse_allreduce_rms` puts in the place of all-reduces; or how their names begin."""


def register_ops() -> Mapping[str, str]:
    """Let asynctp understand vLLM's collectives and own matmuls, with all groups that vLLM has by now.

    The passes call it each time: groups may come later, as those of a second engine in the process.

    Returns:
        torch's names of the groups, by vLLM's (`{"tp:0": "3"}`). Groups without a name of torch's are left out: asynctp
        reports their collectives as `ATP113`.

    Raises:
        RegistryError: An op, or the kernel, has other arguments than those of vLLM 0.32 and 0.33.
    """
    groups, ops = _groups(), torch.ops.vllm
    common: dict[str, Any] = {"input": "tensor", "group": "group_name", "groups": groups}
    for kind in ("all_gather", "reduce_scatter"):
        register_collective(getattr(ops, kind), kind=kind, dim="dim", size="world_size", **common)
    register_collective(ops.all_reduce, kind="all_reduce", **common)
    if hasattr(ops, "bmm_fp8"):  # FlashInfer's
        register_matmul(ops.bmm_fp8, a="A", b="B", a_scale="A_scale", b_scale="B_scale")
    if hasattr(torch.ops._C, "cutlass_scaled_mm"):
        op = torch.ops._C.cutlass_scaled_mm
        register_matmul(op, a="a", b="b", bias="bias", a_scale="a_scales", b_scale="b_scales", out="out")
    if (kernel := _invariant_matmul()) is not None:
        strides = {"a": ("stride_am", "stride_ak"), "b": ("stride_bk", "stride_bn"), "out": ("stride_cm", "stride_cn")}
        constants = dict.fromkeys(triton_kernels.constants_named_by(kernel), ...)
        numbers: dict[str, Any] = {"sizes": ("M", "N", "K"), "strides": strides, "constants": constants}
        register_matmul(kernel, a="a_ptr", b="b_ptr", bias="bias_ptr", out="c_ptr", **numbers)
    return groups


def _invariant_matmul() -> Any:
    """The Triton kernel that makes vLLM's unquantized linears under `VLLM_BATCH_INVARIANT`; None without either."""
    if not getattr(envs, "VLLM_BATCH_INVARIANT", False):
        return None
    try:
        from vllm.model_executor.determinism import batch_invariant
    except ImportError:
        return None
    return triton_kernels.compiled(getattr(batch_invariant, "matmul_kernel_persistent", None))


def _groups() -> dict[str, str]:
    """torch's names of vLLM's live groups, by vLLM's."""
    known = process_groups.names()
    live = {name: found for name, group in parallel_state._groups.items() if (found := group()) is not None}
    names = {name: process_groups.group_name_of(group.device_group) for name, group in live.items()}
    return {name: given for name, given in names.items() if given in known}


class _Pass(InductorPass):  # type: ignore[misc]
    """A pass of asynctp's, as vLLM wants one: its key is a string. It can be copied and pickled."""

    def __init__(self, ours: AsyncTPPass | RematerializePass) -> None:
        self._ours = ours

    def uuid(self) -> str:
        """The key of asynctp's pass; one that no cache has where that cannot be found out."""
        register_ops()
        key = self._ours.uuid()
        return f"{type(self._ours).__name__} {uuid.uuid4() if key is None else key.decode()}"


class _Fuse(_Pass):
    """Fuse, and log how many chains were."""

    _ours: AsyncTPPass

    def __call__(self, graph: fx.Graph) -> None:
        """Fuse the chains of a graph, in place.

        Raises:
            StrictError: As `Config.strict` asks; all-reduces that vLLM's `fuse_allreduce_rms` took are missed.
            AsyncTPError: As `AsyncTPPass` raises it.
        """
        register_ops()
        taken = _taken(graph)
        try:
            report = self._ours(graph)
        except StrictError as error:
            if taken:
                raise StrictError(f"{taken}\n{error}", error.report) from error
            raise
        if taken:
            log.warning("%s", taken)
        if report.remarks:
            log.info("asynctp: %s (%s%s): %s", report.graph, report.phase, _tokens(), report.totals)


class _Joint(_Pass):
    """Note the order of the program's collectives."""

    _ours: RematerializePass

    def __call__(self, graph: fx.Graph) -> None:
        """Note the order of a joint graph's collectives; tag what its backward shall make again.

        Raises:
            AsyncTPError: As `RematerializePass` raises it.
        """
        register_ops()
        if inductor_options.current("shape_padding"):
            _warn_of_padding()
        self._ours(graph)


def _tokens() -> str:
    """The batches that vLLM compiles for, in words; empty where it compiles once for all."""
    try:
        sizes = get_pass_context().compile_range
    except AssertionError:  # vLLM's pass manager is not there, as on CPUs
        return ""
    return f", {sizes.start} to {sizes.end} tokens"


@functools.cache
def _warn_of_padding() -> None:
    log.warning(
        "asynctp: Inductor's shape_padding is on. Each rank times for itself whether to pad a matmul, and a chain is "
        'fused on all ranks or on none. Remedy: "inductor_compile_config": {"shape_padding": false}'
    )


def _taken(graph: fx.Graph) -> str:
    """A message about all-reduces that vLLM took before asynctp could; empty without such."""
    count = sum(called_name(node).removeprefix("vllm.").startswith(_TAKEN) for node in graph.nodes)
    if not count:
        return ""
    place = f"{dynamo.compile_name()}{_tokens()}"
    return (
        f"asynctp: vLLM's fuse_allreduce_rms took {count} all-reduces of {place} before asynctp. Remedy: "
        '"pass_config": {"fuse_allreduce_rms": false}; or ASYNCTP_STRICT=off, which leaves these batches to vLLM'
    )


def _config() -> Config:
    """The environment's configuration, batch-invariant where vLLM is to be, unless it says otherwise."""
    config = Config.given(None)
    obeys = config.invariant == "auto" and getattr(envs, "VLLM_BATCH_INVARIANT", False)
    return dataclasses.replace(config, invariant="batch") if obeys else config


asynctp = _Fuse(AsyncTPPass(_config()))
asynctp_joint = _Joint(RematerializePass(_config()))

# vLLM looks up "asynctp_passes.vllm.asynctp" as __import__("asynctp_passes.vllm").__dict__["asynctp"]. An import by a
# dotted name returns the package at its left, so the package has to have the name.
vars(sys.modules[__package__]).update(asynctp=asynctp, asynctp_joint=asynctp_joint)
