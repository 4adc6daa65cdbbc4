"""Run on a GPU, or on processes in its place: driver, memory of a group, streams, recordings, and the watch.

It knows no collective and no matmul.
"""
