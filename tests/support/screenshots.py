"""Take the screenshots of the documentation with Chromium: `python tests/support/screenshots.py`.

Runs examples with `ASYNCTP_GRAPH_DIR`, and writes the page of the first and the folder's list, in light and in dark,
into docs/images. Needs Chromium.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SCHEMES = {"": 1, "-dark": 0}  # the ending of a picture's name, and Chromium's number of a colour scheme
LARGEST = 200_000  # bytes of a picture
EXAMPLES = ("visualize.py", "compile_mlp.py", "explain_a_miss.py")


def shoot(browser: str, url: str, width: int, height: int, picture: Path) -> None:
    """Write what the browser shows, in light and in dark.

    Raises:
        RuntimeError: A picture is larger than a page should load.
    """
    for ending, scheme in SCHEMES.items():
        path = picture.with_name(f"{picture.stem}{ending}.png")
        options = (
            *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=10000"),
            *(f"--window-size={width},{height}", f"--blink-settings=preferredColorScheme={scheme}"),
        )
        subprocess.run([browser, *options, f"--screenshot={path}", url], check=True, capture_output=True, timeout=120)
        if path.stat().st_size > LARGEST:
            raise RuntimeError(f"{path} has {path.stat().st_size} bytes; the limit is {LARGEST}: take a smaller window")
        print(f"wrote {path.relative_to(ROOT)}, {path.stat().st_size} bytes")


def main() -> int:
    """0 done, 1 no browser."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"screenshots: none of {', '.join(BROWSERS)} was found; install one", file=sys.stderr)
        return 1
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        paths = os.pathsep.join(str(path) for path in (ROOT, ROOT / "kernels"))
        more = {"PYTHONPATH": paths, "ASYNCTP_GRAPH_DIR": folder, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        for name in EXAMPLES:
            program = [sys.executable, str(ROOT / "examples" / name), *([folder] if name == EXAMPLES[0] else [])]
            subprocess.run(program, check=True, cwd=ROOT, env={**os.environ, **more}, capture_output=True)
        page = Path(folder) / "graph-0-0-inference.html"
        shoot(browser, f"{page.as_uri()}#r1", 1280, 720, IMAGES / "graph-page.png")
        shoot(browser, (page.parent / "index.html").as_uri(), 1120, 280, IMAGES / "graph-index.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
