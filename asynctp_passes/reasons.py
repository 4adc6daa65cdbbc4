"""The catalogue of reasons: why a chain is not fused, and what to do about it.

Every outcome that is not FUSED carries one `Reason`. Codes are stable: ATP0xx scope, 1xx structure,
2xx legality, 3xx kernel limits, 4xx cost, 9xx errors of asynctp itself. A name says what is wrong; the check that
guards against it (`planning.legality`) is named for the good case. `docs/reference/reasons.md` is written from this
table.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

__all__ = ["CATALOGUE", "Outcome", "Reason", "Refusal"]

Outcome = Literal["FUSED", "OVERLAPPED", "ACCELERATED", "BUCKETED", "ERASED", "REMATERIALIZED", "SKIPPED", "MISSED"]
"""The outcome of a collective.

FUSED: it becomes one op with its matmuls. OVERLAPPED: it runs beside matmuls that do not need it. ACCELERATED: it goes
by an op of asynctp's own, without a matmul. BUCKETED: it becomes one with other all-reduces. ERASED: it is not made,
since nothing uses it. REMATERIALIZED: the backward makes it again. SKIPPED: nothing is done, since it is out of scope
or not worth it. MISSED: it is in scope, and could not be fused.
"""


@dataclass(frozen=True)
class Reason:
    """One entry of the catalogue.

    Attributes:
        outcome: MISSED where the collective is in scope (raises under strict); ERASED or OVERLAPPED where the reason
            is why that is done instead; else SKIPPED, unless something else is done to it (`planning.plan`).
        code: Stable identifier, `ATP` and three digits.
        text: What is the case, in one sentence.
        hint: What to do about it.
        hint_of_reduction: The same for a matmul whose result is reduced, where `hint` is for a gather alone.
        rank: Of several near misses of a gather, the one of the lowest rank is told.
        needs_whole_gather: The matmul can begin with no part of the gather, which may run beside other matmuls.
        serves_others: A fused op of the same gather returns the gathered tensor to such a matmul.
        no_matmul_takes_it: A reduce-scatter of this reason may run beside matmuls: none can take it in.
        may_be_cut_off: The matmul may be in another graph.
        uncertain: `strict="zero"` does not count it: there may be no chain, or nothing can be done about it.
        no_program: Why no program with this reason runs on a CPU; empty where `tools.reason_programs` has one.
        name: The condition, in capitals: the name of the entry below.
    """

    outcome: Outcome
    code: str
    text: str
    hint: str
    hint_of_reduction: str = ""
    rank: int = 1
    needs_whole_gather: bool = False
    serves_others: bool = False
    no_matmul_takes_it: bool = False
    may_be_cut_off: bool = False
    uncertain: bool = False
    no_program: str = ""
    name: str = ""

    def hint_for(self, kind: str) -> str:
        """The hint for a collective of this kind, as `"all_gather"` or `"reduce_scatter"`."""
        return self.hint_of_reduction if self.hint_of_reduction and "reduce" in kind else self.hint

    def remedies(self) -> dict[str, str]:
        """All hints, by the title that says which collectives each is for."""
        if not self.hint_of_reduction:
            return {"remedy": self.hint}
        return {"remedy for a gather": self.hint, "remedy for a reduction": self.hint_of_reduction}

    @property
    def in_scope(self) -> bool:
        """True when it makes a chain MISSED."""
        return self.outcome == "MISSED"


@dataclass(frozen=True)
class Refusal:
    """A reason with the facts of one place: a failed proof or check, as a value."""

    reason: Reason
    facts: str = ""

    def __str__(self) -> str:
        return f"{self.reason.text} [{self.facts}]" if self.facts else self.reason.text


_skip = functools.partial(Reason, "SKIPPED")
_miss = functools.partial(Reason, "MISSED")
_SCALES_OF_GPUS = "it needs a GPU: on CPU torch multiplies by tensorwise and rowwise scales only"
_LIMIT_OF_GPUS = "it is a limit of the GPU kernels, which CPU tensors do not have"


# --- 0xx scope: not ours to fuse -------------------------------------------------------------------
GROUP_NOT_ENROLLED = _skip(
    "ATP001",
    "the process group is not among the enrolled groups",
    'add the group to Config(groups=...), or use groups="auto"',
)
NO_MATMUL = _skip(
    "ATP002",
    "no matmul of this graph takes what is gathered, or makes what is reduced",
    "nothing to do",
    rank=8,
    no_matmul_takes_it=True,
    may_be_cut_off=True,
)
WEIGHT_GATHER = _skip(
    "ATP003",
    "the gathered tensor is a parameter, a vector, a matmul's right-hand operand, or an input of the graph whose rows "
    "are looked up. Its group has no tensor-parallel chain in this graph, or is named for data parallelism",
    "nothing to do for parameters, as FSDP's, or context parallelism's keys and values; otherwise name the group in "
    "Config(groups=...)",
)
SINGLE_RANK = _skip(
    "ATP004",
    "the process group has one rank, so there is nothing to communicate",
    "nothing to do",
)
ALREADY_FUSED = _skip(
    "ATP005",
    "PyTorch's own micro-pipeline pass has already fused this collective (symm_mem.fused_*)",
    "set torch._inductor.config._micro_pipeline_tp = False to let asynctp fuse and check it",
)
OTHER_COLLECTIVE = _skip(
    "ATP006",
    "this collective is neither an all-gather, a reduce-scatter nor an all-reduce",
    "nothing to do",
)
GATHERED_SCALE = _skip(
    "ATP007",
    "the gathered tensor is a matmul's bias. Or it only scales a matmul or its result, and does not travel with the "
    "data that it scales",
    "nothing to do for a bias. To let scales travel with the data, gather them over the same group, for that matmul "
    "only. Give them one fp32 number for each row, in the data's order",
    rank=5,
)
NO_ELEMENTS = _skip(
    "ATP008",
    "a tensor of the chain has no elements, so there is nothing to communicate",
    "nothing to do",
)
WEIGHT_GRADIENT = _skip(
    "ATP009",
    "the reduced tensor is a weight's gradient: a matmul that contracts over rows made it, it is a vector, or it is "
    "returned as one. Its group has no tensor-parallel chain in this graph, or is named for data parallelism",
    "nothing to do for gradients, as FSDP's or DDP's, which are best bucketed; otherwise name the group in "
    "Config(groups=...)",
)
RESULT_UNUSED = _skip(
    "ATP010",
    "the tensor is one of several of a collective, and nothing uses its result",
    "leave the tensor out of the list",
)
DATA_PARALLEL_GROUP = _skip(
    "ATP011",
    "the process group is of a mesh dimension named for data parallelism (dp, ddp, fsdp, hsdp, data, replicate)",
    "nothing to do for weights and their gradients. Otherwise name the group in Config(groups=...), or give the mesh "
    "dimension another name",
)
PRODUCT_GATHERED = _skip(
    "ATP012",
    "the gathered tensor comes from a matmul, and no matmul takes it: a gather overlaps with a matmul that follows it",
    "leave the matmul's result sharded where the next op can work on the shard, as loss_parallel does. Or gather only "
    "the rows that are used, as the last token of each sequence. Nothing to do for context parallelism's keys and "
    "values",
    rank=6,
)
OUTSIDE_GRAPH = _skip(
    "ATP013",
    "the op that takes the gathered tensor, or makes the reduced one, is not in this graph",
    "if it is a matmul, bring both into one graph: TORCH_LOGS=graph_breaks shows where graphs break. Hooks of the "
    "compiled module itself are in other graphs: compile a module around it, or set "
    "torch._dynamo.config.wrap_top_frame. A nested_compile_region, or the branches of a torch.cond, must hold the "
    "collective too",
    rank=7,
    no_matmul_takes_it=True,
    may_be_cut_off=True,
)
RESULT_DROPPED = Reason(
    "ERASED",
    "ATP014",
    "nothing uses the result in this half of a training step, into which torch's partitioner put it. It is erased, "
    "with the ops that compute for it alone",
    "nothing to do",
)
ALL_TO_ALL = _skip(
    "ATP015",
    "the all-gather stands for an all-to-all: this rank uses its own piece of every shard, and nothing else",
    "nothing to do: DTensor writes an all-to-all so on CPU, where gloo has none, and calls one collective on GPUs",
)

# --- 1xx structure: the chain is not of a shape that is proven ----------------------------------------
PIECES_REORDERED = _miss(
    "ATP101",
    "the ranks' pieces are not joined in rank order",
    "concatenate the pieces in rank order, or reorder the matmul's result; a reordered gather is another tensor",
    "give a reduce-scatter the pieces in rank order, since ranks would get others; reorder the result of an all-reduce",
)
PIECES_REPEATED = _miss(
    "ATP102",
    "a piece of the gathered or scattered tensor is used more than once",
    "use every rank's piece exactly once; expand or repeat what comes after both, the matmul and the collective",
)
PIECES_MISSING = _miss(
    "ATP103",
    "part of the gathered or scattered tensor is dropped (sliced off or left out of a concatenation)",
    "trim the matmul's result, or gather only what is used",
    "multiply only the rows that are reduced; trim the result of an all-reduce",
)
VIEW_NOT_UNDERSTOOD = _miss(
    "ATP104",
    "a view between the collective and the matmul cannot be followed as an index map",
    "write it with reshape, permute, split/chunk, slice and cat, or move it before or after both, the matmul and the "
    "collective. Nothing to do for rows that are regrouped of elements of several ranks",
    "write it with reshape, permute, split/chunk, slice and cat, or do it to the collective's result. Gather parts, "
    "instead of summing each among zeros. Pad rows at their end",
)
COMPUTED_BETWEEN = _miss(
    "ATP105",
    "an operation changes values between the collective and the matmul",
    "apply row-wise operations to the shard before the gather",
    "apply the operation to the collective's result: it then works on the sum, so see that the program means that",
)
QUANTIZED_AFTER_GATHER = _miss(
    "ATP106",
    "the gathered tensor is quantized to fp8 or int8 before the matmul, in a way that cannot be moved to the shard",
    "quantize with pointwise operations and an amax of each row, which are moved; or gather the quantized shard",
    rank=0,
)
NOT_ROWS_OR_CONTRACTION = _miss(
    "ATP107",
    "the rank dimension does not end as a block of the matmul's rows (or leads its contraction or output columns)",
    "gather or scatter along a dimension that is not interleaved with the contraction, or with the output columns",
)
SIZES_NOT_PROVEN = _miss(
    "ATP108",
    "sizes do not fit, or are symbolic and their divisibility or equality cannot be proven without adding a guard",
    "mark the dimension static, or make the local size (not the global one) the dynamic dimension. For a registered "
    "op, see that its fake implementation gives the shape that was registered",
)
GATHER_IS_RIGHT_OPERAND = _miss(
    "ATP109",
    "the gathered tensor is used only as a matmul's right-hand operand, and no other matmul can run meanwhile",
    "let the matmul share its gather with another one that has the gathered tensor on the left. Or compile more of "
    "the program, so that there are matmuls to run meanwhile",
    rank=3,
    needs_whole_gather=True,
    serves_others=True,
)
SUM_HAS_OTHER_TERM = _miss(
    "ATP110",
    "the reduced sum has a scaled addition, or a term of another shape or layout: a row, a number, a transposed tensor",
    "add a term that is the same on all ranks to the collective's result. Expand any other term to the shape of the "
    "matmul's result, and transpose the collective's result instead. Scale an operand of the matmul, not its result",
)
SUM_TERMS_DISAGREE = _miss(
    "ATP111",
    "the matmuls of the reduced sum differ in layout, dtype or kind, or a term is added twice",
    "bring all terms to one layout and dtype before adding them, and add each once",
)
# ATP112 (a matmul's result is all-reduced) is retired: that is fused.
COLLECTIVE_NOT_UNDERSTOOD = _miss(
    "ATP113",
    "asynctp does not know this collective, or cannot use it. It writes in place, its list of results is used whole, "
    "or its result or group is not as registered",
    "use a functional collective, as torch.compile and DTensor do, and take its results one by one. Describe a custom "
    "op with asynctp_passes.register_collective",
)
UNEVEN_SHARDS = _miss(
    "ATP114",
    "the shards are uneven. Their padding is neither rows that a slice cuts off before the matmul, nor rows of zeros "
    "that come last before a reduce-scatter",
    "cut the padding off the matmul's result. Give a contraction a size that the ranks divide",
    "pad the matmul's result by rows of zeros at its end, after all that is added to it. Then reduce-scatter its rows. "
    "Pad another dimension after the collective",
)
MATMUL_NOT_UNDERSTOOD = _miss(
    "ATP115",
    "the matmul is of a form that asynctp does not rewrite (a weight for each batch, grouped, an op it does not know)",
    "use torch.nn.functional.linear or scaled_mm with one weight. Describe a custom op, or a Triton kernel, with "
    "asynctp_passes.register_matmul. Freeze without packing: set torch._inductor.config.cpp.weight_prepack = False "
    "before the first compile that freezes. Nothing to do for attention's own matmuls",
)
MATMUL_PADDED = _miss(
    "ATP116",
    "Inductor pads the matmul's operands to a multiple of the alignment and cuts its result",
    'leave Inductor\'s shape_padding off, as backend="asynctp" does by default: the fused ops take any size',
)
MIXES_RANKS = _miss(
    "ATP117",
    "an operation between the all-gather and the matmul mixes rows of different ranks",
    "normalize and quantize by rows, or by the largest element of all. All-reduce any other number for all rows "
    "before the gather",
)
ROWS_CONTRACTED = _miss(
    "ATP118",
    "the gathered tensor only feeds matmuls that contract over its rows (weight gradients), and no other matmul can "
    "run meanwhile",
    "let the matmul share its gather with the input gradient's. Or compile more of the program, so that there are "
    "matmuls to run meanwhile",
    rank=2,
    needs_whole_gather=True,
    serves_others=True,
)
MATMUL_IN_ANOTHER_GRAPH = _miss(
    "ATP120",
    "the collective and its matmul are compiled in two graphs",
    "bring both into one graph: remove the graph break between them, which TORCH_LOGS=graph_breaks shows, or compile "
    "a module that holds both. A nested_compile_region, or the branches of a torch.cond, must hold both or neither",
)
NOT_ROWWISE = _miss(
    "ATP121",
    "an operation between the collective and the matmul is not known to make each row from the same row alone",
    "apply it to the shard before the gather, or to the matmul's result, if that means the same; else nothing to do",
    "apply it to the collective's result, if that means the same; else nothing to do",
    rank=4,
    no_matmul_takes_it=True,
    may_be_cut_off=True,
    uncertain=True,
)

# --- 2xx legality: the shape is right, but the rewrite would change the program ----------------------------
REDUCE_OP_UNSUPPORTED = _miss(
    "ATP201",
    "the collective's reduction is neither 'sum' nor 'avg'",
    "only sums commute with the matmul's accumulation; use 'sum' or 'avg'",
)
PRODUCT_HAS_OTHER_USERS = _miss(
    "ATP202",
    "the unreduced matmul result (or a view of it) is also used elsewhere, so it must be kept whole",
    "do not return or save the unreduced result (activation checkpointing: save the collective's result instead)",
)
OPERAND_DEPENDS_ON_GATHER = _miss(
    "ATP203",
    "another operand of the matmul is computed from the gathered tensor itself",
    "nothing to do: the matmul cannot start before the whole gather is there",
    uncertain=True,
)
MUTATED_IN_BETWEEN = _miss(
    "ATP204",
    "an in-place operation lies between the collective and the matmul",
    "functionalize the graph first, or move the mutation before or after the chain",
    no_program="torch.compile makes in-place operations functional before asynctp sees its graph; a graph from "
    "elsewhere may have one",
)
SEVERAL_STREAMS = _miss(
    "ATP214",
    "the collective, its wait and the matmul run on several streams, or the program orders streams between them. A "
    "fused op runs on one, and loses that order",
    "run all in one torch.cuda.stream context, or outside of any, and wait for events before that. A compiled wait for "
    "a collective orders no streams: call wait_stream, too",
    no_program="a CPU has no streams: it needs a GPU, and torch 2.13 or later",
)
ADDMM_SCALED = _miss(
    "ATP205",
    "the matmul has alpha or beta different from 1, or a bias that is not one row. Only that of addmm may also be as "
    "large as the result",
    "scale the weight, the bias or the result itself. Pass the bias as a vector of the output width, or add it to the "
    "matmul's result",
    serves_others=True,
)
RESULT_SCALED = _miss(
    "ATP206",
    "the scaled matmul has a result scale",
    "leave scale_result unset, and scale what comes after both, the matmul and the collective",
)
SHAPE_UNKNOWN = _miss(
    "ATP207",
    'a node of the chain carries no tensor of the graph\'s fake mode in meta["val"], so nothing can be proven about it',
    "propagate fake tensors first (torch.fx.passes.fake_tensor_prop.FakeTensorProp)",
    no_program="torch.compile gives every node its fake tensor; a graph from elsewhere may lack one",
)
MAY_DIFFER_BY_RANK = _miss(
    "ATP208",
    "a value that the gathered tensor is combined with may be another one on every rank",
    "apply the operation to the shard before the gather, or to the matmul's result",
)
OPERAND_COMMUNICATED_LATER = _miss(
    "ATP210",
    "the matmul's other operand, scale or bias depends on a collective that comes after the all-gather, in whose "
    "place the fused op stands",
    "run the other collective before the all-gather",
)
OPAQUE_OP_BETWEEN = _miss(
    "ATP213",
    "an op that asynctp does not know may communicate inside, and the fused op would change places with it",
    "if it communicates with no other rank, say so before the first compile: asynctp_passes.register_local, as printed "
    "here. Otherwise run it before the collective, or after what is fused with that",
)
RANDOM_BETWEEN = _miss(
    "ATP209",
    "random numbers are drawn between the all-gather and the matmul",
    "draw them on the shard before the gather; every rank then draws its own",
)
SENT_REARRANGED = _miss(
    "ATP211",
    "elements change their places between the collective and the matmul, not only by whole rows. Ranks would send "
    "them in another order than the collective does",
    "gather the operand as the matmul takes it, not transposed",
    "reduce the matmul's result as it is, and transpose the collective's result",
    needs_whole_gather=True,
)
RANKS_DIFFER = _miss(
    "ATP212",
    "ranks would send other bytes than the program's collective does. A rank does not compute these alike, "
    "deviate=False forbids it, or nothing compares such calls on GPUs. The collective stays as it is, fused in "
    "another way or not at all",
    "let every rank compute the same from the communicated tensor, with the same asynctp, torch and options. If one "
    "rank looks at a tensor, let all take a copy. ASYNCTP_AGREE_S is how long ranks wait for one another. Or let the "
    "program itself do before the collective what the facts name",
)

# --- 3xx kernel limits ---------------------------------------------------------------------------------
DTYPE_UNSUPPORTED = _miss(
    "ATP301",
    "the operands' dtype is not one that the fused ops take",
    "use bfloat16, float16, float32, float64, float8_e4m3fn or float8_e5m2. Let a matmul without scales return the "
    "dtype of its operands",
)
DEVICE_UNSUPPORTED = _miss(
    "ATP302",
    "the operands are on a device that the fused ops do not run on",
    "use CUDA (NVIDIA) or CPU tensors",
    no_program="it needs a device that is neither a CPU nor an NVIDIA GPU",
)
SCALES_UNSUPPORTED = _miss(
    "ATP303",
    "the scales are neither tensorwise (one number), rowwise, nor of blocks of 1x128 and 128x128",
    "use such a recipe; MX, NVFP4 and swizzled scales are not fused",
    no_program=_SCALES_OF_GPUS,
)
CONTRACTION_TOO_LARGE = _miss(
    "ATP304",
    "more is gathered along the contraction dimension than the one implementation for it takes (64 MiB), and every "
    "matmul needs all of it",
    "shard activations over rows (the sequence) instead of the contraction dimension",
    needs_whole_gather=True,
    no_program=_LIMIT_OF_GPUS,
)
COLUMNS_TOO_LARGE = _miss(
    "ATP305",
    "more is scattered by columns than the one implementation for it takes (64 MiB)",
    "scatter the result over rows (the sequence) instead of its last dimension",
    no_matmul_takes_it=True,
    no_program=_LIMIT_OF_GPUS,
)
SCALES_BLOCKWISE = _miss(
    "ATP306",
    "the scales are one per block of 1x128 or 128x128, and not as torch's scaled_mm takes them, or blocks have rows of "
    "several ranks",
    "use torch.nn.functional.scaled_mm with the shapes and padding that it wants, and static sizes of K and N. 128x128 "
    "blocks of A need a multiple of 128 rows on each rank",
    no_program=_SCALES_OF_GPUS,
)
NOT_BATCH_INVARIANT = _miss(
    "ATP307",
    "rows are to have the same bits whatever their number, and no kernel promises that for this chain",
    "use bfloat16, float16, or fp8 with tensorwise or rowwise scales, on H100 or H200, in groups of 2 to 8 ranks. Rows "
    "of both operands and of results must be multiples of 16 bytes. Where bits may depend on the number of rows, set "
    'invariant="off"',
    no_program=_LIMIT_OF_GPUS,
)

# --- 4xx cost ------------------------------------------------------------------------------------------
BELOW_THRESHOLD = _skip(
    "ATP401",
    "the collective or the matmul is smaller than the configured threshold",
    "lower Config(min_bytes=..., min_flops=...) to fuse it all the same",
)
MATMUL_TAKEN = _skip(
    "ATP402",
    "the matmul is already fused with the all-gather of its left operand",
    "nothing to do: one matmul can overlap one collective, and here it overlaps the all-gather",
    no_matmul_takes_it=True,
)
MOVES_MORE = _skip(
    "ATP403",
    "computing on the shard would move more bytes than it overlaps. The matmul's operand is larger than the gathered "
    "tensor, others use that too, or a statistic over all rows takes another collective",
    "nothing to do. If the other users can work with the matmul's operand, compute that before the gather",
)
TAKEN_IN_PARTS = _skip(
    "ATP406",
    "matmuls take a gathered tensor in chunks for one weight, in fp8 or int8, in more than four parts, or not by "
    "ranges of rows. Or they make a reduced one in chunks. A fused op would make all at once, or multiply all rows by "
    "each weight",
    "divide the shard, and gather each piece: a chunk then has rows of every rank, so divide labels alike. Or, where "
    "memory allows, multiply all rows and divide the result",
    "nothing to do where chunks save memory. Otherwise join the operands, and multiply them",
)
BEHIND_PRODUCTS = Reason(
    "OVERLAPPED",
    "ATP404",
    "no matmul can begin with a part of the gathered tensor. One needs all of it, as a weight's gradient or a right "
    "operand does, or none takes it. The gather runs whole beside other matmuls, by asynctp::all_gather",
    "nothing to do",
)
SCATTER_BEHIND_PRODUCTS = Reason(
    "OVERLAPPED",
    "ATP405",
    "no matmul can take this reduce-scatter in. It runs whole beside matmuls that do not need it, by "
    "asynctp::reduce_scatter",
    "nothing to do",
)
STEP_SKIPPED = _skip(
    "ATP407",
    "the options leave out the step that would fuse this collective, or run it beside matmuls",
    "take the step's name out of Config(skip=...), or out of ASYNCTP_SKIP",
)
PRODUCTS_JOINED = _skip(
    "ATP408",
    "matmuls of different weights each make a part of the reduced tensor, as those of two streams do",
    "reduce each part by itself: in a backward, by gathering each by itself. Pad rows that the ranks do not divide",
    no_matmul_takes_it=True,
)

# --- 9xx internal --------------------------------------------------------------------------------------
INTERNAL_ERROR = _miss(
    "ATP901",
    "asynctp failed on this graph in a way that nobody foresaw; it runs as it was",
    "this is a bug of asynctp. Run the program again with TORCH_TRACE=FOLDER in the environment, and report the "
    "logged error with that folder. It holds the graphs: shapes and lines of your program, no values",
    no_program="it is a bug of asynctp, and no known program has one",
)

CATALOGUE = {name: entry for name, entry in list(globals().items()) if isinstance(entry, Reason)}
"""The entries above, by name."""

for _name, _entry in CATALOGUE.items():
    object.__setattr__(_entry, "name", _name)
