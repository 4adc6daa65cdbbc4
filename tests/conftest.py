"""For all tests: an error of asynctp that nobody foresaw fails them, although it ends no compile."""

from __future__ import annotations

import os
from collections.abc import Iterator

# before torch: threads of test processes would wait for one another, each process that compiles would start others that
# import torch and have nothing to do without a GPU, and Inductor would build a program that tries out vector
# instructions for each of the folders that tests give it for its cache
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import pytest
from garbage import collect_rarely
from internal_state import forget_internal_errors
from profiles import THOROUGH
from unmeasured import leave_out_measurements

#: files that take minutes, the longest first: begun last, one of them would run alone
LONGEST = (
    "test_backend.py",
    "test_leaving.py",
    "test_found_programs.py",
    "test_interpreted_ops.py",
    "test_recipes.py",
    "test_rank_cases.py",
    "test_lifecycles.py",
    "test_llama.py",
    "test_interpreted_unlike.py",
    "test_interpreted_bits.py",
    "test_picture.py",
    "test_channel_model.py",
    "test_accord.py",
    "test_e2e.py",
    "test_tour.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Let files start in the order of `LONGEST`: pytest-xdist would begin with those that have most tests."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files, and skip, with the reason, what is for the thorough profile only."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))
    for item in items:
        if not THOROUGH and item.get_closest_marker("thorough") is not None:
            item.add_marker(pytest.mark.skip(reason="takes long; HYPOTHESIS_PROFILE=thorough"))


def pytest_collection_finish() -> None:
    """Once all modules of tests are imported, and with them torch."""
    leave_out_measurements()
    collect_rarely()


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
