"""What `thinwire doctor` makes of numbers, without a network; and what it says of this machine alone."""

from __future__ import annotations

import itertools
import json
import secrets
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire.cli import app
from thinwire.control.prices import Prices, Way, ways
from thinwire.jobs.doctor import diagnosis, findings, host
from thinwire.jobs.doctor.findings import OK, PROBLEM, Finding, Paths
from thinwire.jobs.doctor.host import Choice, Host, this_host
from thinwire.jobs.doctor.pair import PAIR_SECONDS, Place, Post, Seen, examine
from thinwire.jobs.doctor.together import World, one_of_each_machine, tournament
from thinwire.types import Network

runner = CliRunner()

FAST, SLOW = 12.5e6, 1.25e6
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ranks, and no lab."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(diagnosis, "_lab", lambda: Finding(OK, "lab", "it runs"))


def paths(
    ranks: int, *, rate: dict[tuple[int, int], float] | None = None, **others: dict[tuple[int, int], float]
) -> Paths:
    """All alike, 5 ms and 100 Mbit/s, except for what is given by direction; `later` is of one-way latency."""
    clocks = [1000.0 * i for i in range(ranks)]
    later, lost, packet = (others.get(name, {}) for name in ("later", "lost", "packet"))
    seen = {}
    for i, j in itertools.permutations(range(ranks), 2):
        there, back = 0.005 + later.get((i, j), 0.0), 0.005 + later.get((j, i), 0.0)
        came = (rate or {}).get((j, i), FAST)
        seen[i, j] = Seen(
            peer=j,
            round_trip=there + back if i < j else None,
            ahead=there - back + 2 * (clocks[j] - clocks[i]) if i < j else None,
            rate=came,
            moved=0.7 * came,
            packet=int(packet.get((i, j), 9000)),
            known=9000,
            lost=lost.get((j, i), 0.0),
        )
    return Paths(range(ranks), seen)


