"""Page-lock the host region piece by piece in the background, so that an engine starts before that is done.

Nothing here knows a device: what registers memory with a driver, and so page-locks it, is handed in.

Every piece is registered by a call of its own, and a copy must not cross from registered memory to other memory, or
into what another call has registered: drivers refuse that. So copies are cut where a piece ends (``cut``), whatever is
registered at the time: that is right before, while and after a piece is, and if it never is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from tierkv.transfer.engine import HostMemory

_logger = logging.getLogger(__name__)

#: A call locks its piece page by page, and while it does, other calls of the driver and ``mmap`` in this process may
#: wait: so not larger. Each piece is one more entry in the driver's tables: so not smaller.
PIECE_BYTES = 128 << 20


class Pinner:
    """A thread, ``tierkv-pin-0``, that registers the region from byte 0 on, and in ``close`` undoes what it did.

    It does both itself, since a driver keeps errors for the thread that met them: nobody else finds one of ours. The
    first piece that cannot be registered ends it, logged; copies of the rest are only slower.

    registered_bytes: how much this thread has registered and not undone.

    Thread safety: ``close`` is called by the thread that made it, once no copy runs. ``registered_bytes`` may be read
    by any thread; the pinning thread alone writes it.
    """

    def __init__(
        self,
        region: HostMemory,
        register: Callable[[int, int], bool],
        unregister: Callable[[int], None],
        *,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """The thread starts here.

        Args:
            register: of (address, bytes). False: somebody else has registered that, and undoes it. Raises whatever
                it likes if it cannot be done. Called on the thread, as is ``unregister``.
            unregister: undoes what ``register`` did at that address.
            piece_bytes: a multiple of the page size.
        """
        self.registered_bytes = 0
        self._address = region.address
        self._size = region.size
        self._register = register
        self._unregister = unregister
        self._piece_bytes = piece_bytes
        self._stop = threading.Event()
        # A daemon: a process that ends without close() must not hang on it.
        self._thread = threading.Thread(target=self._work, name="tierkv-pin-0", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """After the present piece, undo all and stop; again does nothing."""
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        registered: list[tuple[int, int]] = []
        try:
            self._register_pieces(registered)
        except Exception as error:  # of the driver, or of its binding
            _logger.warning(
                "of the host region's %d bytes, %d are page-locked and no more can be (%s): copies of the others will "
                "be slower; check the limit on locked memory (ulimit -l) and the memory that is free",
                self._size,
                self.registered_bytes,
                error,
            )
        self._stop.wait()
        for address, nbytes in registered:
            try:
                self._unregister(address)
                self.registered_bytes -= nbytes
            except Exception as error:
                _logger.warning("%d bytes of the host region stay page-locked: %s", nbytes, error)

    def _register_pieces(self, registered: list[tuple[int, int]]) -> None:
        for start in range(0, self._size, self._piece_bytes):
            if self._stop.is_set():
                return
            nbytes = min(self._piece_bytes, self._size - start)
            if self._register(self._address + start, nbytes):
                registered.append((self._address + start, nbytes))
                self.registered_bytes += nbytes


def cut(start: int, end: int, piece_bytes: int) -> list[int]:
    """``start``, where a piece ends in between, and ``end``: neighbours bound the parts of a copy."""
    first = (start // piece_bytes + 1) * piece_bytes
    return [start, *range(first, end, piece_bytes), end]
