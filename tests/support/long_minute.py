"""Limits of keys for tests that check the charges of a whole test, however slow the machine is."""

from __future__ import annotations

import pytest

from penstock.gateway.keys import limits, tabs

_SCRIPTS = ((limits, "_ADMIT"), (tabs, "_RESERVE"), (tabs, "_SETTLE"))


def lengthen_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has charges count for a hundred minutes instead of one."""
    for module, name in _SCRIPTS:
        script = getattr(module, name)
        longer = script.replace("(second + 61)", "(second + 6100)").replace("'EXPIRE', key, 62", "'EXPIRE', key, 6200")
        assert "6100" in longer
        assert "6200" in longer
        monkeypatch.setattr(module, name, longer)
