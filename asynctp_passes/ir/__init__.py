"""Read FX graphs, and decide nothing: facts about ops, nodes, sizes, collectives, matmuls, order of communication.

It knows no chain, and nothing of what is done to a graph.
"""
