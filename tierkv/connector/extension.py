"""What vLLM's workers answer to when the engine is started with ``--worker-extension-cls`` and this class."""

from __future__ import annotations

from tierkv.connector import compat
from tierkv.errors import ConfigError, UnsupportedError


class WorkerExtension:
    """``--worker-extension-cls tierkv.connector.WorkerExtension``: reaches tierkv through vLLM's ``collective_rpc``.

    vLLM adds the class to its workers' bases. An engine that has an extension of its own can derive it from this one.
    """

    def tierkv_invalidate(self, name: str | None = None) -> None:
        """The weights of this worker have changed; ``name`` says to what.

        To be called on all workers, ``collective_rpc("tierkv_invalidate", args=("step-1200",))``, after vLLM's own
        reset and the update, and before the next request. Engines that give one name to one set of weights share what
        they compute from then on. None: share it with nobody.

        Raises:
            ConfigError: ``name`` is no text or empty.
            UnsupportedError: this engine has no TierKVConnector.
        """
        from tierkv.connector.connector import TierKVConnector

        if name is not None and not (isinstance(name, str) and name):
            raise ConfigError("name", f"{name!r} names no weights", "a text that is not empty, or None")
        ours = [c for c in compat.connectors_of_this_worker() if isinstance(c, TierKVConnector)]
        if not ours:
            raise UnsupportedError("this engine has no TierKVConnector; supported: engines that do")
        for connector in ours:
            connector.invalidate(name)
