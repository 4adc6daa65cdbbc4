"""Edit graphs: do what was planned, and refuse nothing.

It decides nothing: which chains there are, and what becomes of them, is in the `Plan`.
"""
