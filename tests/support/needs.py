"""Marks of tests that need what not every machine has."""

from __future__ import annotations

import shutil

import pytest

from penstock.engine.kernels.cpu.compilation import COMPILERS
from penstock.tools.plan import has_libtpu

HAS_COMPILER = any(map(shutil.which, COMPILERS))

needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="there is no C++ compiler")
needs_libtpu = pytest.mark.skipif(not has_libtpu(), reason="libtpu is not installed: it is for Linux on x86-64")
