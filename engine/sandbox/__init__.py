"""Runs untrusted programs (chat templates, grammars) where the kernel can end them."""

from penstock.engine.sandbox.sandbox import Bounds, RequestEnded, Sandbox

__all__ = ["Bounds", "RequestEnded", "Sandbox"]
