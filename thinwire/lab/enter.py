"""Become a process of a host: enter its network, then run a command in our place.

Runs in a bare interpreter, because a user namespace can be entered only by a process with one thread.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from thinwire.lab.namespaces import CLONE_NEWNET, CLONE_NEWUSER, HOSTS_FILE, cookie, setns, show_instead


def main(arguments: Sequence[str]) -> None:
    action, *rest = arguments
    if action == "run":
        user, network, names, parent, *command = rest
        run(int(user), int(network), names, int(parent), command)
    else:
        print(cookie_of(int(rest[0])))


def run(user: int, network: int, names: str, parent: int, command: Sequence[str]) -> None:
    """Enter the namespaces behind two descriptors (`user` is -1 for none), then be `command`.

    `names` is the file that is /etc/hosts there. Programs look up the names of their peers, and without an answer they
    wait or complain, because a lab has no name server.
    """
    if user >= 0:
        setns(user, CLONE_NEWUSER)
        os.close(user)
    setns(network, CLONE_NEWNET)
    os.close(network)
    # Whoever ends a lab removes the names, and then kills the processes that it finds in the hosts. If ours came too
    # late to be found, it is on us.
    if os.getppid() != parent or not os.path.exists(names):
        os._exit(1)
    with suppress(OSError):  # a sandbox that forbids mounts: then addresses have no names
        show_instead(names, HOSTS_FILE)
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
