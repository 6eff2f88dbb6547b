"""rllaunch-miles as its authors test it: alone, beside rllaunch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MILES = Path(__file__).resolve().parents[2] / "plugins" / "rllaunch-miles"


def test_its_own_tests_pass():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(MILES)],
        cwd=MILES,
        env={k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "RLLAUNCH_"))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
