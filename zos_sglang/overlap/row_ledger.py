"""Debug mode of the future map: a row is read once after each write, by the request that owns it."""

from __future__ import annotations

from collections.abc import Iterable


class RowLedgerError(RuntimeError):
    """A row of the future map was read twice, before it was written, or by another request."""


class RowLedger:
    """Host-side twin of the future map: which rows hold a token nobody has read yet.

    Rows are request-pool slots. A slot's generation grows each time the pool hands it to another
    request, so a stale token of the previous owner is told apart from the current owner's. Rows that
    sit out a prefill stay valid: only a read or another write changes them.
    """

    def __init__(self) -> None:
        self._unread: dict[int, int] = {}

    def wrote(self, rows: Iterable[int], generations: Iterable[int]) -> None:
        """A launch sampled a token for each row; an unread token of a finished request is dropped."""
        self._unread.update(zip(rows, generations, strict=True))

    def read(self, rows: Iterable[int], generations: Iterable[int]) -> None:
        """A launch takes each row's token as its input.

        Raises:
            RowLedgerError: a row holds no unread token, or one of another generation.
        """
        for row, generation in zip(rows, generations, strict=True):
            written_by = self._unread.pop(row, None)
            if written_by is None:
                raise RowLedgerError(f"row {row} was read without a write since its last read")
            if written_by != generation:
                raise RowLedgerError(
                    f"row {row} holds a token of generation {written_by}, read by {generation}"
                )
