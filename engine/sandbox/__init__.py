"""Programs of strangers (chat templates, grammars), run where the kernel can end them."""

from penstock.engine.sandbox.sandbox import Bounds, RequestEnded, Sandbox

__all__ = ["Bounds", "RequestEnded", "Sandbox"]
