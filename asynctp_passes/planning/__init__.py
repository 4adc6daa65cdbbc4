"""Choose what is done to a graph: which chains are fused, which collectives overlap, join, move or go.

It edits nothing, and asks no other rank.
"""
