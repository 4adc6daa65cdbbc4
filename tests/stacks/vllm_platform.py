"""A platform of vLLM's, by its plug-in for platforms: a CPU that does as its CUDA platform where that needs no GPU."""

from __future__ import annotations

from typing import Any

from vllm.platforms.interface import Platform, PlatformEnum

_COMMUNICATORS = "vllm.distributed.device_communicators.base_device_communicator"


def cpu() -> str:
    """The entry point."""
    return f"{__name__}.Cpu"


class Cpu(Platform):
    """A CPU that calls vLLM's collectives as ops, and has the ops of vLLM's CUDA library, without kernels."""

    _enum = PlatformEnum.OOT
    device_name = device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"

    @classmethod
    def use_custom_op_collectives(cls) -> bool:
        return True

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return f"{_COMMUNICATORS}.DeviceCommunicatorBase"

    @classmethod
    def check_and_update_config(cls, config: Any) -> None:
        pass

    @classmethod
    def import_kernels(cls) -> None:
        import vllm._C_stable_libtorch  # noqa: F401
