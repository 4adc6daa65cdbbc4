"""Imported once, before ranks are forked: they have what Inductor makes in a process's first compile (see `ranks`).

Python's collector leaves alone what is there by then; to look through it took an eighth of the time of compiles.
"""

from __future__ import annotations

import functools
import tempfile
from unittest import mock

import torch
import torch._dynamo
import torch.distributed._functional_collectives
import torch.distributed.tensor.parallel.style
import torch.utils.checkpoint
from garbage import collect_rarely
from graph_builder import GraphBuilder
from interpreter import rewrite_kernels
from torch._dynamo import funcname_cache, trace_rules
from torch._dynamo.utils import counters
from unmeasured import leave_out_measurements

import asynctp_passes
from asynctp_passes.reporting import internal

_CALLED = (
    torch.distributed._functional_collectives,
    torch.distributed.tensor.parallel.style,
    torch.nn.functional,
    torch.nn.modules.activation,
    torch.nn.modules.container,
    torch.nn.modules.linear,
    torch.utils.checkpoint,
)


def _first_compile() -> None:
    """Patterns that Inductor looks for, and hashes of its sources and of Triton's: seconds. Nothing else is left."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", TORCHINDUCTOR_CACHE_DIR=folder):
        options = {"fallback_by_default": True} if "fallback_by_default" in torch._inductor.list_options() else {}
        program = torch.compile(lambda x: (x @ x).sin(), options=options)
        program(torch.ones(2, 2, requires_grad=True)).sum().backward()
    torch._dynamo.reset()
    counters.clear()


def _first_graph() -> None:
    """Patterns that names of ops are compared with, and the hash of our sources.

    The backend is not called: it leaves hooks in Dynamo.
    """
    b = GraphBuilder()
    product = b.mm(b.gather(b.input("x", [4, 8])), b.input("w", [8, 12]))
    graph = b.returns(b.scatter(b.mm(b.relu(product), b.input("v", [12, 8]))))
    assert len(asynctp_passes.run(graph, asynctp_passes.Config()).fused) == 2
    internal.versions()


def _first_trace() -> None:
    """Dynamo's lookups that processes share: rules for torch's functions, and names of functions in programs' files.

    Torch forgets the rules as soon as a process group is made, though they do not depend on groups.
    """
    rules = trace_rules.get_torch_obj_rule_map()
    trace_rules.get_torch_obj_rule_map = functools.cache(lambda: rules)
    torch.overrides.get_overridable_functions()
    for module in _CALLED:
        funcname_cache.get_funcname(module.__file__, 1)


leave_out_measurements()
_first_graph()
_first_compile()
_first_trace()
rewrite_kernels()
collect_rarely()
