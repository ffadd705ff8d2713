"""A frame that is coming in, piece by piece."""

from __future__ import annotations

import zlib

from thinwire.link.frames import TRAILER_BYTES, Header, encode_trailer
from thinwire.link.transfer import Receiving


class Arrival:
    """A frame whose payload is coming, or has come and waits for its receive."""

    def __init__(self, header: Header, view: memoryview, receiving: Receiving | None = None) -> None:
        self.header, self.view, self.receiving = header, view, receiving
        self._trailer = bytearray(TRAILER_BYTES)
        self._filled = 0
        self._crc = 0

    def room(self) -> list[memoryview]:
        """Where the bytes that are still to come belong."""
        behind = max(self._filled - len(self.view), 0)
        return [self.view[self._filled :], memoryview(self._trailer)[behind:]]

    def take(self, received: int) -> None:
        """So many bytes have come."""
        self._crc = zlib.crc32(self.view[self._filled : self._filled + received], self._crc)
        self._filled += received

    @property
    def whole(self) -> bool:
        return self._filled == len(self.view) + TRAILER_BYTES

    @property
    def damaged(self) -> bool:
        return self._trailer != encode_trailer(self._crc)

    def hand_over(self) -> None:
        """Give an early payload to the receive that has claimed it."""
        assert self.receiving is not None
        if self.view is not self.receiving.view:
            self.receiving.view[:] = self.view
        self.receiving.finish()
