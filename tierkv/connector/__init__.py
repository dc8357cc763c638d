"""The vLLM connector: ``"kv_connector": "TierKVConnector", "kv_connector_module_path": "tierkv.connector"``."""

from tierkv.connector.connector import TierKVConnector
from tierkv.connector.extension import WorkerExtension

__all__ = ["TierKVConnector", "WorkerExtension"]
