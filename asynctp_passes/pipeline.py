"""One graph: a report at once where nothing communicates, else the `steps`, which are imported only then."""

from __future__ import annotations

from torch import fx

from asynctp_passes.config import Config
from asynctp_passes.ir.collectives import read_collectives
from asynctp_passes.ir.order import communications
from asynctp_passes.reporting.internal import contained
from asynctp_passes.reporting.of_graph import report_of_graph
from asynctp_passes.reporting.report import Report
from asynctp_passes.reporting.strictness import raise_if_strict
from asynctp_passes.torch_private import inductor_options


def run(graph: fx.Graph, config: Config | None = None) -> Report:
    """Fuse every chain of a graph that can be proven, in place, and report on every collective.

    The graph's nodes may come in any order; if it communicates, they are sorted afterwards.

    Args:
        graph: A functional graph of aten and `_c10d_functional` ops, with fake tensors in `meta["val"]`: what
            Inductor hands to a post-grad pass, or `make_fx` under fake tensors gives.
        config: The configuration; the environment's and the defaults when None.

    Returns:
        The report. No process group need exist: sizes of groups are read from the graph.

    Raises:
        DisagreementError: asynctp failed on the graph after all ranks had agreed on something; the graph is untouched.
        StrictError: Chains were missed, or asynctp itself failed, and `config.strict` forbids it; the graph is
            untouched.
        ExpectError: Fewer chains can be fused than `config.expect`; the graph is untouched.
        TypeError: `graph` is no graph, but a GraphModule, say.
    """
    given: object = graph
    if not isinstance(given, fx.Graph):
        remedy = "of a GraphModule pass its `graph`, and call its `recompile()` afterwards"
        raise TypeError(f"asynctp: graph={type(given).__name__} is not valid; it must be an fx.Graph: {remedy}")
    config = inductor_options.obeyed(Config.given(config))
    with contained("report on a graph without collectives"):
        if not communicates(graph) and not read_collectives(graph):
            report = report_of_graph(graph, config)
            raise_if_strict(graph, report, config)
            return report
    from asynctp_passes import steps

    return steps.run(graph, config)


def communicates(graph: fx.Graph) -> bool:
    """False for a graph in which nothing communicates with other ranks; True where that cannot be found out."""
    found: list[fx.Node] | None = None
    with contained("look for collectives"):
        found = communications(graph.nodes)
    return found != []
