"""Registering ops of the namespace `asynctp` with torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from asynctp_passes.torch_private import torch_ops

__all__ = ["register", "short_cut"]


def register(library: Any, name: str, real: Any, fake: Any, backward: Any, setup_context: Any = None) -> None:
    """Give an op of the namespace its kernels: `real` on CPU and CUDA, `fake`, and a gradient. Unused calls stay.

    `backward` and `setup_context` are those of `torch.library.register_autograd`, which is what all tensors but CUDA's
    go through. With CUDA's, `real` is called at once when there is nothing to differentiate: 20 us less a call.
    """
    for key in ("CPU", "CUDA"):
        library.impl(name, real, key)
    torch.library.register_fake(f"asynctp::{name}", fake, lib=library)
    torch.library.register_autograd(f"asynctp::{name}", backward, setup_context=setup_context, lib=library)
    op = getattr(torch.ops.asynctp, name).default
    torch_ops.keep_unused(op)
    generic = torch_ops.autograd_kernel(op, backward, setup_context)
    library.impl(name, short_cut(real, generic), "AutogradCUDA", with_keyset=True)


def short_cut(real: Callable[..., Any], generic: Callable[..., Any]) -> Callable[..., Any]:
    """The autograd kernel that calls `real` where `generic`, torch.library's, would do nothing but dispatch to it."""

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if torch_ops.goes_to_backend(keyset) and not (torch.is_grad_enabled() and torch_ops.any_requires_grad(*args)):
            return real(*args, **kwargs)
        return generic(keyset, *args, **kwargs)

    return kernel
