"""How ranks come together: who is missing, who is a stranger, and under which address one is found."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest
import torch.distributed as dist

from tests.process.launch import LoopbackStore, run_ranks
from tests.process.links import number, raised_by, wait_all
from thinwire.errors import LinkTimeout
from thinwire.link import address, rendezvous
from thinwire.link.frames import HELLO_BYTES, MAGIC, Hello, decode_hello, encode_hello
from thinwire.link.tcp import TcpLink

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


def build_two_of_three(rank: int) -> tuple[str, str]:
    if rank == 2:
        return "", ""
    return raised_by(lambda: TcpLink(timeout=1.0))


def test_ranks_that_do_not_come_are_named() -> None:
    for error, text in run_ranks(build_two_of_three, 3)[:2]:
        assert error == "LinkTimeout" and text.endswith("missing rank 2.")


def call_a_stranger_first(rank: int) -> float:
    strangers = []
    if rank == 1:
        host, port = dist.group.WORLD.get_group_store().get("thinwire/tcp/1/address/0").decode().split()
        for words in (b"GET / HTTP/1.0\r\n\r\n" * 10, MAGIC, b"", os.urandom(5000), bytes(HELLO_BYTES)):
            strangers.append(socket.create_connection((host, int(port))))
            strangers[-1].sendall(words)
    link = TcpLink(timeout=20)
    wait_all([link.send(number(rank), 1 - rank), link.post(received := number(), 1 - rank)])
    link.close()
    for stranger in strangers:
        stranger.close()
    return received.item()


def test_strangers_at_the_listener_do_not_disturb() -> None:
    assert run_ranks(call_a_stranger_first, 2) == [1.0, 0.0]


class Listening:
    """Rank 0 of 3, waiting for ranks 1 and 2 in a thread."""

    hello = Hello(b"this-run", 0, 3)

    def __enter__(self) -> Listening:
        meeting = rendezvous._Meeting(self.hello, time.monotonic() + 20, 20)
        self.listener = rendezvous._listen("127.0.0.1", 3)
        self.sockets: dict[int, socket.socket] = {}
        self.thread = threading.Thread(target=rendezvous._accept, args=(self.listener, self.sockets, meeting))
        self.thread.start()
        return self

    def call(self, words: bytes) -> socket.socket:
        caller = socket.create_connection(self.listener.getsockname(), timeout=10)
        caller.sendall(words)
        return caller

    def rank_joins(self, rank: int) -> None:
        with self.call(encode_hello(self.hello._replace(rank=rank))) as caller:
            assert decode_hello(caller.recv(HELLO_BYTES)) == self.hello

    def __exit__(self, *_: object) -> None:
        self.rank_joins(2)
        self.thread.join()
        assert set(self.sockets) == {1, 2}
        for each in (self.listener, *self.sockets.values()):
            each.close()


STRANGERS = {
    "garbage": b"\xff" * HELLO_BYTES,
    "another version": MAGIC + b"\x63" + encode_hello(Listening.hello._replace(rank=2))[5:],
    "another run": encode_hello(Hello(b"that-run", 2, 3)),
    "another world size": encode_hello(Hello(b"this-run", 2, 4)),
    "a rank out of range": encode_hello(Hello(b"this-run", 3, 3)),
    "a rank that should be called": encode_hello(Hello(b"this-run", 0, 3)),
    "a rank that is there already": encode_hello(Hello(b"this-run", 1, 3)),
}


@pytest.mark.parametrize("words", STRANGERS.values(), ids=STRANGERS)
def test_a_caller_with_a_wrong_hello_is_hung_up_on(words: bytes) -> None:
    with Listening() as listening:
        listening.rank_joins(1)
        with listening.call(words) as stranger:
            assert stranger.recv(1) == b""


def test_a_silent_caller_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "HELLO_SECONDS", 0.1)
    with Listening() as listening:
        listening.rank_joins(1)
        with listening.call(MAGIC) as stranger:
            assert stranger.recv(1) == b""


def test_hundreds_of_silent_callers_keep_nobody_out() -> None:
    with Listening() as listening:
        callers = [listening.call(b"") for _ in range(400)]
        listening.rank_joins(1)
        for caller in callers:
            caller.close()


def test_an_unknown_interface_lists_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0,lo")
    with pytest.raises(ValueError, match=r"'nowhere0'; this host has .*\blo\b"):
        address.own_address()


def test_the_interface_or_the_way_to_the_master_gives_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert address.own_address() == "127.0.0.1"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert address.own_address() == "127.0.0.1"


def test_the_store_leads_to_the_peers_when_no_master_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere.invalid")
    with LoopbackStore() as running:
        store = dist.PrefixStore("group", dist.PrefixStore("default", dist.TCPStore("127.0.0.1", running.port)))
        assert address.own_address(store) == "127.0.0.1"


def test_a_way_out_of_this_host_is_preferred_to_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(address, "_host_of", lambda store: store)
    monkeypatch.setattr(address, "_address_towards", {"localhost": "127.0.0.1", "a": "10.0.0.1", "b": "10.0.0.2"}.get)
    for store, master, chosen in (
        ("localhost", "a", "10.0.0.1"),
        ("a", "localhost", "10.0.0.1"),
        ("a", "b", "10.0.0.1"),
        ("localhost", "localhost", "127.0.0.1"),
    ):
        monkeypatch.setenv("MASTER_ADDR", master)
        assert address.own_address(store) == chosen


def test_a_rank_that_cannot_be_reached_is_named_with_its_address() -> None:
    meeting = rendezvous._Meeting(Hello(b"this-run", 1, 2), time.monotonic() + 0.2, 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
    with pytest.raises(LinkTimeout, match=rf"could not connect to {host} port {port} within 0\.2 s: missing rank 0\."):
        rendezvous._connect((host, port), 0, meeting)
    with rendezvous._listen("127.0.0.1", 2) as silent, pytest.raises(LinkTimeout) as caught:
        rendezvous._accept(silent, {}, meeting._replace(hello=Hello(b"this-run", 0, 2)))
    assert "was not called at 127.0.0.1 port " in str(caught.value) and str(caught.value).endswith("missing rank 1.")


def test_loopback_beside_a_real_address_is_refused_with_the_ranks_and_the_way_out() -> None:
    with pytest.raises(RuntimeError, match=r"ranks 0, 2 .*127\.0\.1\.1.* rank 1 .*GLOO_SOCKET_IFNAME"):
        address.refuse_mixed_loopback({0: "127.0.1.1", 1: "10.0.0.7", 2: "127.0.1.1"})
    address.refuse_mixed_loopback({0: "127.0.0.1", 1: "127.0.0.1"})
    address.refuse_mixed_loopback({0: "10.0.0.7", 1: "fd00::7"})
