"""Let what orders streams wait for no more than it has to: torch's `control_deps` names all nodes that come before.

    control_deps((mm, reduce_scatter, wait), ...)     becomes     control_deps((wait,), ...)

It waits for `mm` by `wait` anyway. So `mm` has no other user than the collective, and may become a part of a fused op.
"""

from __future__ import annotations

from torch import fx

from asynctp_passes.ir.nodes import orders_streams
from asynctp_passes.torch_private import torch_ops


def name_last_only(graph: fx.Graph) -> None:
    """Leave out what another of the nodes takes that an op which orders streams is to come after."""
    for node in graph.nodes:
        if node.op != "call_function" or torch_ops.is_op(node.target) or not orders_streams(node):
            continue
        before = node.args[0]
        if isinstance(before, tuple):
            named = {*before}
            last = tuple(one for one in before if not (isinstance(one, fx.Node) and named & {*one.users}))
            node.args = (last, *node.args[1:])
