"""Schemas of the six fused ops."""

from __future__ import annotations

__all__ = ["OPS", "OPTIONAL"]

OPS = {
    "all_gather_matmul": (
        "(Tensor a_shard, Tensor[] bs, Tensor?[] biases, int gather_dim, bool return_a_full, int group_size, "
        "Any group_name, bool? all_keep=None) -> Tensor[]"
    ),
    "all_gather_scaled_matmul": (
        "(Tensor a_shard, Tensor a_scale, Tensor[] bs, Tensor[] b_scales, Tensor?[] biases, int gather_dim, "
        "bool gather_a_scale, ScalarType out_dtype, bool use_fast_accum, bool return_a_full, int group_size, "
        "Any group_name, Tensor? along_shard=None, bool? all_keep=None) -> Tensor[]"
    ),
    "matmul_reduce_scatter": (
        "(Tensor[] a_parts, Tensor[] b_parts, Tensor?[] biases, str reduce_op, int scatter_dim, int group_size, "
        "Any group_name, ScalarType? sum_dtype=None, Tensor? added=None, float[]? factors=None) -> Tensor"
    ),
    "scaled_matmul_reduce_scatter": (
        "(Tensor[] a_parts, Tensor[] b_parts, Tensor[] a_scales, Tensor[] b_scales, Tensor?[] biases, "
        "str reduce_op, int scatter_dim, ScalarType out_dtype, bool use_fast_accum, int group_size, "
        "Any group_name, ScalarType? sum_dtype=None, Tensor? added=None, float[]? factors=None) -> Tensor"
    ),
    "matmul_all_reduce": (
        "(Tensor[] a_parts, Tensor[] b_parts, Tensor?[] biases, str reduce_op, Any group_name, "
        "ScalarType? sum_dtype=None, Tensor? added=None, float[]? factors=None) -> Tensor"
    ),
    "scaled_matmul_all_reduce": (
        "(Tensor[] a_parts, Tensor[] b_parts, Tensor[] a_scales, Tensor[] b_scales, Tensor?[] biases, "
        "str reduce_op, ScalarType out_dtype, bool use_fast_accum, Any group_name, ScalarType? sum_dtype=None, "
        "Tensor? added=None, float[]? factors=None) -> Tensor"
    ),
}
OPTIONAL = ("sum_dtype", "added", "factors")
"""The last arguments of the ops that reduce."""
