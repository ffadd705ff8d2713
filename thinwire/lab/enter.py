"""Become a process of a host: enter its network, then run a command in our place.

Runs in a bare interpreter, because a user namespace can be entered only by a process with one thread.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from thinwire.lab.namespaces import CLONE_NEWNET, CLONE_NEWUSER, cookie, setns


def main(arguments: Sequence[str]) -> None:
    action, *rest = arguments
    if action == "run":
        user, network, parent, *command = rest
        run(int(user), int(network), int(parent), command)
    else:
        print(cookie_of(int(rest[0])))


def run(user: int, network: int, parent: int, command: Sequence[str]) -> None:
    """Enter the namespaces behind two descriptors (`user` is -1 for none), then be `command`."""
    if user >= 0:
        setns(user, CLONE_NEWUSER)
        os.close(user)
    setns(network, CLONE_NEWNET)
    os.close(network)
    # Whoever ends a lab kills the processes that it finds in the hosts. If ours came too late to be found, it is on us.
    if os.getppid() != parent:
        os._exit(1)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        print(f"cannot run {command[0]!r}: {error.strerror}", file=sys.stderr)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def cookie_of(pid: int) -> int:
    """The cookie of the network that a process lives in."""
    if os.stat(f"/proc/{pid}/ns/user").st_ino != os.stat("/proc/self/ns/user").st_ino:
        network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        setns(os.open(f"/proc/{pid}/ns/user", os.O_RDONLY), CLONE_NEWUSER)
    else:
        network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    setns(network, CLONE_NEWNET)
    return cookie()
