"""Enqueue work on a GPU, or on CPU processes that stand for one: driver, memory of a group, streams and the watch.

It knows no collective and no matmul.
"""
