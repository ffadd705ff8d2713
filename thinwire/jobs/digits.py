"""Where scikit-learn's digits lie on this machine."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def find() -> Path:
    """Their file, as we know it; of a scikit-learn that keeps them otherwise it does not exist."""
    found = importlib.util.find_spec("sklearn")  # to import it takes a second
    if found is None:
        raise ValueError("digits are scikit-learn's, which is not installed: pip install 'thinwire[demo]'.")
    return Path(found.origin or "").parent / "datasets" / "data" / "digits.csv.gz"
