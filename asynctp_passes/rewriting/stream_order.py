"""Let what orders streams wait for no more than it has to: torch's `control_deps` names all nodes that come before.

    control_deps((mm, reduce_scatter, wait), ...)     becomes     control_deps((wait,), ...)

It waits for `mm` by `wait` anyway. So `mm` has no other user than the collective, and may become a part of a fused op.
"""

from __future__ import annotations

from torch import fx

from asynctp_passes.ir.nodes import hands_on_in_order
from asynctp_passes.torch_private import torch_ops


def name_last_only(graph: fx.Graph) -> None:
    """Leave out, of the nodes that an op which orders streams comes after, those that another of them takes."""
    for node in graph.nodes:
        if not hands_on_in_order(node):
            continue
        before: tuple[fx.Node, ...] = node.args[0]
        computed = {one for one in before if torch_ops.is_op(one.target)}  # no record of an event, which makes nothing
        last = tuple(one for one in before if one not in computed or computed.isdisjoint(one.users))
        node.args = (last, *node.args[1:])
