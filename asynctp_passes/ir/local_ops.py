"""Ops that communicate with no other rank, ops that surely do, and what some of them compute. Facts, nothing else.

They are given by the names of their schemas. A name is `namespace::name`, or `namespace::beginning*`. torch marks no op
as communicating, so what is neither here nor registered may communicate (`registry.promise_of`). An op that may
communicate, as its library is set, is left out on purpose.
"""

from __future__ import annotations

COMMUNICATING = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor", "symm_mem")
"""torch's namespaces whose ops communicate, but for those that `TORCH` names."""

OTHER_KINDS = {
    "c10d::allgather_*": "all_gather", "c10d::_allgather_base_": "all_gather",
    "c10d_functional::all_gather_into_tensor*": "all_gather",
    "_c10d_functional::all_gather_into_tensor*": "all_gather", "symm_mem::_low_contention_all_gather": "all_gather",
    "symm_mem::multimem_all_gather_out": "all_gather",
    "c10d::reduce_scatter_*": "reduce_scatter", "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d_functional::reduce_scatter_tensor*": "reduce_scatter",
    "_c10d_functional::reduce_scatter_tensor*": "reduce_scatter",
    "symm_mem::_low_contention_reduce_scatter": "reduce_scatter", "symm_mem::reduce_scatter_out": "reduce_scatter",
    "c10d::allreduce_*": "all_reduce", "c10d_functional::all_reduce*": "all_reduce",
    "_c10d_functional::all_reduce*": "all_reduce", "symm_mem::one_shot_all_reduce*": "all_reduce",
    "symm_mem::two_shot_all_reduce*": "all_reduce", "symm_mem::multimem_all_reduce_": "all_reduce",
    "symm_mem::multimem_one_shot_all_reduce*": "all_reduce",
    "vllm::flashinfer_trtllm_fused_allreduce_norm": "all_reduce",
    "vllm::rocm_aiter_fused_allreduce_rmsnorm*": "all_reduce",
}  # fmt: skip
"""Collectives that are not rewritten, and what each does: torch's, and what vLLM fuses of all-reduces by itself."""

MULTIPLYING = (
    "aten::_addmm_activation", "aten::_cslt_sparse_mm", "aten::_dyn_quant_matmul_4bit", "aten::_foreach_mm",
    "aten::_grouped_mm", "aten::_mixed_dtypes_linear", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2",
    "aten::_sparse_addmm", "aten::_sparse_mm*", "aten::_sparse_semi_structured_*", "aten::_sparse_sparse_matmul",
    "aten::_weight_int4pack_mm*", "aten::_weight_int8pack_mm", "aten::chain_matmul", "aten::einsum",
    "aten::fbgemm_linear_fp16_weight*", "aten::fbgemm_linear_int8_weight*", "aten::linalg_matmul",
    "aten::mkldnn_linear", "aten::sparse_sampled_addmm", "_native::_foreach_mm_native_0", "_quantized::linear*",
    "_quantized::wrapped_fbgemm_linear_fp16_weight", "_quantized::wrapped_quantized_linear", "inductor::_mm_plus_mm",
    "mkldnn::_linear_pointwise*", "onednn::linear_*", "onednn::qlinear_*", "quantized::int4mm_packed_weight_cpu",
    "quantized::linear*", "quantized::matmul", "sparse::qlinear_*",
    "torchao::*scaled_mm", "torchao::int_scaled_matmul", "torchao::scaled_int8_mm", "torchao::mx_fp8_bf16",
    "torchao::rowwise_scaled_linear_*", "torchao::float8_linear_*", "torchao::da8w4_linear_*",
    "torchao::blockwise_scaled_mm", "float8_sparse::fp8_sparse_mm", "ao::blockwise_fp8_gemm", "xformers::_cusplt_mm",
    "fbgemm::f8f8bf16*", "_C::cutlass_scaled_mm*", "_C::cutlass_scaled_fp4_mm*", "_C::cutlass_moe_mm*",
    "_C::machete_mm", "_C::marlin_gemm*", "_C::gptq_gemm*", "_C::gptq_marlin_gemm*", "_C::awq_gemm*",
    "_C::allspark_w8a16_gemm", "_C::ggml_mul_mat*",
)  # fmt: skip
"""Matmuls that are not rewritten. Of other libraries' ops the shapes tell (`matmuls.is_matmul`)."""

NORMALIZING = (
    "aten::_fused_rms_norm*", "aten::rms_norm", "aten::native_layer_norm*", "aten::layer_norm",
    "aten::native_group_norm*", "aten::group_norm", "aten::native_batch_norm*", "aten::_native_batch_norm_legit*",
    "aten::_batch_norm_*", "aten::cudnn_batch_norm*", "aten::batch_norm*", "aten::instance_norm",
    "aten::_softmax*", "aten::_log_softmax*", "aten::_safe_softmax", "aten::_masked_softmax*", "aten::softmax",
    "aten::log_softmax", "aten::native_dropout*", "aten::_fused_dropout", "aten::dropout", "aten::alpha_dropout",
    "aten::glu", "aten::glu_backward", "aten::silu*", "aten::gelu*",
    "aten::fake_quantize_*", "aten::_fake_quantize_*", "aten::fused_moving_avg_obs_fake_quant",
    "aten::quantize_per_*", "quantized::layer_norm", "quantized::softmax", "quantized::dropout",
    "quantized_decomposed::quantize_*", "quantization::*",
    "torchao::triton_*quant*", "torchao::mxfp8_quantize_*", "torchao::quantize_affine*", "torchao::_quantize_affine*",
    "fbgemm::quantize_fp8_*",
    "_C::rms_norm*", "_C::fused_add_rms_norm*", "_C::silu_and_mul*", "_C::mul_and_silu*", "_C::gelu_*",
    "_C::fatrelu_and_mul*", "_C::swigluoai_and_mul*", "_C::static_scaled_*quant*", "_C::dynamic_scaled_*quant*",
    "_C::dynamic_per_token_scaled_*", "_C::per_token_group_*", "_C::scaled_fp4_quant*",
    "vllm_ir::rms_norm*", "vllm_ir::fused_add_rms_norm*",
)  # fmt: skip
"""Norms, softmaxes, dropouts, gates and quantizations: layers have them between a collective and a matmul."""

CONTRACTING = (
    "aten::_scaled_dot_product_*", "aten::scaled_dot_product_attention", "aten::_flash_attention_*",
    "aten::_efficient_attention_*", "aten::_cudnn_attention_*", "flex_attention*", "flash_attn::*", "flash_attn_3::*",
    "_vllm_fa2_C::*", "_vllm_fa3_C::*", "xformers_flash::*", "xformers_flash3::*", "xformers::efficient_attention*",
    "xformers::fmha_merge_attentions*", "xformers::merge_attentions*", "_C::paged_attention_*",
    "_C::merge_attn_states", "torchao::qscaled_dot_product",
    "aten::*conv1d*", "aten::*conv2d*", "aten::*conv3d*", "aten::*convolution*", "mkldnn::_convolution*",
    "onednn::qconv*", "quantized::conv*", "torchvision::deform_conv2d", "aten::*lstm*", "aten::*gru*", "aten::*rnn*",
    "quantized::*lstm*", "quantized::*gru*", "quantized::*rnn*", "mkldnn::_mkldnn_rnn_layer", "mamba_ssm::*",
)  # fmt: skip
"""Attention, convolutions and recurrent layers, which multiply by themselves: no matmul after one is its operand's."""

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
