"""Triton is set up before a kernel is imported."""

import tests.interpreter  # noqa: F401
