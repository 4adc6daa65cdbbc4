"""The only place that edits graphs: it does what was planned, and refuses nothing.

It decides nothing: which chains there are, and what becomes of them, is in the `Plan`.
"""
