"""What ``kv_connector_module_path`` names; the connector is in :mod:`p2pkv.integrations.vllm_connector`."""

from p2pkv.integrations.vllm_connector.connector import P2PKVConnector

__all__ = ["P2PKVConnector"]
