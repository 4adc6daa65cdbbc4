"""Functions that Dynamo fails to compile: each is named once, and ordinary programs hear nothing."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compiled_training import pair_in_one_process
from torch import Tensor, nn

import asynctp_passes
from asynctp_passes import AsyncTPPass, Config, ExpectError, StrictError, backend
from asynctp_passes.reporting.picture import picture

X, W = torch.ones(4, 16), torch.ones(16, 8)


@pytest.fixture(autouse=True)
def two_ranks(tmp_path: Path) -> Iterator[None]:
    """A group of two, and this process is its first rank."""
    with pair_in_one_process(tmp_path):
        yield
    asynctp_passes.disable()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in (record.getMessage() for record in caplog.records) if "fails to compile" in text]


def compiled(program: Any, **options: Any) -> Any:
    return torch.compile(program, backend="asynctp", options={"strict": "off", **options})


def loop(x: Tensor) -> Tensor:
    for _ in range(2):
        torch._dynamo.graph_break()
        x = x + 1
    return x @ W


# --- who is told ---------------------------------------------------------------------------------------------------
BACKENDS: dict[str, Callable[[Any], Any]] = {
    "name": compiled,
    "function": lambda program: torch.compile(program, backend=backend.asynctp),
    "partial": lambda program: torch.compile(
        program, backend=functools.partial(backend.asynctp, options={"strict": "off"})
    ),
    "pass": lambda program: torch.compile(program, options={"post_grad_custom_post_pass": AsyncTPPass(Config())}),
}


@pytest.mark.parametrize("how", BACKENDS)
def test_a_function_is_named_once(how: str, caplog: pytest.LogCaptureFixture) -> None:
    program = BACKENDS[how](loop)
    for _ in range(2):
        assert torch.equal(program(X), loop(X))
    (text,) = told(caplog)
    assert not picture.note_uncompiled(next(iter(asynctp_passes.summary().uncompiled)), "again")
    assert "integration/test_uncompiled.py:loop:" in text
    assert "graph_break" in text
    (name,) = asynctp_passes.summary().uncompiled
    assert f"! NOT COMPILED {name}: " in str(asynctp_passes.summary())
    with pytest.raises(ExpectError, match="0 missed in this process, and 1 function not compiled"):
        asynctp_passes.require(missed=0)
    asynctp_passes.require(missed=1)


def test_the_options_of_a_partial_count() -> None:
    strict = functools.partial(backend.asynctp, options={"strict": "all"})
    with pytest.raises(StrictError, match="fails to compile"):
        torch.compile(loop, backend=strict)(X)


def test_under_enable(caplog: pytest.LogCaptureFixture) -> None:
    with asynctp_passes.enable(Config(strict="all")), pytest.raises(StrictError, match="fails to compile"):
        torch.compile(loop)(X)
    torch._dynamo.reset()
    torch.compile(loop)(X)
    assert told(caplog) == []


def test_a_function_that_raised_raises_at_its_next_call() -> None:
    program = compiled(loop, expect=1)
    for _ in range(2):
        with pytest.raises(ExpectError, match="expect=1"):
            program(X)


def test_another_backend_and_a_process_without_peers_hear_nothing(caplog: pytest.LogCaptureFixture) -> None:
    torch.compile(loop, backend="eager")(X)
    torch.compile(loop)(X)
    torch._dynamo.reset()
    dist.destroy_process_group()
    try:
        compiled(loop, strict="all")(X)
    finally:
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    assert told(caplog) == []


def test_the_rest_of_a_function_after_a_break_is_named_by_it(caplog: pytest.LogCaptureFixture) -> None:
    def program(x: Tensor) -> Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return loop(x)

    compiled(program)(X)
    (text,) = told(caplog)
    assert "test_uncompiled.py:loop:" in text  # which is compiled by itself, as what breaks a graph is


def test_a_generator_that_is_compiled_itself(caplog: pytest.LogCaptureFixture) -> None:
    def program(x: Tensor) -> Iterator[Tensor]:
        yield x + 1

    list(compiled(program)(X))
    (text,) = told(caplog)
    assert "enerator" in text


# --- the remedy -----------------------------------------------------------------------------------------------------
def log(values: list[Tensor]) -> None:
    for value in values:
        assert float(value.mean()) > 0


def test_a_helper_is_marked_as_the_remedy_says() -> None:
    def program_with(helper: Callable[[list[Tensor]], None]) -> Callable[[Tensor], Tensor]:
        def program(x: Tensor) -> Tensor:
            x = x + 1
            helper([x])
            return x @ W

        return program

    with pytest.raises(StrictError, match=r"py:log:\d+.*torch\.compiler\.disable"):
        compiled(program_with(log), strict="all")(X)
    torch._dynamo.reset()
    asynctp_passes.clear_reports()
    compiled(program_with(torch.compiler.disable(log)), strict="all")(X)
    assert asynctp_passes.summary().uncompiled == {}


def test_a_helper_in_a_loop_is_called_by_a_function_that_is_not_compiled() -> None:
    helper = torch.compiler.disable(log)

    def layer(x: Tensor) -> Tensor:
        return torch.tanh(x @ W @ W.t())

    def program(step: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def loop_of(x: Tensor) -> Tensor:
            for _ in range(2):
                x = step(x)
                helper([x])
            return x

        return loop_of

    with pytest.raises(StrictError, match="as the body of a loop"):
        compiled(program(layer), strict="all")(X)
    torch._dynamo.reset()
    asynctp_passes.clear_reports()
    program(compiled(layer, strict="all"))(X)
    assert asynctp_passes.summary().uncompiled == {}


# --- who is not told ------------------------------------------------------------------------------------------------
@dataclass
class Out:
    """Values that a function may return."""

    value: Tensor


@contextlib.contextmanager
def scope(x: Tensor) -> Iterator[Tensor]:
    yield x


def resumed(x: Tensor) -> Out:
    """Graph breaks of many kinds; torch resumes after each."""
    print("a print")
    logging.getLogger(__name__).info("a log")
    if x.sum() > 0:
        x = x + 1
    y = x * x.sum().item()
    return Out(y + len(y.tolist()))


def with_generators(values: list[Tensor]) -> tuple[Any, ...]:
    torch._dynamo.graph_break()
    doubled = [value * 2 for value in values]
    named = {number: value + 1 for number, value in enumerate(doubled)}
    longest = max(len(value) for value in values)
    return sum(value.sum() for value in values), longest, named, list(map(torch.neg, values))


def with_contexts(x: Tensor) -> Tensor:
    with torch.no_grad(), scope(x) as y:
        y = y + 1
    try:
        assert y.shape[0] == 4
    except ValueError:
        y = x
    torch._dynamo.graph_break()
    return y @ W


def with_nested_functions(x: Tensor) -> list[Tensor]:
    def inner(y: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return y * scale

    scale = x.sum()
    return [inner(x), inner(x + 1)]


@torch.compiler.disable
def disabled(x: Tensor) -> Tensor:
    return x + 1


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    model[0].register_forward_hook(lambda *_: torch._dynamo.graph_break())
    return model


def trained() -> Callable[[Tensor], Tensor]:
    model = nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    return step


ORDINARY: dict[str, tuple[Any, Any]] = {
    "resumed": (resumed, X),
    "generators": (with_generators, [X, X]),
    "contexts": (with_contexts, X),
    "nested": (with_nested_functions, X),
    "disabled": (lambda x: disabled(x * 2) * 3, X),
    "hooks": (hooked(), X),
    "training": (trained(), X),
    "encoder": (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.ones(2, 4, 16)),
    "no-tensors": (lambda count: [print(number) for number in range(count)], 2),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_program_hears_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    program, given = ORDINARY[name]
    compiled(program, strict="all", expect=1)(given)
    assert (told(caplog), asynctp_passes.summary().uncompiled) == ([], {})


def numbered(x: Tensor, number: float) -> Tensor:
    return x + number


def test_the_form_that_a_limit_leaves_out_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    own = compiled(numbered)
    with torch._dynamo.config.patch(recompile_limit=1, specialize_float=True):
        for number in range(4):
            assert torch.equal(own(X, float(number)), X + number)
    (line,) = told(caplog)
    assert "recompile limit exceeded" in line
    assert "Remedy: raise torch._dynamo.config.recompile_limit, or give what differs" in line
    (name,) = asynctp_passes.summary().uncompiled
    assert "numbered" in name
    with pytest.raises(ExpectError, match="1 function not compiled"):
        asynctp_passes.summary().require(0, 0)
    caplog.clear()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8, specialize_float=True):
        for number in range(4):
            own(X, float(number))
    assert told(caplog) == []


@pytest.mark.parametrize(("options", "error"), [({"strict": "all"}, StrictError), ({"expect": 1}, ExpectError)])
def test_a_limit_is_an_error_if_asked_for(options: dict[str, Any], error: type[Exception]) -> None:
    own = compiled(numbered, **options)
    with torch._dynamo.config.patch(recompile_limit=1, specialize_float=True):
        own(X, 0.0)
        with pytest.raises(error, match=r"recompile limit exceeded.*Remedy: raise torch\._dynamo"):
            own(X, 1.0)
