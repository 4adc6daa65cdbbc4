"""Read FX graphs, and decide nothing: nodes, sizes, collectives, matmuls, and the order of what communicates.

It knows no chain, and nothing of what is done to a graph.
"""
