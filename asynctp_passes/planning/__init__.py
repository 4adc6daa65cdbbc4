"""Choose what is done to a graph: which chains are fused, which collectives overlap, become one, move or are erased.

It edits nothing, and asks no other rank.
"""
