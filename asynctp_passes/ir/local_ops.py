"""Ops that communicate with no other rank, and ops that surely do, by the names of their schemas. Facts, nothing else.

A name is `namespace::name`, or `namespace::beginning*`. torch marks no op as communicating, so what is neither here nor
registered may communicate (`registry.promise_of`). An op whose library may let it communicate is left out on purpose.
"""

from __future__ import annotations

__all__ = ["COMMUNICATING", "LIBRARIES", "RUNNERS", "TORCH"]

COMMUNICATING = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor", "symm_mem")
"""torch's namespaces whose ops communicate, but for those that `TORCH` names."""

TORCH = (
    # math on this rank's tensors: eager's ops, quantized ones, those of CPU libraries, of random numbers, of pictures
    "aten::*", "prims::*", "_native::*", "rngprims::*", "quantized::*", "_quantized::*", "quantization::*",
    "quantized_decomposed::*", "sparse::*", "mkl::*", "mkldnn::*", "mkldnn_prepacked::*", "onednn::*", "onnx::*",
    "flex_lib::*", "torchvision::*",
    # memory and bookkeeping of Inductor and of eager
    "inductor::*", "inductor_prims::*", "_inductor_test::*", "profiler::*", "debug_mode_ops::*", "export::*",
    # order among the streams of this rank, and FSDP's copies before and after its collectives
    "streams::*", "fsdp::*",
    # waits for what this rank has started, and what looks at a group or a tensor only
    "_c10d_functional::wait_tensor", "_c10d_functional::wait_tensors", "_c10d_functional::_wrap_tensor_autograd",
    "c10d_functional::wait_tensor", "c10d::check_for_nan", "_dtensor::mesh_get_process_group",
)  # fmt: skip
"""torch's ops that communicate with no other rank."""

LIBRARIES = (
    # flash-attention 2, 3 (which xformers and vLLM build under names of their own too), and mamba
    "flash_attn::*", "flash_attn_3::*", "_vllm_fa2_C::*", "_vllm_fa3_C::*", "xformers_flash::*", "xformers_flash3::*",
    "mamba_ssm::*",
    # xformers; not xformers_python, whose fused linears communicate
    "xformers::efficient_attention*", "xformers::fmha_merge_attentions*", "xformers::merge_attentions*",
    "xformers::_cusplt_mm", "xformers::sparse24*",
    # torchao: casts, matmuls and layouts; a namespace that also gets dispatch of tokens is not listed as a whole
    "torchao::triton_*", "torchao::_triton_*", "torchao::cutedsl_*", "torchao::mxfp8_quantize_*",
    "torchao::mx_fp8_bf16", "torchao::choose_qparams_affine*", "torchao::_choose_qparams_affine*",
    "torchao::quantize_affine*",
    "torchao::_quantize_affine*", "torchao::dequantize_affine*", "torchao::_dequantize_affine*",
    "torchao::_choose_scale_float8*", "torchao::quantize_affine_float8*", "torchao::blockwise_scaled_mm",
    "torchao::rowwise_scaled_linear_*", "torchao::to_sparse_semi_structured_*", "torchao::int_scaled_matmul",
    "torchao::scaled_int8_mm", "torchao::float8_linear_*", "torchao::da8w4_linear_*", "torchao::qscaled_dot_product",
    "torchao::_scaled_embedding_bag", "torchao::_fill_indices_wrapper", "float8_sparse::fp8_sparse_mm",
    "ao::blockwise_fp8_gemm", "ao::mslk_*",
    # FBGEMM's quantized matmuls; its car_* and nccl_* ops communicate
    "fbgemm::f8f8bf16*", "fbgemm::quantize_fp8_*",
    # vLLM. Not its whole `_C`: minimax_allreduce_rms* and, on CPUs, shm_* communicate. Nor `vllm::unified_attention*`
    # and `vllm::moe_forward*`: under context and expert parallelism they communicate inside.
    "_C::rms_norm*", "_C::fused_add_rms_norm*", "_C::fused_qk_norm_rope*", "_C::rotary_embedding*", "_C::silu_and_mul*",
    "_C::mul_and_silu*", "_C::gelu_*", "_C::fatrelu_and_mul*", "_C::swigluoai_and_mul*", "_C::static_scaled_*",
    "_C::dynamic_scaled_*", "_C::dynamic_per_token_scaled_*", "_C::per_token_group_*", "_C::scaled_fp4_*",
    "_C::cutlass_*", "_C::machete_*", "_C::marlin_*", "_C::gptq_*", "_C::awq_*", "_C::allspark_*", "_C::ggml_*",
    "_C::paged_attention_*", "_C::merge_attn_states", "_C::selective_scan_*", "_C::top_k_per_row_*",
    "_C::hadacore_transform", "_C::weak_ref_tensor", "_C_cache_ops::*",
    "vllm_ir::rms_norm*", "vllm_ir::fused_add_rms_norm*",
)  # fmt: skip
"""Ops of other libraries that communicate with no other rank. Liger's kernels are Triton's: see `RUNNERS`."""

RUNNERS = frozenset({
    "triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation",  # a user's Triton kernel counts as local
    "auto_functionalized", "auto_functionalized_v2", "with_effects", "out_dtype", "run_and_save_rng_state",
    "run_with_rng_state", "graphsafe_run_with_rng_state", "run_dtensor_rng_op",  # they run an op, which counts
    "print", "inline_asm_elementwise", "foreach_map", "flex_attention", "flex_attention_backward",
})  # fmt: skip
"""torch's higher-order ops that communicate only if an op or a graph that they are given does.

Others that are given neither run what nobody sees: a method of an object, a compiled region, a Python function.
"""
