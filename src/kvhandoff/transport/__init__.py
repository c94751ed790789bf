"""Data plane (moves KV blocks) and control plane (moves messages) between engines."""
