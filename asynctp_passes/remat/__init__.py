"""Have a backward gather again what its forward need not keep, and keep sums where checkpointing keeps products.

joint       before torch divides a graph: mark the gathers that are worth it, tag the sums to save
partition   after that: find which of them the backward can make again (`expressible`), ask, and edit
"""
