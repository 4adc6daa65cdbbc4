"""The page of supported forms, made of a table: each form with its outcome, and the tests that show it.

python tests/support/support_page.py     writes docs/reference/support.md
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import factor_cases
import form_cases
import reason_rows_of_limits  # noqa: F401  (adds its rows)
import reason_rows_of_own_ops  # noqa: F401
import reason_rows_of_scope  # noqa: F401
import reason_rows_of_structure  # noqa: F401
from reason_rows import ROWS

from asynctp_passes.ir.op_traits import TRAITS, View
from asynctp_passes.reasons import CATALOGUE

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "reference" / "support.md"
FUSED = "fused"


@dataclass(frozen=True)
class Form:
    """A form in which programs write a collective next to a matmul.

    Attributes:
        text: The form.
        outcome: What becomes of it: begins with "fused", or names the code of its reason.
        shown_by: Names of what shows it: cases of `form_cases` or `factor_cases`, rows of `reason_rows`, or
            functions of other tests.
    """

    text: str
    outcome: str
    shown_by: tuple[str, ...]

    def __str__(self) -> str:
        return self.text

    def faults(self) -> Iterable[str]:
        """Where what should show it does not."""
        named = self.text + self.outcome
        for name in self.shown_by:
            if name in _CASES:
                shown = _CASES[name].outcomes
                if not (("F" in shown and FUSED in named) or any(code in named for code in shown)):
                    yield f"{name} has the outcomes {shown}"
            elif codes := [CATALOGUE[row.name].code for row in ROWS if row.build.__name__ == name]:
                if not any(code in named for code in codes):
                    yield f"{name} gives {codes}"
            elif name not in _functions():
                yield f"nothing is named {name}"


_CASES = {**form_cases.CASES, **factor_cases.CASES}


@functools.cache
def _functions() -> set[str]:
    """Names of all functions of the tests."""
    sources = [path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py")]
    return {name for source in sources for name in re.findall(r"^def (\w+)\(", source, re.MULTILINE)}


def form(text: str, outcome: str, *shown_by: str) -> Form:
    return Form(text, outcome, shown_by)


SECTIONS: dict[str, list[Form]] = {
    "Gathers": [
        form(
            "along any dimension → `mm`, 2-D or N-D, static or dynamic",
            FUSED,
            *("test_gather_of_rows", "test_gather_of_a_middle_dimension", "test_gather_of_a_dynamic_sequence"),
        ),
        form("along the last dimension → `mm`: the contraction", FUSED, "test_gather_of_the_contraction"),
        form(
            "→ several matmuls, as QKV, and other users",
            "one fused op, which returns it too",
            *("test_gather_for_several_matmuls_that_is_saved_too", "test_gather_whose_own_result_is_saved"),
        ),
        form("→ `addmm` with a bias of one row", FUSED, "test_gather_for_addmm", "linear"),
        form("→ `addmm` with `alpha`, `beta` or a bias of one column", "`ATP205`", "addmm_with_alpha"),
        form(
            "→ `addmm` with a matrix, as LoRA's",
            "fused; the matrix is added after it, as by `add`",
            *("test_gather_for_a_product_that_a_low_rank_one_is_added_to", "adapter of the gathered"),
        ),
        form(
            "→ input gradient and weight gradient",
            "one fused op, which returns it too",
            "test_both_gradients_take_what_one_op_gathers",
        ),
        form(
            "→ weight gradient alone, or as a right operand",
            "overlapped with other matmuls (`ATP404`), else `ATP109`, `ATP118`",
            *("gather_for_a_weight_gradient_beside_a_product", "gather_for_a_weight_gradient"),
            "gather_for_the_gradient_of_a_batch",
        ),
        form("→ parameter of FSDP, in a group without other chains", "`ATP003`", "gather_of_a_weight"),
        form(
            "over a mesh dimension named for data parallelism",
            "`ATP011`; fused when the group is named in `groups`",
            "gather_over_a_dimension_named_for_data",
        ),
        form(
            "→ cast, or pointwise ops without numbers → `mm`",
            "fused, computed on the shard; `ATP403` with other users of the gathered tensor",
            *("test_outcome_and_results", "gathered_tensor_used_as_it_is_too"),
        ),
        form(
            "→ pointwise ops with numbers or inputs → `mm`",
            "`ATP208`",
            *("combined_with_a_number", "combined_with_an_input"),
        ),
        form(
            "→ sum or mean of each row, as a norm → `mm`",
            "`ATP105`",
            *("norm_that_is_one_op_after_the_gather", "scaled_by_a_sum_of_each_row"),
        ),
        form(
            "of uneven shards, whose padding a slice cuts off → `mm`",
            "fused, also dynamic; the slice then cuts the result. With scales of rows, or of a contraction: `ATP114`",
            *("test_gather_whose_padding_is_cut_off_for_any_number_of_rows", "tokens padded and cut"),
            *("padding_sliced_off_rows_with_scales", "padding_sliced_off_the_contraction_after_the_gather"),
        ),
        form(
            "whose pieces are reordered, repeated or dropped",
            "`ATP101`, `ATP102`, `ATP103`",
            *("gathered_pieces_reversed", "gathered_piece_twice", "gathered_piece_dropped"),
        ),
        form(
            "whose rows are picked by number (`h[i]`, `F.embedding`, `gather`) → `mm`",
            "`ATP103`; `ATP003` for FSDP's table of embeddings",
            *("rows_picked_by_an_input", "rows_looked_up_as_embeddings", "embeddings_of_a_gathered_table"),
        ),
        form(
            "→ two to four ranges that are all rows, each to `mm`s of its own weights, as two streams",
            "fused; `ATP406` in fp8 or int8, `ATP408` in the backward",
            *("two_streams_that_meet_at_a_border_of_shards", "three_streams_in_a_batch", "step_of_two_streams"),
            "test_what_stays",
        ),
        form(
            "→ chunks of rows for one weight, as of a head, or parts of columns → `mm`",
            "`ATP406`",
            *("head_in_chunks", "columns_of_two_kinds"),
        ),
        form(
            "written into a buffer, seen as complex numbers, or padded in front → `mm`",
            "`ATP104`",
            *("gathered_into_a_larger_buffer", "gathered_as_complex_numbers", "gather_that_is_padded_in_front"),
        ),
        form("of a matmul's result, for no matmul: logits of a sharded head", "`ATP012`", "gather_of_logits"),
        form("→ the rank's own piece: DTensor's all-to-all on CPU", "`ATP015`", "all_to_all_on_cpu"),
        form(
            "whose matmul is in another graph",
            "`ATP013`, or `ATP120` [where that is seen](../how-to/fail-ci-on-a-miss.md#chains-in-two-graphs)",
            *("gather_that_is_returned", "gather_multiplied_in_a_region"),
        ),
    ],
    "Reductions": [
        form(
            "`mm` or `addmm` → RS along any dimension, or AR, in any views; `sum` or `avg`",
            "fused; `ATP201` for other reductions",
            *("test_scatter_of_rows", "test_scatter_of_the_last_dimension", "test_scatter_of_an_average_with_a_bias"),
            *("test_all_reduce", "scatter_of_a_maximum"),
            "test_scatter_whose_result_is_returned_before_the_wait",
        ),
        form(
            "`mm` of any number of rows → RS, without a guard that the ranks divide them",
            "fused; it raises where they do not, as the collective does. `ATP108` for sums of symbols, lists "
            "and registered collectives",
            *("test_scatter_of_dynamic_rows", "test_rows_that_the_ranks_do_not_divide_raise"),
            "test_what_looks_like_rows_that_a_scatter_divides",
        ),
        form(
            "`mm` or sum → rows of zeros at the end → RS of rows",
            "fused, also dynamic; `ATP114` for other padding, an addition after it, or an AR",
            *("padded product, compiled", "test_scatter_of_a_padded_product_of_any_number_of_rows"),
            "padding_before_a_residual_and_the_scatter",
        ),
        form(
            "weight gradient → RS or AR of a group without other chains",
            "`ATP009`; fused when the group is named in `groups`",
            *("scatter_of_a_weight_gradient", "test_a_weight_gradient_is_reduced_by_a_fused_op_on_request_only"),
        ),
        form(
            "sum of several `mm`, as `add` or `addmm` → RS or AR",
            FUSED,
            *("test_scatter_of_a_sum_of_three", "test_scatter_of_a_sum_that_inductor_made_addmm_of"),
        ),
        form(
            "sum of `mm` and a tensor of the same shape, as routed tokens → RS or AR",
            "fused: the tensor is computed before the op. `ATP110` for another shape or order, and for a number",
            *("test_scatter_of_a_product_and_routed_tokens", "number_added_before_the_scatter"),
            "term_of_a_transposed_product",
        ),
        form(
            "such terms, or the sum, negated or times a power of two: an adapter, a complex linear",
            "fused: the op multiplies where the program does. `ATP105` for other numbers",
            *("adapter with another scaling", "complex linear", "up, down and up"),
        ),
        form(
            "bf16 or fp16 results as fp32, under autocast → RS or AR",
            "fused: one result travels as it is, a sum in fp32",
            *("converted product", "converted sum", "converted sum of half to all-reduce"),
        ),
        form(
            "sum of the results of several RS or AR, at least one of an `mm`; other terms may stand between",
            "one fused op; each on its own in float16, or with other users",
            *("test_gradients_of_three_layers_with_one_input", "test_routed_tokens_and_a_residual_between_reductions"),
        ),
        form(
            "AR with or without an `mm`, where each rank uses its own rows only, maybe after pointwise ops",
            "RS, fused with the `mm`, if all ranks do so",
            *("test_a_sum_of_matmuls_is_scattered", "test_a_sum_without_a_matmul_is_scattered"),
            *("test_pointwise_ops_and_turned_rows_see_zeros_in_other_places", "test_look_alikes_are_all_reduced"),
        ),
        form(
            "AR → sum over one dimension, added to the AR of an `mm`: Llama 4's experts",
            "one fused op: the sum comes before the reduction, if all ranks do so",
            *("test_experts_that_are_reduced_one_by_one_and_then_summed", "summed experts"),
        ),
        form(
            "`mm` → × a tensor of factors: of rows (a gate), of columns, or one → RS or AR",
            "fused: factors are scales in fp32. `ATP105` in float64, by a Python number, with a bias, or two alike",
            *("gated beside routed", "test_scatter_of_a_gated_product_and_routed_tokens", "columns, then rows"),
        ),
        form(
            "`mm`s whose rows are joined → RS or AR",
            "`ATP408`; `ATP406` for one weight",
            *("two_products_joined_before_the_scatter", "chunks_joined_before_the_scatter"),
        ),
        form(
            "`mm`s whose columns are joined → RS or AR", "`ATP104`", "columns_of_two_products_joined_before_the_scatter"
        ),
        form("matmul whose result is used elsewhere too → RS", "`ATP202`", "product_used_elsewhere"),
        form(
            "other pointwise ops, or a custom op or Triton kernel of as many rows, between `mm` and RS or AR",
            "`ATP105` names it",
            *("relu_before_the_scatter", "own_op_before_the_all_reduce"),
            "test_a_kernel_in_between_is_named_and_the_line_printed_ends_it",
        ),
        form(
            "custom op of other rows, or a sum so far, in that place; attention",
            "`ATP121`; `ATP002`",
            *("own_op_of_other_rows", "summed_so_far_before_the_scatter", "product_attended_before_the_scatter"),
        ),
        form(
            "RS of 1 MiB or more, of no matmul or of one that its gather has",
            "overlapped with other matmuls (`ATP405`), else `ATP002`, `ATP402`",
            *("scatter_of_no_product_beside_one", "matmul_between_gather_and_scatter"),
        ),
        form("in-place AR (`all_reduce_`)", "`ATP204`", "all_reduce_in_place"),
    ],
    "Matmuls": [
        form("`mm`, `F.linear`, `@`, `einsum` over one weight", FUSED, "linear", "matmul", "einsum of heads"),
        form(
            "`bmm`, `baddbmm` with one weight for all batches",
            FUSED,
            "bmm of one weight",
            "baddbmm",
            "einsum to scatter",
        ),
        form("`bmm` with a weight for each batch, `_grouped_mm`", "`ATP115`", "bmm of two weights"),
        form("`aten.linear`, `aten.matmul`, not decomposed", FUSED, "linear before dispatch", "matmul before dispatch"),
        form(
            "`mm.dtype` and the like with the operands' dtype",
            "fused; `ATP301` for a wider one",
            *("test_an_out_dtype_that_changes_nothing", "gather_for_a_matmul_that_widens"),
        ),
        form(
            "padded by Inductor (`pad_mm`)",
            "`ATP116`; `shape_padding` is off by default. Fused over the contraction alone, before an RS",
            *("gather_that_is_padded_for_the_matmul", "test_scatter_of_a_product_padded_over_the_contraction"),
        ),
        form(
            "[registered](../how-to/custom-ops.md): matmuls, functional, `out=` or Triton, collectives, row-wise ops",
            FUSED,
            *("custom scaled matmul", "custom scatter of columns", "test_a_rowwise_op_is_done_on_the_shard"),
            "test_a_registered_kernel_of_any_number_of_rows_is_fused",
        ),
        form(
            "a frozen fp32 linear (`mkl._mkl_linear`)",
            "fused, by the weight that is not packed",
            "test_a_frozen_linear_is_fused_by_the_weight_that_is_not_packed",
        ),
        form(
            "other packed weights (`woq_int8`, `_weight_int8pack_mm`, `_linear_pointwise`), any unknown matmul",
            "`ATP115` names it",
            *("weights_that_freezing_packed", "weights_in_int8", "gather_for_a_custom_matmul"),
        ),
        form("`torch._foreach_*`", "as the op on one tensor", "test_a_sum_of_products_that_one_call_makes"),
    ],
    "fp8 and int8": [
        form(
            "`_scaled_mm`, `F.scaled_mm`: tensorwise, or rowwise, scales whole or gathered too; also as `uint8`",
            FUSED,
            *("test_data_and_scale_gathered_as_one_list", "scaled_mm of gathered bytes"),
            *("test_gather_for_a_tensorwise_scaled_matmul", "test_scaled_mm_with_recipes"),
            "test_gather_for_a_rowwise_scaled_matmul_whose_scales_are_gathered_too",
        ),
        form(
            "scales of 1, then × rows and columns → RS or AR (torchao rowwise)",
            FUSED,
            "test_scatter_of_a_scaled_matmul_whose_scales_come_after_it",
        ),
        form(
            "AG of fp8, and of one fp32 number a row that scales the matmul's result",
            "one fused op, the same bits; else the numbers' AG stays (`ATP007`)",
            *("test_row_numbers_travel_with_rows", "scales_gathered_in_a_line"),
        ),
        form(
            "bf16 AG → quantized: by rows, by 1x128 blocks, or by the largest element of all (torchao)",
            "fused: fp8 or int8, and scales, are gathered. `ATP403` if too few bytes, `ATP117` by sums or means",
            *("scaled_mm of blocks, quantized late", "int8 activations", "quantized_by_one_sum"),
        ),
        form(
            "blockwise scales: 1x128 × 128x128, 1x128 × 1x128, 128x128 × 1x128, whole or gathered; RS, AR, sums too",
            "fused; cuBLAS multiplies. `ATP306` for 128x128 blocks of two ranks' rows, and for registered matmuls",
            *("scaled_mm of gathered blocks", "scaled_mm of blocks to scatter"),
            "scales_of_128x128_blocks_of_rows_of_several_ranks",
        ),
        form(
            "`_scaled_mm` with 128x128 scales not padded as cuBLAS reads them",
            "`ATP306`: the program's own result is wrong; `F.scaled_mm` checks it",
            "scales_of_1x128_and_128x128_that_are_not_padded",
        ),
        form(
            "MX, NVFP4 or swizzled scales",
            "`ATP303` names the recipe",
            *("scales_of_mxfp8", "scales_of_nvfp4", "scales_swizzled"),
        ),
        form(
            "a result scale, passed or folded in by Inductor",
            "`ATP206`",
            *("scaled_matmul_with_a_result_scale", "scaled_matmul_with_a_folded_output_scale"),
        ),
        form(
            "int8 weights converted to the data's dtype (torchao weight-only)",
            "fused; the scales of columns come after a gather, and within a reduction",
            *("int8 weights", "test_all_reduce_of_int8_weights_with_a_scale_of_each_column"),
        ),
        form(
            "`_int_mm` → fp32 × scales of rows and columns → RS or AR",
            "fused; `ATP105` if rounded to float16 between",
            "test_scatter_of_int8_activations_and_weights",
        ),
        form("`_int_mm` → RS or AR of int32", "`ATP301`", "scatter_of_an_int32_result"),
    ],
    "Names of collectives": [
        form(
            "functional collectives, their `_autograd` kinds, DTensor, `torch.distributed` under `torch.compile`",
            FUSED,
            *("gather that has a gradient", "scatter that has a gradient", "case_functional_collectives"),
        ),
        form(
            "coalesced: a list, waited for one by one or at once",
            "fused, each on its own, in the list's order; `ATP010` for unused tensors, `ATP113` for lists used whole",
            *("gather of two", "scatter of two", "gather_of_a_list_of_which_one_is_used"),
            "gather_coalesced_and_kept_as_a_list",
        ),
        form(
            "in place or into a buffer (`*_out`, `c10d.allreduce_`)",
            "`ATP113`; `torch.compile` makes them functional",
            *("gather_into_a_buffer", "scatter_in_place"),
        ),
        form(
            "an op of another library that takes a process group",
            "`ATP113` next to a matmul; without a group it keeps its place (`ATP213`)",
            "gather_by_a_custom_op",
        ),
        form(
            "groups by name or as objects (`compile_on_one_rank`); several, and meshes",
            "fused, if enrolled by `groups`",
            *("test_groups_as_nodes_reach_the_fused_ops", "case_compile_on_one_rank"),
        ),
        form("PyTorch's own `symm_mem.fused_*`", "`ATP005`", "scatter_that_pytorch_fused"),
    ],
    "Ways to compile": [
        form(
            "`torch.compile` in any spelling, `fullgraph`, `dynamic=True`; any mode but `lite`, which is an error",
            FUSED,
            *("case_ways_to_compile", "test_modes_pass_through", "test_passes_turned_off"),
        ),
        form(
            "graphs of `make_fx` and `aot_eager`, engines with "
            "[their own backend](../how-to/custom-ops.md#an-engine-with-a-backend-of-its-own)",
            FUSED,
            *("train_by_aot", "unsafe views"),
        ),
        form(
            "AOTInductor: `inductor_configs={'post_grad_custom_post_pass': AsyncTPPass()}`",
            "fused, in a Python program that imports `asynctp_passes`, with the same groups; torch 2.11 cannot load it",
            "test_ahead_of_time",
        ),
        form(
            "`nested_compile_region`, `torch.cond`",
            "fused inside; across a border `ATP013`, `ATP120`",
            *("case_region_compiled_once", "test_a_function_with_branches_of_its_own", "gather_for_a_region"),
        ),
        form(
            "hooks of the compiled module, `checkpoint_sequential`, full backward hooks inside of it",
            "torch breaks the graph there: `ATP013`, or a warning with the remedy",
            *("case_hooks_of_the_compiled_module", "test_blocks_that_breaks_hide"),
        ),
    ],
}
"""All forms, by the section of the page."""

_BY_HAND = """\
| Tried by hand with torch 2.13.0 on 2 CPUs, 2026-11-23 | Outcome |
|---|---|
| `set_stance(force_backend="asynctp")`, `deepcopy` of a compiled module, one compile in each thread | fused |
| `torch.utils.checkpoint` around a compiled module, `save_on_cpu`, autocast, `torch.func.functional_call` | fused |
| `torch.export` or `aot_compile`, `standalone_compile`, `save_cache_artifacts` | fused; a loaded graph has its report |
| compiled autograd | fused; the backward's report says `inference` |
| `nn.Sequential(...).compile()` | `ATP013`: torch traces each part for itself; `torch.compile(...)` has one graph |
| a function inside of one that another backend compiles | torch takes the outer backend: nothing is fused |
| `backward(retain_graph=True)` | as with plain Inductor: `torch._functorch.config.donated_buffer = False` |
| `torch.func.vmap` of a gather | `ATP104` |
| `torch.func.grad`, gradients of gradients | torch has none for compiled collectives |"""

_FOLLOWED = (View.RESHAPE, View.PERMUTE, View.EXPAND, View.SLICE, View.SELECT, View.SPLIT,
             View.UNBIND, View.CAT, View.STACK, View.CAST, View.BITCAST)  # fmt: skip

_INTRODUCTION = """\
# Supported forms

