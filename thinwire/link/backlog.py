"""How much of what a socket was given is still on its way, by the kernel's own count."""

from __future__ import annotations

import fcntl
import socket
import sys
import termios

SIOCOUTQNSD = 0x894B


def unacknowledged(sock: socket.socket) -> int:
    """Bytes that the kernel has taken and the peer's kernel has not confirmed (SIOCOUTQ, by its other name)."""
    return int.from_bytes(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def unsent(sock: socket.socket) -> int:
    """Bytes that the kernel has taken and not sent yet (SIOCOUTQNSD); nothing where it does not tell."""
    if sys.platform != "linux":
        return 0
    try:
        return int.from_bytes(fcntl.ioctl(sock.fileno(), SIOCOUTQNSD, bytes(4)), sys.byteorder)
    except OSError:
        return 0
