"""Each kind of miss or silence raises where the table of the page of reports says so, and is logged as it says."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from compiled_training import pair_in_one_process
from strict_kinds import KINDS, SETTINGS, act

import asynctp_passes
from asynctp_passes import AsyncTPError

TESTS = Path(__file__).resolve().parents[1]
IN_ONE_PROCESS = [name for name, kind in KINDS.items() if kind.act is not None]


@pytest.fixture(autouse=True)
def two_ranks(tmp_path: Path, internal_errors: None) -> Iterator[None]:
    """A group of two, and this process is its first rank."""
    with pair_in_one_process(tmp_path):
        yield
    asynctp_passes.disable()


def raised_by(name: str, setting: str) -> type[AsyncTPError] | None:
    """The class of the error that a kind has under a setting, out of what torch wraps it in."""
    try:
        act(KINDS[name], setting)
    except Exception as error:
        found = getattr(error, "inner_exception", error)
        assert isinstance(found, AsyncTPError), found
        return type(found)
    return None


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", IN_ONE_PROCESS)
def test_a_kind_raises_under_the_settings_of_the_table(name: str, setting: str) -> None:
    assert raised_by(name, setting) is KINDS[name].raises.get(setting)


@pytest.mark.parametrize("name", IN_ONE_PROCESS)
def test_a_kind_is_logged_as_the_table_says(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "asynctp_passes"):
        assert raised_by(name, "require") is KINDS[name].raises.get("require")
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    says = KINDS[name].says
    if says is None:
        assert [text for level, text in told if level != "INFO"] == []
    else:
        assert any(level == says[0] and says[1] in text for level, text in told), told


def test_other_kinds_are_shown_by_tests_of_ranks() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    for name, kind in KINDS.items():
        assert (kind.act is None) == bool(kind.shown_by), name
        for test in kind.shown_by:
            assert f"\ndef {test}(" in sources, test
