"""Prove chains: each collective of a graph, with the matmuls that can be fused with it, or the reasons why not.

It edits nothing, and knows nothing of costs, options and other ranks.
"""
