"""Tuning tables: whatever has happened to a file, it is read whole or named with its fault; and how it is written."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from asynctp_kernels.cuda.choose import select, tables
from asynctp_kernels.cuda.implementations import IMPLEMENTATIONS

from asynctp_passes import doctor
from asynctp_passes.reporting.files import write_whole

GPU, KEY = "NVIDIA H200", "gather:2:bfloat16:4096:2048"
GOOD: dict[str, Any] = {
    GPU: {KEY: {"64": "fused", "2147483647": "direct"}, f"{KEY}+512:precise:wide:full:pieces:2x": {}}
}


def of_rows(rows: str, implementation: object = "fused") -> dict[str, Any]:
    return {GPU: {KEY: {rows: implementation}}}


def of_key(key: str) -> dict[str, Any]:
    return {GPU: {key: {"64": "fused"}}}


ROWS_LIMIT = "it must be a number of rows, from 1 to 2147483647"
BAD_ROWS = ["0", "-64", "+64", "064", " 64", "64.0", "6_4", "1e3", "", "many", "NaN", "٦٤", "2147483648", "9" * 5000]
BAD_KEYS = [
    "", "gather", "gather:2:bfloat16:4096", "scater:2:bfloat16:64:64", "gather:0:bfloat16:64:64",
    "gather:2:float1:64:64", "gather:2:Tensor:64:64", "gather:2:bfloat16:64:-64", "gather:2:bfloat16:64:64:fast",
    "gather:2:bfloat16:64:64:2x:full", "gather:2:bfloat16:64+:64", "gather:2:bfloat16:64:64\n",
    f"gather:2:bfloat16:64:{'1+' * 5000}1",
]  # fmt: skip
DAMAGED: list[tuple[Any, str]] = [
    *((of_rows(rows), ROWS_LIMIT) for rows in BAD_ROWS),
    *((of_key(key), "it must be OP:RANKS:DTYPE:DEPTHS:WIDTHS, as") for key in BAD_KEYS),
    *(
        (
            of_rows("64", value),
            f'["{GPU}"]["{KEY}"]["64"] is {shown}; it must be one of fused, decomposed, direct, sequential',
        )
        for value, shown in [
            ("fusedd", '"fusedd"'),
            ("Fused", '"Fused"'),
            ("", '""'),
            (None, "null"),
            (1, "1"),
            ([], "[]"),
        ]
    ),
    ([], "the whole is []; it must be a JSON object"),
    (None, "the whole is null; it must be a JSON object"),
    ({GPU: []}, f'["{GPU}"] is []; it must be a JSON object'),
    ({GPU: {KEY: "fused"}}, f'["{GPU}"]["{KEY}"] is "fused"; it must be a JSON object'),
    ({"": {}}, "it must be the name of a GPU, of 1 to 256 characters"),
    ({"H" * 257: {}}, "it must be the name of a GPU"),
    ({"H\x00200": {}}, "it must be the name of a GPU"),
    ('{"NVIDIA H200": {', "Expecting"),
    ("", "Expecting"),
    (b"\xff\xfe{}", "codec can't decode"),
    ("[" * 100_000 + "]" * 100_000, "recursion"),
    ('{"a":' * 100_000 + "1" + "}" * 100_000, "recursion"),
    ("9" * 5000, ""),
]


def path_of(content: Any, folder: Path) -> Path:
    path = folder / "tuning.json"
    data = content if isinstance(content, (str, bytes)) else json.dumps(content)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


@pytest.mark.parametrize(("content", "said"), DAMAGED, ids=range(len(DAMAGED)))
def test_what_is_damaged_is_named(content: Any, said: str, tmp_path: Path) -> None:
    path = path_of(content, tmp_path)
    with pytest.raises(ValueError, match=f"^asynctp: {re.escape(str(path))} is no tuning table ") as caught:
        tables.read(path, IMPLEMENTATIONS)
    assert said in str(caught.value)
    assert str(caught.value).endswith("or name another in ASYNCTP_TUNING_TABLE: 'asynctp tune' writes it anew")
    assert len(str(caught.value)) < 1000 + len(str(path))
    assert doctor._read_table(str(path), select.read_tuned)[1] == str(caught.value)


def test_what_is_right_is_read(tmp_path: Path) -> None:
    path = path_of(GOOD, tmp_path)
    assert tables.read(path, IMPLEMENTATIONS) == GOOD
    assert doctor._read_table(str(path), select.read_tuned) == ((GPU,), "")
    assert tables.read(path_of({}, tmp_path), IMPLEMENTATIONS) == {}


@pytest.mark.parametrize("place", ["none.json", "none/none.json", "file/none.json"])
def test_no_file_is_an_empty_table(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert tables.read(tmp_path / place, IMPLEMENTATIONS) == {}
    assert doctor._read_table(str(tmp_path / place), select.read_tuned) == (None, "")


def test_the_shipped_table_is_right() -> None:
    assert len(select.shipped()) > 1


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "forbidden"])
def test_what_is_no_file_of_text_is_named_at_once(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path = Path("/dev/zero")
    else:
        path.touch()
    error = PermissionError(13, "Permission denied") if kind == "forbidden" else None
    opened = mock.patch.object(tables.os, "open", side_effect=error, wraps=os.open)
    with opened, pytest.raises(ValueError, match=f"{re.escape(str(path))} is no tuning table"):
        tables.read(path, IMPLEMENTATIONS)


def test_a_file_that_is_too_large_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    with path.open("wb") as file:
        file.truncate(tables.LARGEST_FILE + 1)
    with pytest.raises(ValueError, match=f"it has {tables.LARGEST_FILE + 1} bytes, more than {tables.LARGEST_FILE}"):
        tables.read(path, IMPLEMENTATIONS)


# --- two tables --------------------------------------------------------------------------------------------------
def test_the_second_table_counts_and_neither_is_changed() -> None:
    first, second = {GPU: {KEY: {"64": "fused", "128": "fused"}}}, {GPU: {KEY: {"64": "direct"}}, "X": {KEY: {}}}
    before = json.dumps([first, second])
    assert tables.merged(first, second) == {GPU: {KEY: {"64": "direct", "128": "fused"}}, "X": {KEY: {}}}
    assert json.dumps([first, second]) == before


def test_a_digest_is_of_what_is_said_of_one_gpu() -> None:
    said = {GPU: {KEY: {"64": "fused", "128": "direct"}}}
    alike = {"X": {KEY: {"1": "direct"}}, GPU: {KEY: {"128": "direct", "64": "fused"}, f"{KEY}:full": {}}}
    assert tables.digest(said, GPU) == tables.digest(alike, GPU) != tables.digest(alike, "X")
    assert tables.digest(said, GPU) != tables.digest({GPU: {KEY: {"64": "fused"}}}, GPU)
    assert tables.digest(said, "X") == tables.digest({}, "X") == "none"


# --- writing -----------------------------------------------------------------------------------------------------
def write(path: Path, table: tables.Table) -> None:
    """As `asynctp tune` does."""
    write_whole(path, tables.as_text(table).encode())


def test_a_new_table_has_the_users_permissions(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "new" / "tuning.json", GOOD)
    finally:
        os.umask(before)
    path = tmp_path / "new" / "tuning.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert tables.read(path, IMPLEMENTATIONS) == GOOD
    assert [each.name for each in path.parent.iterdir()] == ["tuning.json"]


def test_an_old_table_keeps_permissions_and_links(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("{}")
    real.chmod(0o604)
    link.symlink_to("real.json")
    write(link, GOOD)
    assert link.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o604
    assert tables.read(real, IMPLEMENTATIONS) == GOOD


@pytest.mark.parametrize("fault", ["replace", "fsync"])
def test_a_table_that_could_not_be_written_is_as_it_was(fault: str, tmp_path: Path) -> None:
    path = path_of(GOOD, tmp_path)
    with mock.patch.object(os, fault, side_effect=OSError("no room")), pytest.raises(OSError, match="no room"):
        write(path, {})
    assert tables.read(path, IMPLEMENTATIONS) == GOOD
    assert [each.name for each in tmp_path.iterdir()] == ["tuning.json"]


def test_a_reader_never_sees_half_a_table(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    ends = [{GPU: {f"gather:2:bfloat16:{n}:{n}": {"64": name} for n in range(1, 200)}} for name in ("fused", "direct")]
    write(path, ends[0])
    done = threading.Event()

    def rewrite() -> None:
        for turn in range(60):
            write(path, ends[turn % 2])
        done.set()

    writer = threading.Thread(target=rewrite)
    writer.start()
    while not done.is_set():
        assert tables.read(path, IMPLEMENTATIONS) in ends
    writer.join()


_KILLED = """
import os, sys
from pathlib import Path
from asynctp_kernels.cuda.choose import tables
from asynctp_passes.reporting.files import write_whole
os.fsync = lambda handle: os._exit(9)
write_whole(Path(sys.argv[1]), tables.as_text({"X": {}}).encode())
"""


def test_a_tune_that_is_killed_leaves_the_table_as_it_was(tmp_path: Path) -> None:
    path = path_of(GOOD, tmp_path)
    assert subprocess.run([sys.executable, "-c", _KILLED, str(path)], check=False).returncode == 9
    assert tables.read(path, IMPLEMENTATIONS) == GOOD
