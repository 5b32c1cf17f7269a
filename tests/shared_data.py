"""Real data for tests that can use it: the folder $DLA_DATA, or ../shared/data beside the repository."""

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("DLA_DATA") or Path(__file__).parents[2] / "shared" / "data")
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no folder {DATA}")
