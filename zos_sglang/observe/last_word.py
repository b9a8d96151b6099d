"""SIGTERM for a process that has something to finish before it ends by it, and that ends in any case.

Python runs a handler in the main thread, between two of its instructions. A thread that sits in a call into
the device's driver never gets there: with a handler SIGTERM would do nothing, where without one it ends the
process. So a thread of our own hears of the signal too, and after a time it ends the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

#: For the main thread to come to its handler and through it, seconds.
PATIENCE_S = 2.0


class LastWord:
    """Calls `finish` on SIGTERM, then lets the signal end the process, as it would have without us.

    Args:
        finish: what is to be done; in the main thread.
        patience_s: after the signal the process is killed after so many seconds, wherever it is.
    """

    def __init__(self, finish: Callable[[], None], patience_s: float = PATIENCE_S) -> None:
        self.finish = finish
        self.patience_s = patience_s
        self._installed = False
        self._write = -1

    def install(self) -> None:
        """Do nothing where somebody else handles SIGTERM, or outside the main thread."""
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        try:
            signal.signal(signal.SIGTERM, self._handle)
        except ValueError:
            return
        self._installed = True
        self._listen()

    def remove(self) -> None:
        """SIGTERM is the system's again, unless somebody else has taken it meanwhile. Main thread only."""
        if self._installed and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._installed = False
        if self._write >= 0:
            if (now := signal.set_wakeup_fd(-1)) not in (-1, self._write):
                signal.set_wakeup_fd(now)
            os.close(self._write)  # the thread reads the end
            self._write = -1

    def _handle(self, number: int, frame: Any) -> None:
        try:
            self.finish()
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def _listen(self) -> None:
        read, write = os.pipe()
        os.set_blocking(write, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if before != -1:  # an event loop's; it runs in the main thread, and so does not sit in a driver
            signal.set_wakeup_fd(before)
            os.close(read)
            os.close(write)
            return
        self._write = write
        threading.Thread(target=self._hear, args=(read,), name="zos-last-word", daemon=True).start()

    def _hear(self, read: int) -> None:
        with contextlib.suppress(OSError):
            while numbers := os.read(read, 64):
                if signal.SIGTERM in numbers:
                    time.sleep(self.patience_s)
                    os.kill(os.getpid(), signal.SIGKILL)
        os.close(read)
