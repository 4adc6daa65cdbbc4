"""Private names of torch, a module for each area: nothing else in the package uses any, and a new torch touches these.

Where versions of torch differ (2.11 to 2.15), a branch asks for the feature, and says which version lacks it.
"""
