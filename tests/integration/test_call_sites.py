"""Calls from generated code: the lines that Inductor writes, when a call is the op's, and the same values on ranks."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed as dist
from interpreter import interpreter_fault
from ranks import imagined_ranks, run_ranks
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import asynctp_passes
from asynctp_passes import AsyncTPPass, Config, Note
from asynctp_passes.ops import call_sites
from asynctp_passes.ops.call_sites import CallSite, SizedCallSite
from asynctp_passes.planning import overlap
from asynctp_passes.torch_private import inductor_calls, inductor_order

OPTIONS: dict[str, Any] = {"fallback_by_default": True, "direct": True}
"""All other ops are called as they are: no C++ is compiled."""


def layer(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    group = dist.group.WORLD
    return reduce_scatter_tensor((all_gather_tensor(x.sin(), 0, group) @ w.t()).relu() @ v, "sum", 0, group)


def tensors(rows: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(rows, 16), torch.randn(32, 16) / 4, torch.randn(32, 16) / 4


# --- the lines -----------------------------------------------------------------------------------------------------
@pytest.fixture
def two() -> Iterator[None]:
    torch._dynamo.reset()
    asynctp_passes.clear_reports()
    with imagined_ranks(2):
        yield


def lines(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The lines of generated code that call fused ops, or bind what does. word: What is in them."""
    dynamic, word = options.pop("dynamic", None), options.pop("word", "matmul")
    compiled = torch.compile(function, backend="asynctp", options={**OPTIONS, **options}, dynamic=dynamic)
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(compiled, *args)
    found = [line.strip() for code in codes for line in code.splitlines() if word in line]
    return "\n".join(line for line in found if "assert_" not in line and not line.startswith("#"))


def test_a_call_is_bound_where_its_module_is_imported(two: None) -> None:
    text = lines(layer, *tensors())
    assert text.count(f"= asynctp_bind({call_sites.VERSION}, ") == 2
    gather, reduction = (line for line in text.splitlines() if line.startswith("buf"))
    assert re.fullmatch(r"buf\d+ = asynctp_all_gather_matmul_\w{12}\(buf\d+, \[buf\d+\], \[None\]\)", gather)
    assert re.fullmatch(r"buf\d+ = asynctp_matmul_reduce_scatter_\w{12}\(\[buf\d+\], \[arg2_1\], \[None\]\)", reduction)
    assert "torch.ops.asynctp" not in text
    assert asynctp_passes.reports()[-1].notes == ()


