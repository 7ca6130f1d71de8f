"""How many random examples a property test draws."""

import os

from hypothesis import settings


def examples(default: int = 200) -> settings:
    """Settings for a property test: `AUXIN_EXAMPLES` examples where it is set, else `default`.

    Use as a decorator: `@examples(200)` above `@given(...)`.
    """
    return settings(max_examples=int(os.environ.get("AUXIN_EXAMPLES", default)))