def some_host(rank: int = 0, **changes: object) -> Host:
    usual = replace(
        this_host(), rank=rank, machine=f"machine {rank}", ours=WIRE, gloo=WIRE, others=(("eth0", "10.0.0.1"),)
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


WIRE = Choice("eth0", "10.0.0.1", "GLOO_SOCKET_IFNAME names it")
LOCAL = Choice("lo", "127.0.1.1", "the host name node stands for it")


def problems(found: list[Finding]) -> list[tuple[str, str]]:
    return [(each.kind, each.where) for each in found if each.mark == PROBLEM]


# --- paths


def test_a_network_without_faults_has_no_problem() -> None:
    well = paths(4)
    found = [*findings.rates(well), *findings.losses(well), *findings.packets(well, dict.fromkeys(range(4), 9000))]
    assert problems([*found, *findings.later_one_way(well), *findings.reachability(well)]) == []


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_a_host_with_a_tenth_of_the_others_rate_is_found_and_nobody_else(ranks: int) -> None:
    slow = dict.fromkeys([(i, j) for i, j in itertools.permutations(range(ranks), 2) if 2 in (i, j)], SLOW)
    [found] = findings.rates(paths(ranks, rate=slow))
    assert (found.kind, found.where) == ("slow-host", "rank 2")
    assert "10 Mbit/s where the others have 100 Mbit/s (a tenth of it)" in found.text


def test_of_two_hosts_nobody_says_which_is_slow() -> None:
    assert problems(findings.rates(paths(2, rate={(0, 1): SLOW, (1, 0): SLOW}))) == []


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_way_that_is_slower_than_the_way_back_is_found(ranks: int) -> None:
    found = findings.rates(paths(ranks, rate={(1, 0): SLOW}))
    assert problems(found) == [("asymmetric-pair", "rank 1 -> rank 0")]


@pytest.mark.parametrize(("index", "word"), [(0, "rank 1 sends at"), (1, "rank 1 receives at")])
def test_a_line_that_is_slower_one_way_is_one_problem_of_its_host(index: int, word: str) -> None:
    slow = {way: SLOW for way in itertools.permutations(range(4), 2) if way[index] == 1}
    [found] = findings.rates(paths(4, rate=slow))
    assert (found.kind, found.where) == ("asymmetric-host", "rank 1")
    assert word in found.text


def test_with_four_hosts_a_way_that_is_later_than_the_way_back_is_found_whatever_the_clocks_say() -> None:
    [found] = findings.later_one_way(paths(4, later={(3, 1): 0.02}))
    assert (found.kind, found.where) == ("asymmetric-latency", "rank 3 -> rank 1")
    assert "20 ms longer" in found.text and "guess" in found.advice


def test_with_three_hosts_it_is_one_of_three_ways_and_with_two_nothing_is_claimed() -> None:
    [found] = findings.later_one_way(paths(3, later={(0, 1): 0.02}))
    assert "of the ways between ranks 0, 1, 2 one seems 20 ms longer" in found.text
    assert findings.later_one_way(paths(2, later={(0, 1): 0.02})) == []


def test_losses_one_way_are_a_problem_and_both_ways_a_note() -> None:
    assert problems(findings.losses(paths(3, lost={(0, 1): 0.05}))) == [("asymmetric-pair", "rank 0 -> rank 1")]
    everywhere = dict.fromkeys(itertools.permutations(range(3), 2), 0.05)
    [note] = findings.losses(paths(3, lost=everywhere))
    assert note.mark == "note" and "every way loses packets, at worst 5%" in note.text


def test_large_packets_that_vanish_are_found_unless_the_kernel_knows() -> None:
    mtus = dict.fromkeys(range(3), 9000)
    small = {way: 1500 for way in itertools.permutations(range(3), 2) if 2 in way}
    [found] = findings.packets(paths(3, packet=small), mtus)
    assert found.kind == "mtu" and "every way to and from rank 2" in found.text
    assert "1500 bytes pass, 2000 do not" in found.text and "mtu 1500" in found.advice
    known = {way: Seen(peer=way[1], packet=1500, known=1500) for way in itertools.permutations(range(2), 2)}
    assert problems(findings.packets(Paths([0, 1], known), mtus)) == []


def test_buffers_that_are_smaller_than_what_the_path_holds_are_found() -> None:
    hosts = [some_host(rank, buffers=(100_000, 100_000)) for rank in range(2)]
    found = findings.tcp(hosts, paths(2))  # which holds 125 kB
    assert [each.kind for each in found if each.mark == PROBLEM] == ["buffers"]
    assert "tcp_rmem='4096 131072 500000'" in found[-1].advice
    assert problems(findings.tcp([replace(host, buffers=(4 << 20, 4 << 20)) for host in hosts], paths(2))) == []


def test_a_pair_that_could_not_finish_is_told_in_its_own_words() -> None:
    broken = {(0, 1): Seen(peer=1, failure="rank 0 and rank 1: rank 0 cannot connect to rank 1 at 10.0.0.2 port 7.")}
    [found] = findings.reachability(Paths([0, 1], broken))
    assert (found.kind, found.where) == ("unreachable", "ranks 0 and 1")
    assert "cannot connect to rank 1 at 10.0.0.2" in found.text


# --- machines


def test_loopback_on_several_machines_is_a_problem_and_on_one_a_note() -> None:
    hosts = [some_host(0, ours=LOCAL, gloo=LOCAL), some_host(1)]
    found = findings.interface(hosts, several=True)
    assert ("loopback", "rank 0") in problems(found)
    assert any("GLOO_SOCKET_IFNAME=eth0" in each.advice for each in found if each.mark == PROBLEM)
    assert problems(findings.interface(hosts[:1], several=False)) == []


def test_gloo_on_loopback_is_a_problem_although_our_own_links_are_not() -> None:
    found = findings.interface([some_host(gloo=LOCAL)], several=True)
    assert [each.text for each in found if each.mark == PROBLEM] == [
        "gloo would use loopback (127.0.1.1) on rank 0, where no other machine can reach it: "
        "the host name node stands for it"
    ]


def test_the_name_in_etc_hosts_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "hosts"
    file.write_text("127.0.0.1 localhost\n127.0.1.1 node.home node # of the installer\n10.0.0.7 other\n")
    monkeypatch.setattr(host, "HOSTS_FILE", file)
    monkeypatch.setattr(socket, "gethostname", lambda: "node")
    assert this_host().named_locally == "127.0.1.1"


def test_too_many_threads_and_unequal_versions_are_problems() -> None:
    crowd = [some_host(rank, machine="one", cores=8, threads=8) for rank in range(4)]
    [threads, *_] = findings.machine(crowd, 4, 4)
    assert threads.mark == PROBLEM and "OMP_NUM_THREADS=2" in threads.advice
    mixed = [
        some_host(0, threads=1),
        some_host(1, threads=1, versions={"torch": "2.12", "thinwire": "0", "python": "3"}),
    ]
    assert [kind for kind, _ in problems(findings.machine(mixed, 2, 1))] == ["versions", "versions"]


def test_a_small_limit_of_open_files_is_a_problem() -> None:
    assert ("files", "this host") in problems(findings.machine([some_host(open_files=64)], 8, 1))


def test_a_host_survives_its_trip_through_the_store() -> None:
    here = this_host()
    assert Host.from_json(json.loads(json.dumps(here.to_json()))) == here


# --- who with whom


@pytest.mark.parametrize("ranks", range(2, 10))
def test_everybody_meets_everybody_once_and_one_at_a_time(ranks: int) -> None:
    turns = tournament(range(ranks))
    assert len(turns) == ranks - 1 + ranks % 2
    assert sorted(met for turn in turns for met in turn) == list(itertools.combinations(range(ranks), 2))
    assert all(len({rank for met in turn for rank in met}) == 2 * len(turn) for turn in turns)


def test_only_one_rank_of_each_machine_measures() -> None:
    places = [Place(rank, "10.0.0.1", 1, 2, 1500, f"machine {rank // 2}") for rank in range(6)]
    assert list(one_of_each_machine(places)) == [0, 2, 4]
    assert list(one_of_each_machine([place._replace(machine="one") for place in places])) == [0, 1, 2, 3, 4, 5]


def test_two_ranks_measure_each_other_over_loopback() -> None:
    run = secrets.token_hex(16)
    with Post("127.0.0.1") as first, Post("127.0.0.1") as second:
        posts = (first, second)
        places = [Place(rank, "127.0.0.1", *post.ports, 1500, f"machine {rank}") for rank, post in enumerate(posts)]
        seen: dict[int, Seen] = {}

        def follow() -> None:
            seen[1] = examine(second, places[1], places[0], run)

        other = threading.Thread(target=follow)
        other.start()
        seen[0] = examine(first, places[0], places[1], run)
        other.join()
    both = Paths([0, 1], {(0, 1): seen[0], (1, 0): seen[1]})
    assert both.failures() == {}
    assert both.packet == {(0, 1): 1500, (1, 0): 1500}
    assert both.lost == {(0, 1): 0, (1, 0): 0}
    assert 0 < both.round_trip[0, 1] < 0.1 and min(both.rate.values()) > 1e6


def test_a_peer_that_never_comes_is_named_in_bounded_time() -> None:
    with Post("127.0.0.1") as post:
        me = Place(1, "127.0.0.1", *post.ports, 1500, "here")
        begin = time.monotonic()
        seen = examine(post, me, me._replace(rank=0), secrets.token_hex(16))
    assert time.monotonic() - begin < PAIR_SECONDS + 1
    assert seen.failure.startswith("rank 1 and rank 0: rank 1 was not called by rank 0 at 127.0.0.1 port")


def test_a_stranger_is_hung_up_on() -> None:
    with Post("127.0.0.1") as post:
        me = Place(1, "127.0.0.1", *post.ports, 1500, "here")
        with socket.create_connection(("127.0.0.1", me.port)) as stranger:
            stranger.sendall(b'{"run": "", "rank": 0, "what": "talk"}\n')
            seen = examine(post, me, me._replace(rank=0), secrets.token_hex(16))
            assert stranger.recv(1) == b""
    assert "was not called by rank 0" in seen.failure


# --- the whole


def test_the_plan_is_for_the_measured_network() -> None:
    hosts = tuple(some_host(rank, threads=1, open_files=4096) for rank in range(4))
    fine = diagnosis.diagnose(World(world_size=4, hosts=hosts, paths=paths(4)), 1_000_000)
    figures = fine.to_json()
    assert figures["latency_ms"][0] == [None, 5, 5, 5] and figures["rate_mbit"][1] == [100, None, 100, 100]
    assert figures["plan"]["latency_ms"] == pytest.approx(5) and figures["plan"]["rate_mbit"] == pytest.approx(100)
    dense = Prices(1_000_000, 4, 4, ways(4, has_group=True)).seconds(
        Way("dense", "torch", "tree"), 1.0, Network(alpha=5e-3, beta=8e-8)
    )
    assert figures["plan"]["dense_ms"] == pytest.approx(dense * 1e3, rel=0.1)  # there may be a better way than torch's
    assert figures["plan"]["exchange_ms"] < figures["plan"]["dense_ms"] / 2
    assert figures["problems"] == []


def test_alone_it_says_how_to_measure_and_its_figures_stand_alone() -> None:
    result = runner.invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    assert "torchrun --nnodes 2" in result.stderr
    assert "torchrun --nnodes 2" in runner.invoke(app, ["doctor"]).stdout
    figures = json.loads(result.stdout)
    assert figures["latency_ms"] == [] and figures["plan"] is None and figures["problems"] == []


def test_alone_an_interface_that_does_not_exist_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "names the interface 'eth77'; this host has lo" in result.output


@pytest.mark.parametrize("ranks", [{"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "0"}, {"RANK": "x", "WORLD_SIZE": "2"}])
def test_an_environment_that_says_nonsense_is_one_sentence(
    ranks: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    result = runner.invoke(app, ["doctor"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("thinwire doctor: RANK=") and result.stderr.count("\n") == 1


def test_a_store_that_nobody_keeps_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.jobs.doctor.together.LATER_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    result = runner.invoke(app, ["doctor", "--wait", "1"])
    assert result.exit_code == 1
    assert f"rank 1 could not reach rank 0's store at 127.0.0.1 port {port}" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_port_in_use_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        result = runner.invoke(app, ["doctor", "--wait", "1"])
    assert result.exit_code == 1
    assert f"port {port} of 127.0.0.1 is in use: choose another MASTER_PORT." in result.stderr
