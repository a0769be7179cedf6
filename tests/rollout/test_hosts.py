"""Two processes sample apart and meet at the update, whatever one of them waits for."""

import json
import pathlib
import socket
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).with_name("host_program.py")


@pytest.fixture(scope="module")
def hosts():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    runs = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(i), str(port)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    found = []
    try:
        for run in runs:
            out, errors = run.communicate(timeout=400)
            assert run.returncode == 0, errors[-3000:]
            found.append(json.loads(out.strip().splitlines()[-1]))
    finally:
        for run in runs:
            run.kill()
    return found


@pytest.mark.case("A-J1")
@pytest.mark.case("A-J2")
def test_a_hanging_tool_holds_up_its_own_host_until_the_deadline(hosts):
    (quick, _), (slow, _) = (host["rounds"] for host in hosts)
    assert all(host["is_spread"] for host in hosts)
    assert slow["failed"] > 0 == quick["failed"]
    assert quick["sampled_s"] < slow["sampled_s"] and slow["sampled_s"] >= 5.0
    # The first was done and waited at the update until the deadline freed the second.
    assert quick["met_s"] > quick["sampled_s"] + 0.5
    assert quick["total"] == slow["total"] == 4 * 4


@pytest.mark.case("A-S18")
def test_episodes_do_not_depend_on_the_host_that_samples_them(hosts):
    (first, all_here), (_, none) = (host["rounds"] for host in hosts)
    assert none["ids"] == {} and none["total"] == all_here["total"] == 16
    assert len(all_here["ids"]) == 16
    for name, ids in first["ids"].items():
        assert all_here["ids"][name] == ids
