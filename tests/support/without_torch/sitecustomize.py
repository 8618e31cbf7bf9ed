"""Hides torch from processes that tests start: Python imports a module of this name first.

transformers imports torch wherever it is installed, which takes a third of a worker's start. Only tests need torch;
users don't have it.
"""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]
