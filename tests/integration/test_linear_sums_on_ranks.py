"""Training with sums of reductions on two real ranks: values and gradients are eager's."""

from __future__ import annotations

import pytest
import torch
from compiled_training import run_cases
from profiles import THOROUGH
from ranks import run_ranks


# --- on ranks ------------------------------------------------------------------------------------------------------
@pytest.mark.ranks
def test_training_a_block_whose_layers_each_reduce_their_gradient() -> None:
    """See the functions `case_…` of summed_cases."""
    names = ["functional", "in_bfloat16", "with_real_code"] if THOROUGH else ["in_bfloat16"]
    if not torch.__version__.startswith("2.11."):  # which loses gradients through such functions
        names.append("in_place")
    for found in run_ranks(2, run_cases, names, "summed_cases", timeout_s=400):
        assert not "".join(outcome.error for outcome in found.values())
