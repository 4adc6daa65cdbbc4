"""A distribution that is not installed, but whose entry point programs find."""

from __future__ import annotations

from pathlib import Path

__all__ = ["write_entry_point"]


def write_entry_point(folder: Path, group: str, target: str) -> None:
    """Write a distribution with one entry point: with `folder` in PYTHONPATH, programs load `module:function`."""
    distribution = folder / "asynctp_stacks-0.dist-info"
    distribution.mkdir(parents=True)
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: asynctp-stacks\nVersion: 0\n")
    (distribution / "entry_points.txt").write_text(f"[{group}]\nasynctp_stacks = {target}\n")
