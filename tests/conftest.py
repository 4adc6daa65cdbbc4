"""For all tests: an error of asynctp that nobody foresaw fails them, although it ends no compile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from internal_state import forget_internal_errors


@pytest.fixture(autouse=True)
def no_internal_errors(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which asynctp failed, unless it asks for `internal_errors`."""
    forget_internal_errors()
    yield
    told = forget_internal_errors()
    assert not told or "internal_errors" in request.fixturenames, f"asynctp failed: {told}"


@pytest.fixture
def internal_errors() -> None:
    """Asks to be let asynctp fail."""
