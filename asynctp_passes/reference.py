"""The name by which programs import the reference programs, `asynctp_passes.ops.reference`."""

import sys

from asynctp_passes.ops import reference

sys.modules[__name__] = reference
