"""asynctp in Megatron-Core: its tensor-parallel linears, in a form that torch.compile traces.

asynctp_passes.megatron.trace_linears()
for layer in model.decoder.layers:
    layer.compile(backend="asynctp")

Megatron's linears communicate by handles (`async_op=True`), where torch.compile breaks a graph. One of their warnings
breaks it too, on rank 0 alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import layers, mappings
from torch import Tensor

_LINEARS = ("linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight")


def trace_linears() -> None:
    """Have `ColumnParallelLinear` and `RowParallelLinear` communicate without handles where torch.compile traces them.

    It holds in this process, for layers that exist as well; a second call changes nothing. Outside of compiled code
    Megatron's own functions run, as before.
    """
    for name in _LINEARS:
        linear = getattr(layers, name)
        if not hasattr(linear, "__wrapped__"):
            setattr(layers, name, _traced(linear))


def _traced(linear: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """One of Megatron's two linears: where it is traced, the regions of `mappings` communicate, and it multiplies."""

    @functools.wraps(linear)
    def call(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        *args: Any,
        tp_group: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        if torch.compiler.is_compiling():
            tp_group = parallel_state.get_tensor_model_parallel_group() if tp_group is None else tp_group
            if sequence_parallel:
                input = mappings.gather_from_sequence_parallel_region(input, group=tp_group)
            elif allreduce_dgrad:
                input = mappings.copy_to_tensor_model_parallel_region(input, group=tp_group)
            allreduce_dgrad = sequence_parallel = False
        communicates = allreduce_dgrad, sequence_parallel
        return linear(
            input, weight, bias, gradient_accumulation_fusion, *communicates, *args, tp_group=tp_group, **kwargs
        )

    return call
