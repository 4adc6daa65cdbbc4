"""The corpus is read back exactly: every dump becomes a graph that prints as the dump."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dumps import CORPUS, Opaque, dump, dump_paths, load, without_addresses


@pytest.mark.parametrize("path", dump_paths(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_round_trip(path: Path) -> None:
    module = load(path)
    module.graph.lint()
    assert without_addresses(dump(module)) == without_addresses(path.read_text())


def test_corpus_is_complete() -> None:
    counts = {folder.name: len(list(folder.glob("*__*.txt"))) for folder in CORPUS.iterdir() if folder.is_dir()}
    assert counts == {"torch2.11": 49, "torch2.13": 97, "torch2.13_compile_on_one_rank": 5}


def test_targets_and_arguments_are_real() -> None:
    nodes = _nodes("torch2.13/mlp_sp_dim1_3d_B2__0.txt")
    gather, scatter = nodes["all_gather_into_tensor"], nodes["reduce_scatter_tensor"]
    assert gather.target is torch.ops._c10d_functional.all_gather_into_tensor.default
    assert gather.args == (nodes["primals_1"], 4, "0")
    assert scatter.args == (nodes["cat_1"], "sum", 4, "0")
    assert nodes["convert_element_type_3"].args == (nodes["mul_2"], torch.bfloat16)
    assert isinstance(nodes["primals_2"].meta["val"], Opaque)


def test_values_are_fake_tensors_with_layout() -> None:
    value = _nodes("torch2.13/block_sp_B2__0.txt")["permute"].meta["val"]
    assert isinstance(value, torch._subclasses.FakeTensor)
    assert (value.dtype, tuple(value.shape), value.stride()) == (torch.bfloat16, (64, 16), (1, 64))


def test_symbolic_sizes_are_one_backed_symbol() -> None:
    nodes = _nodes("torch2.13/block_sp_B2_dyn_seq__1.txt")
    sequence, gathered = nodes["primals_1"].meta["val"], nodes["cat_4"].meta["val"]
    assert isinstance(sequence, torch.SymInt)
    assert str(sequence) == "s27"
    assert gathered.shape[1].node.expr == 4 * sequence.node.expr
    assert gathered.fake_mode.shape_env.guards == []


def test_bad_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_text(
        "# header\nx = placeholder  # float32[2]s[1] users[0]\ny = aten.no_such_op.default(x)  # None users[0]: \n"
    )
    with pytest.raises(ValueError, match=r"bad.txt:3: .*no_such_op"):
        load(path)


def _nodes(name: str) -> dict[str, torch.fx.Node]:
    return {node.name: node for node in load(CORPUS / name).graph.nodes}
