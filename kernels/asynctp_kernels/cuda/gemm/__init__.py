"""Kernels, and how they are compiled: the persistent GEMM in two forms, copies and reductions, and cuBLAS.

It knows no plan.
"""
