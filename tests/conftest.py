"""What every test shares: one torch thread, repeatable random examples, and where external data lies."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# Two pytest workers share two cores: more threads would only make them wait for each other.
torch.set_num_threads(1)

settings.register_profile(
    "ci", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Folder of data sets that do not come with a dependency; a test that needs one skips where it is not set."""
    root = os.environ.get("AUXIN_DATA")
    if not root:
        pytest.skip("AUXIN_DATA is not set: it names the folder of the external data sets")
    if not Path(root).is_dir():
        pytest.skip(f"AUXIN_DATA names {root}, which is not a folder")
    return Path(root)
