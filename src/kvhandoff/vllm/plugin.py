"""How vLLM finds the connector: the entry point `vllm.general_plugins` calls `register` in every process."""

from __future__ import annotations

NAME = "KVHandoffConnector"

_registered = False


def register() -> None:
    """Make `kv_connector: KVHandoffConnector` known to vLLM; again is a no-op.

    Nothing else is imported before a deployment asks for it: others' vLLM may be of any version.
    """
    global _registered
    if _registered:
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    KVConnectorFactory.register_connector(NAME, "kvhandoff.vllm.connector", NAME)
    _registered = True