Look here whether a form of your program is fused. A form that is not has a code: [Reasons](reasons.md) has its remedy.

- `AG` is an all-gather, `RS` a reduce-scatter, `AR` an all-reduce; `→` means "is used by".
- The backward has the same outcome. But ops before a forward's matmul come after the backward's: `ATP105`. Numbers
  that multiply its result come before: `ATP208`.
- Spelling does not matter: [index maps](../explanation/how-a-chain-is-proven.md) follow the ops below in any order.
  Dtypes of other sizes are followed after a gather, and back."""


def page() -> str:
    """The whole page, as Markdown."""
    lines = [_INTRODUCTION, "", _followed()]
    for title, forms in SECTIONS.items():
        lines += ["", f"## {title}", "", "| Form | Outcome |", "|---|---|"]
        lines += [f"| {form.text} | {form.outcome} |" for form in forms]
    return "\n".join([*lines, "", _BY_HAND]) + "\n"


def _followed() -> str:
    """The ops of aten that views are read from, by their short names."""
    names = dict.fromkeys(name.split(".")[1] for name, traits in TRAITS.items() if traits.view in _FOLLOWED)
    public = [name for name in names if not name.startswith("_") and not name.endswith("_copy")]
    return ", ".join(f"`{name}`" for name in public) + "."


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