def unlike(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Gathers whose other arguments are alike: of one B twice, of another one, of fewer rows."""
    group = dist.group.WORLD
    pairs = ((x.sin(), w.t()), (x.cos(), w.t()), (x.exp(), w.t()[:, :16]), (x[:4].sin(), w.t()), (x.neg(), v[:16]))
    return tuple(all_gather_tensor(shard, 0, group) @ b for shard, b in pairs)


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_object_is_for_tensors_of_one_layout(dynamic: bool, two: None) -> None:
    """It has one plan, or one for each number of sizes that are not constant."""
    text = lines(unlike, *tensors(), dynamic=dynamic)
    calls = re.findall(r"= (asynctp_all_gather_matmul_\w{12})\(", text)
    assert len(calls) == 5
    assert len(set(calls)) == text.count(f"= asynctp_bind({call_sites.VERSION}, ") == 4
    assert calls[0] == calls[1]


def test_sizes_that_are_not_constant_come_first(two: None) -> None:
    text = lines(layer, *tensors(), dynamic=True)
    calls = [line.partition(" = ")[2] for line in text.splitlines() if line.startswith("buf")]
    assert len(calls) == 2
    assert all(call.partition("(")[2].startswith("(s") for call in calls)
    assert text.count('True)")') == 2


def padded(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    product = x @ w.t()
    return reduce_scatter_tensor(
        torch.nn.functional.pad(product, (0, 0, 0, -x.shape[0] % 2)), "sum", 0, dist.group.WORLD
    )


def test_a_number_that_depends_on_sizes_comes_with_them(two: None) -> None:
    """How many rows are no padding; a call for sizes that were bound before needs no look at it."""
    x, w, v = tensors(7)
    torch._dynamo.mark_dynamic(x, 0)
    text = lines(padded, x, w, v)
    (call,) = (line.partition(" = ")[2] for line in text.splitlines() if line.startswith("buf"))
    assert re.match(r"asynctp_matmul_reduce_scatter_\w{12}\(\((s\d+), \1,\), \[", call)
    assert "'real_rows': ('size', 1)" in text


def beside(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """A gather that no matmul takes, in front of one that does not need it."""
    gathered = all_gather_tensor(v.cos(), 0, dist.group.WORLD)
    product = x @ x.t()
    return torch.cat([each.flatten() for each in (layer(x, w, v), gathered + 1, product)])


def test_a_collective_without_a_matmul_is_bound_too(two: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the wait that reads what it reads."""
    monkeypatch.setattr(overlap, "LEAST_BYTES", 0)
    text = lines(beside, *tensors(), strict="off", word="asynctp")
    assert set(re.findall(r"torch\.ops\.asynctp\.(\w+)", text)) == {"run_check"}
    assert re.search(r"buf\d+ = asynctp_all_gather_\w{12}\(buf\d+\)", text)
    assert re.search(r"buf\d+ = asynctp_wait_\w{12}\(buf\d+, buf\d+\)", text)


BY_TORCH = "fused ops are called by torch.ops (size_asserts=False), which takes the host longer"


@pytest.mark.parametrize(
    ("options", "notes"),
    [
        ({"direct": False}, ()),
        ({"size_asserts": False}, (Note("calls", BY_TORCH),)),
    ],
)
def test_what_keeps_the_ops_line_is_told(options: dict[str, Any], notes: tuple[Note, ...], two: None) -> None:
    text = lines(layer, *tensors(), **options)
    assert text.count("torch.ops.asynctp.") == 2
    assert "asynctp_bind" not in text
    assert asynctp_passes.reports()[-1].notes == notes


def test_a_line_that_cannot_be_written_is_the_ops(
    two: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a torch has changed what it is made of: the compile does not fail."""
    monkeypatch.setattr(inductor_calls, "_sizes", lambda inputs, wrapper: inputs.gone)
    assert lines(layer, *tensors()).count("= torch.ops.asynctp.") == 2
    assert "is called by torch.ops, for want of a line of its own" in caplog.text


def test_groups_that_are_objects_keep_the_ops_lines(two: None) -> None:
    graph = torch.fx.symbolic_trace(lambda group: group).graph
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inductor_order, "is_compiled", lambda graph: True)
        assert call_sites.mark(graph, [], True) == ""
        (group, *_) = graph.nodes
        assert call_sites.mark(graph, ["0", group], True) == "process groups are inputs of the graph"
        assert graph.owning_module.meta == {}
        assert call_sites.mark(graph, ["0"], True) == ""
        assert graph.owning_module.meta != {}


def test_no_other_backend_gets_these_lines(two: None) -> None:
    """The table of lines is the process's."""
    lines(layer, *tensors())
    x, w, _ = tensors()

    def by_hand(x: Tensor, w: Tensor) -> Any:
        return torch.ops.asynctp.all_gather_matmul(x, [w.t()], [None], 0, False, 2, dist.group.WORLD.group_name)

    _, codes = run_and_get_code(torch.compile(by_hand, options={"fallback_by_default": True}), x, w)
    assert any("torch.ops.asynctp.all_gather_matmul.default(" in code for code in codes)
    assert not any("asynctp_bind" in code for code in codes)


def test_caches_have_graphs_of_either_kind_and_of_a_version(two: None, monkeypatch: pytest.MonkeyPatch) -> None:
    key = AsyncTPPass(Config(direct=True)).uuid()
    assert AsyncTPPass(Config(direct=False)).uuid() != key
    monkeypatch.setattr(call_sites, "VERSION", call_sites.VERSION + 1)
    assert AsyncTPPass(Config(direct=True)).uuid() != key


# --- when a call is the op's ---------------------------------------------------------------------------------------
class Bound:
    """A bound call. log: what was made."""

    def __init__(self, log: list[str], call: Any) -> None:
        self.log, self.call, self.valid, self.able = log, call, True, True

    def __call__(self, *tensors: Any) -> Any:
        if not (self.valid and self.able):
            return None
        self.log.append("direct")
        return [tensors[0].new_zeros(self.call.group_size * tensors[0].shape[0], tensors[1][0].shape[1])]

    def holds(self) -> bool:
        return self.valid


class Place(SimpleNamespace):
    """A call site of a gather, whose op and kernels only say that they were called."""

    site: CallSite
    log: list[str]
    bound: list[Bound]

    def call(self, *sizes: Any, rows: int = 8) -> list[str]:
        self.log.clear()
        with torch.no_grad():
            out = self.site(*sizes, torch.zeros(rows, 16), [torch.zeros(16, 32)], [None])
        assert out[0].shape == (2 * rows, 32)
        return self.log.copy()


TEXT = (
    "('all_gather_matmul', {'gather_dim': 0, 'return_a_full': False, 'group_size': 2, 'group_name': '0', 'accord': 7}, "
    "('a_shard', 'bs', 'biases'), %s)"
)


def place(monkeypatch: pytest.MonkeyPatch, sized: bool = False, binds: bool = True) -> Place:
    log, made = list[str](), list[Bound]()

    def bind(call: Any) -> Bound | None:
        log.append("bind")
        made.append(Bound(log, call))
        return made[-1] if binds else None

    def op(shard: Tensor, bs: list[Tensor], biases: Any, *rest: Any) -> list[Tensor]:
        assert rest == (0, False, 2, "0", None, None, False, None, False, None, None, None, 7)
        log.append("op")
        return [shard.new_zeros(2 * shard.shape[0], bs[0].shape[1])]

    monkeypatch.setattr(call_sites, "kernels_for", lambda tensor: SimpleNamespace(bind=bind))
    site = call_sites.bind(call_sites.VERSION, TEXT % sized)
    assert isinstance(site, SizedCallSite if sized else CallSite)
    site._overload = op
    return Place(site=site, log=log, bound=made)


def test_the_first_call_is_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    here = place(monkeypatch)
    assert [here.call() for _ in range(3)] == [["op", "bind"], ["direct"], ["direct"]]
    assert here.site.direct == 2
    assert (here.bound[0].call.accord, here.bound[0].call.group_name) == (7, "0")


def test_what_no_plan_makes_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    here = place(monkeypatch, binds=False)
    assert [here.call() for _ in range(3)] == [["op", "bind"], ["op"], ["op"]]


def test_without_kernels_each_call_is_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    here = place(monkeypatch)
    monkeypatch.setattr(call_sites, "kernels_for", lambda tensor: SimpleNamespace())
    assert [here.call() for _ in range(3)] == [["op"]] * 3


def test_what_holds_no_more_is_bound_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    here = place(monkeypatch)
    here.call()
    here.bound[0].valid = False
    assert [here.call() for _ in range(2)] == [["op", "bind"], ["direct"]]


def test_what_cannot_be_made_now_is_bound_still(monkeypatch: pytest.MonkeyPatch) -> None:
    here = place(monkeypatch)
    here.call()
    here.bound[0].able = False
    assert here.call() == ["op"]
    here.bound[0].able = True
    assert here.call() == ["direct"]


def test_each_size_has_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    here = place(monkeypatch, sized=True)
    assert [here.call((rows,), rows=rows) for rows in (4, 8, 4, 8)] == [["op", "bind"]] * 2 + [["direct"]] * 2
    for rows in range(100, 100 + call_sites.MOST_SIZES):
        here.call((rows,), rows=rows)
    assert len(here.site._bound) <= call_sites.MOST_SIZES
    assert here.call((4,), rows=4) == ["op", "bind"]


class Looks(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_who_looks_at_ops_sees_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler and a dispatch mode, also where the call was not bound before; autograd where it is on."""
    here = place(monkeypatch)
    with Looks():
        assert here.call() == ["op"]
    assert [here.call() for _ in range(2)] == [["op", "bind"], ["direct"]]
    with Looks():
        assert here.call() == ["op"]
    with torch.profiler.profile():
        assert here.call() == ["op"]
    with torch.autograd.profiler.profile():
        assert here.call() == ["op"]
    assert here.call() == ["direct"]
    with torch.enable_grad():
        here.log.clear()
        here.site(torch.zeros(8, 16), [torch.zeros(16, 32)], [None])
        assert here.log == ["op"]
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert here.call() == ["direct"]


def test_an_error_of_the_op_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = place(monkeypatch)

    def refuse(*arguments: Any) -> Any:
        raise ValueError("asynctp all_gather_matmul: no")

    op, here.site._overload = here.site._overload, refuse  # type: ignore[assignment]
    with pytest.raises(ValueError, match="asynctp all_gather_matmul: no"):
        here.call()
    here.site._overload = op
    assert here.call() == ["op", "bind"]


def test_code_of_another_version_calls_the_op_and_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    called = []
    call_sites.bind(call_sites.VERSION, TEXT % False)
    assert caplog.text == ""
    monkeypatch.setattr(torch.ops.asynctp, "all_gather_matmul", lambda **given: called.append(given))
    one = call_sites.bind(call_sites.VERSION + 1, TEXT % True)
    assert "code that another version of asynctp has generated calls all_gather_matmul" in caplog.text
    one((3,), "shard", ["b"], [None])
    constants = {"gather_dim": 0, "return_a_full": False, "group_size": 2, "group_name": "0", "accord": 7}
    assert called == [{**constants, "a_shard": "shard", "bs": ["b"], "biases": [None]}]


@pytest.mark.parametrize("version", [call_sites.VERSION, call_sites.VERSION + 1])
def test_a_damaged_text_is_refused(version: int) -> None:
    """Wherever it ends, and where it is another program's."""
    text = TEXT % False
    for damaged in (*(text[:end] for end in range(len(text))), "('all_gather_matmul', {})", "print(1)"):
        with pytest.raises(ValueError, match=r"says no call .*Remedy: empty Inductor's caches") as told:
            call_sites.bind(version, damaged)
        assert f"has the text {damaged!r} of version {version}" in str(told.value)


@pytest.mark.parametrize(("known", "unknown"), [("all_gather_matmul", "gone"), ("group_size", "world"), ("bs", "cs")])
def test_a_text_of_other_ops_or_arguments_is_refused(known: str, unknown: str) -> None:
    with pytest.raises(ValueError, match=rf"says no call \(.*{unknown}.*\)\. Remedy"):
        call_sites.bind(call_sites.VERSION, (TEXT % False).replace(known, unknown))


def test_dtypes_are_constants() -> None:
    assert call_sites._value(("dtype", "bfloat16")) is torch.bfloat16
    assert call_sites._value([2.0, 0.5]) == [2.0, 0.5]


# --- on ranks ------------------------------------------------------------------------------------------------------
def made_directly() -> list[int]:
    """How many calls of each place of this process were not the op's."""
    return sorted(each.direct for each in gc.get_objects() if type(each) in (CallSite, SizedCallSite))


def equal(function: Callable[..., Any], compiled: Callable[..., Any], *args: Any) -> bool:
    with torch.no_grad():
        wanted, found = function(*args), compiled(*args)
    return torch.allclose(wanted, found, atol=1e-4, rtol=1e-4)


def repeated(rank: int, world: int) -> dict[str, Any]:
    """The same program again and again: the same sizes, other ones, in threads, and after its memory was released."""
    import asynctp_kernels

    torch.manual_seed(rank)
    compiled = torch.compile(layer, backend="asynctp", options=OPTIONS, dynamic=True)
    right = [equal(layer, compiled, *tensors(rows)) for rows in (8, 8, 8, 12, 8, 12)]
    found: dict[str, Any] = {"direct": made_directly()}
    dist.barrier()
    asynctp_kernels.release(dist.group.WORLD)
    dist.barrier()
    right += [equal(layer, compiled, *tensors()) for _ in range(3)]
    found["after release"] = made_directly()
    for _ in range(2):  # one after the other: ranks make their calls in one order
        thread = threading.Thread(target=lambda: right.append(equal(layer, compiled, *tensors())))
        thread.start()
        thread.join()
    found["in threads"] = made_directly()
    with torch.profiler.profile() as profile:
        right.append(equal(layer, compiled, *tensors()))
    found["profiled"] = "asynctp::all_gather_matmul" in {event.key for event in profile.key_averages()}
    found["after the profile"] = made_directly()
    return {**found, "right": right}


def in_branches(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x, w, v: layer(x, w, v) + 1, lambda x, w, v: layer(x, w, v) - 1, (x, w, v))


def layers(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    for _ in range(3):
        x = layer(x, w, v) * 0.5
    return x


def joined(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return torch.cat([each.flatten() for each in unlike(x, w, v)])


def chosen_rows(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """How many there are is not known when it is compiled."""
    return layer(x[torch.arange(x.shape[0]) < 8], w, v)


def trained(function: Callable[..., Any], x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    leaves = [each.clone().requires_grad_() for each in (x, w, v)]
    function(*leaves).square().sum().backward()
    return torch.cat([leaf.grad.flatten() for leaf in leaves if leaf.grad is not None])


PROGRAMS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "branches": (in_branches, {}),
    "three layers, memory planned": (layers, {"memory_planning": True}),
    "partitions": (layers, {"graph_partition": True}),
    "rows that are chosen": (chosen_rows, {}),
    "training": (layer, {}),
    "a gather that is complete": (beside, {"forced": "direct"}),
    "a gather in flight": (beside, {"forced": "decomposed"}),
    "unlike calls": (joined, {}),
    "unlike calls of any size": (joined, {"dynamic": True}),
}


def programs(rank: int, world: int) -> dict[str, tuple[bool, int, set[tuple[str, str]]]]:
    """Whether each program has eager's values in each of five calls, and how many calls were not the ops'.

    And the implementations of the bound collectives without a matmul.
    """
    from asynctp_kernels import cuda
    from asynctp_kernels.cuda import moves

    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    found = {}
    for name, (function, options) in PROGRAMS.items():
        torch.manual_seed(rank)
        torch._dynamo.reset()
        before, right = sum(made_directly()), True
        options = {**OPTIONS, "strict": "off", **options}
        dynamic, forced = options.pop("dynamic", None), options.pop("forced", None)
        compiled = torch.compile(function, backend="asynctp", options=options, fullgraph=True, dynamic=dynamic)
        moves.moved.clear()
        for number in range(5):
            x, w, v = tensors(9 if name == "rows that are chosen" else 8)
            x = x.abs() if number % 2 else -x.abs()
            with cuda.forced(forced) if forced else nullcontext(), mock.patch.object(overlap, "LEAST_BYTES", 0):
                if name == "training":
                    wanted, given = trained(function, x, w, v), trained(compiled, x, w, v)
                    right &= torch.allclose(wanted, given, atol=1e-3, rtol=1e-3)
                else:
                    right &= equal(function, compiled, x, w, v)
        assert not moves.flying
        found[name] = (right, sum(made_directly()) - before, set(moves.moved))
    return found


def with_a_new_group(rank: int, world: int) -> dict[str, Any]:
    """A group is destroyed and made again, with the name that it had; the program keeps the old one."""
    found: dict[str, Any] = {"right": []}
    compiled = torch.compile(layer, backend="asynctp", options=OPTIONS)
    found["right"] += [equal(layer, compiled, *tensors()) for _ in range(3)]
    found["direct"], old = made_directly(), dist.group.WORLD
    store, name = dist.distributed_c10d._get_default_store(), old.group_name
    dist.barrier()
    dist.destroy_process_group()
    again = dist.PrefixStore("again", store)
    dist.init_process_group("gloo", store=again, rank=rank, world_size=world)
    found["same name"] = dist.group.WORLD.group_name == name
    found["right"] += [equal(layer, compiled, *tensors()) for _ in range(3)]
    found["after it"] = made_directly()
    return found


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("asynctp_kernels", reason="asynctp_kernels is not importable (is triton installed?)")
    if fault := interpreter_fault():
        pytest.skip(fault)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("ASYNCTP_CPU_IMPLEMENTATION", "interpreted")


@pytest.mark.ranks
def test_values_are_those_of_the_op(interpreted: None) -> None:
    for found in run_ranks(2, repeated, timeout_s=400):
        assert all(found["right"])
        # of six calls torch watches the first, and one of each size is the op's, which is bound then
        assert found["direct"] == [3, 3]
        assert found["after release"] == [5, 5]
        assert found["in threads"] == [7, 7]
        assert found["profiled"]
        assert found["after the profile"] == [7, 7]


@pytest.mark.ranks
def test_programs_of_every_form_have_the_values_of_eager(interpreted: None) -> None:
    for found in run_ranks(2, programs, timeout_s=500):
        assert {name: right for name, (right, _, _) in found.items()} == dict.fromkeys(PROGRAMS, True)
        assert {name for name, (_, direct, _) in found.items() if direct} == set(PROGRAMS), found
        assert found["a gather that is complete"][2] == {("all_gather", "direct")}
        assert found["a gather in flight"][2] == {("all_gather", "copy engine")}


@pytest.mark.ranks
def test_a_group_of_the_same_name_is_another_group(interpreted: None) -> None:
    for found in run_ranks(2, with_a_new_group, timeout_s=400):
        assert found["same name"]
        assert all(found["right"])
        assert (found["direct"], found["after it"]) == ([1, 1], [1, 1, 1, 1])  # torch compiles again


def out_of_the_cache(rank: int, world: int, folder: str) -> dict[str, Any]:
    compiled = torch.compile(layer, backend="asynctp", options=OPTIONS)
    right = [equal(layer, compiled, *tensors()) for _ in range(3)]
    return {"right": right, "direct": made_directly(), "cached": [one.from_cache for one in asynctp_passes.reports()]}


@pytest.mark.ranks
def test_another_process_has_the_calls_out_of_its_cache(
    interpreted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for cached in (False, True):
        for found in run_ranks(2, out_of_the_cache, str(tmp_path), timeout_s=400):
            assert all(found["right"])
            assert (found["direct"], found["cached"]) == ([1, 1], [cached])
