"""Prefill and decode on separate engines, with a verified KV cache handoff per request."""

__version__ = "0.1.0"
