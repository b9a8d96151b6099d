"""The thread that compares, while the scheduler thread goes on, or hangs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from zos_sglang.ranks.exchange import CannotCompareError, Exchange

logger = logging.getLogger(__name__)

#: Between two turns.
TURN_S = 0.05
#: How often it looks whether another rank has found a difference.
_LISTEN_S = 1.0


class Checker:
    """Turns of an exchange until a difference, a fault or `close`.

    Args:
        exchange: what to compare.
        stop_server: ends this process and the server; called in the thread.
        on_end: called when the comparison ends without a difference, before `close`.
    """

    def __init__(
        self, exchange: Exchange, stop_server: Callable[[], None], on_end: Callable[[], None]
    ) -> None:
        self.exchange = exchange
        self.stop_server = stop_server
        self.on_end = on_end
        #: CPU time of the thread so far, seconds.
        self.cpu_s = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zos-ranks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """No more turns. Once or more often, from any thread."""
        self._closed.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        try:
            found = self._until_found()
        except CannotCompareError as error:
            logger.warning("zos-sglang: ranks are not compared any more: %s", error)
            self.on_end()
        except Exception:
            # The board goes with the rank that keeps it: at the end of a server that is no fault.
            if not self._closed.is_set():
                logger.warning("zos-sglang: ranks are not compared any more", exc_info=True)
                self.on_end()
        else:
            if found is not None:
                logger.error("zos-sglang: %s. The server is stopped.", found)
                self.stop_server()

    def _until_found(self) -> str | None:
        exchange, heard = self.exchange, 0.0
        while not self._closed.wait(TURN_S):
            self.cpu_s = time.thread_time()
            now = time.monotonic()
            if (difference := exchange.turn(now)) is not None:
                peer, found = difference
                return found.sentence(exchange.rank, peer.rank)
            if now - heard >= _LISTEN_S:
                heard = now
                if (told := exchange.told_to_stop()) is not None:
                    return f"another rank found that {told}"
        return None
