"""Replicas that come and go through torchft: processes that die, come back, or are late."""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import zlib
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from threading import Thread
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

from curvadion import (
    RMMC,
    CodedGradients,
    CurvaDion,
    Dion,
    FixedPeriod,
    LowRank,
    QuantizedAverage,
    Replicated,
    TailAverage,
)
from curvadion.comm.lost import MemberLost
from curvadion.layout.dtensor import local
from support.runs import distributed, toy

pytest.importorskip("torchft")

from torchft import _torchft
from torchft.coordination import LighthouseServer

from curvadion.integrations.torchft import client
from curvadion.integrations.torchft.client import name_of
from curvadion.integrations.torchft.lighthouse import living

# Frameworks leave torchrun's variables in the environment of workers, by which torchft would go.
pytestmark = pytest.mark.usefixtures("own_workers")
PERIOD = 4


# -------------------------------------------------------------------- a Lighthouse and its replicas


@pytest.fixture(scope="module")
def lighthouse():
    server = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=400, heartbeat_timeout_ms=1000
    )
    yield server.address()
    server.shutdown()


@pytest.fixture
def patient():
    """A Lighthouse that waits for all who are alive, however busy the machine."""
    server = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=30_000, heartbeat_timeout_ms=10_000
    )
    yield server.address()
    server.shutdown()


def replicas_of(address, name, **more):
    from curvadion.integrations.torchft import ElasticReplicas

    logging.disable(logging.WARNING)
    os.environ["TORCHFT_LIGHTHOUSE"] = address
    return ElasticReplicas(replica_id=name, **{"timeout": 5.0, "quorum_timeout": 60.0, **more})


def optimizer_of(model, kind, replicas, **more):
    if kind == "adamw":
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        return Replicated(inner, replicas=replicas, **more)
    return CurvaDion(toy.groups(model), lr=0.02, replicas=replicas, **more)


# -------------------------------------------------------------------- members that stay

STAYING = {
    "polar, two fragments": ("dion", {"sync": QuantizedAverage(fragments=2)}),
    "low rank": ("dion", {"sync": QuantizedAverage(), "direction": "low_rank"}),
    "a budget": ("dion", {"wire_budget": 0.3}),
    "torch's AdamW": ("adamw", {"sync": QuantizedAverage(bits=(2, 4))}),
    "a delay, two fragments": (
        "dion",
        {"sync": QuantizedAverage(bits=(1, 2), fragments=2, delay=2)},
    ),
    "gradients in codes": ("dion", {"sync": CodedGradients()}),
}


def stay(rank, address, how):
    """Weights and states of a run with a process group, and of one with members that stay."""
    kind, given = STAYING[how]
    found = []
    for elastic in (False, True):
        model, replicas = toy.model(), dist.group.WORLD
        if elastic:
            replicas = replicas_of(address, f"{how} {rank}", min_replicas=3)
        given = {"gate": FixedPeriod(PERIOD), **copy.deepcopy(given)}
        if "wire_budget" in given or isinstance(given["sync"], CodedGradients):
            given.pop("gate")
        optimizer = optimizer_of(model, kind, replicas, **given)
        if elastic:
            replicas.start(optimizer)
        toy.train(model, optimizer, range(14), rank)
        optimizer.sync.settle()
        found.append(toy.held(model, optimizer))
        dist.barrier()
        if elastic:
            optimizer.synchronize()
            replicas.close()
    plain, with_members = found
    assert plain.keys() == with_members.keys()
    differ = [key for key, value in plain.items() if not value.equal(with_members[key])]
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    return differ, zlib.crc32(weights.numpy())


@pytest.mark.parametrize("how", STAYING)
def test_members_that_stay_take_the_trajectory_of_a_process_group_bitwise(patient, how):
    found = distributed.run(3, stay, patient, how)
    assert [differ for differ, _ in found] == [[], [], []]
    assert len({weights for _, weights in found}) == 1  # after synchronize()


def sharded_replicas(address, name, mesh, **more):
    """Replicas of several ranks, with the environment that torchrun gives to each of them."""
    shards = mesh["shards"]
    port = torch.tensor([0])
    if shards.get_local_rank() == 0:
        stores.append(TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
        port.fill_(stores[-1].port)
    dist.broadcast(port, group=shards.get_group(), group_src=0)
    names = {"RANK": shards.get_local_rank(), "WORLD_SIZE": 2, "MASTER_PORT": int(port)}
    names = {k: str(v) for k, v in names.items()}
    with mock.patch.dict(os.environ, names, MASTER_ADDR="localhost"):
        return replicas_of(address, name, **more)


stores = []  # which live as long as the process


def stay_sharded(rank, address, how):
    """The same for two replicas of two ranks each, whose weights FSDP2 shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    replica = rank // 2
    kind, given = STAYING[how]
    found = []
    for elastic in (False, True):
        model, replicas = toy.model(), mesh["replicas"].get_group()
        fully_shard(model, mesh=mesh["shards"])
        if elastic:
            replicas = sharded_replicas(address, f"{how} sharded {replica}", mesh, min_replicas=2)
        optimizer = optimizer_of(
            model, kind, replicas, **{"gate": FixedPeriod(PERIOD), **copy.deepcopy(given)}
        )
        if elastic:
            replicas.start(optimizer)
        toy.train(model, optimizer, range(14), replica)
        optimizer.sync.settle()
        found.append(toy.held(model, optimizer))
        dist.barrier()
        if elastic:
            replicas.close()
    plain, with_members = found
    return [key for key, value in plain.items() if not value.equal(with_members[key])]


@pytest.mark.parametrize("how", ["polar, two fragments", "a delay, two fragments", "torch's AdamW"])
def test_so_do_replicas_of_several_ranks(patient, how):
    assert distributed.run(4, stay_sharded, patient, how) == [[], [], [], []]


def wait_for_a_slow_one(rank, address):
    """Two replicas of two ranks; the second takes a long step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    replica = mesh["replicas"].get_local_rank()
    model = toy.model()
    fully_shard(model, mesh=mesh["shards"])
    replicas = sharded_replicas(address, f"patient {replica}", mesh, min_replicas=2, patience=0.1)
    gate, sync = FixedPeriod(PERIOD), QuantizedAverage(fragments=2, delay=1)
    optimizer = optimizer_of(model, "dion", replicas, gate=gate, sync=sync)
    replicas.start(optimizer)
    longest = 0
    while replicas.openings < 6:
        if replica == 1 and replicas.openings == 3:
            time.sleep(0.4)
        if rank == 1 and replicas.openings == 5:
            replicas.leave()
        time.sleep(0.02)
        toy.train(model, optimizer, [optimizer.progress.steps], replica)
        longest = max(longest, optimizer.progress.local_steps)
    anchors = [local(optimizer.state[p]["anchor"]).flatten() for p in model.parameters()]
    dist.barrier()
    replicas.close()
    return longest, zlib.crc32(torch.cat(anchors).numpy()), replicas.leaving


def test_a_replica_whose_patience_ends_trains_on_until_others_come(patient):
    ranks = distributed.run(4, wait_for_a_slow_one, patient)
    longest, anchors, leaving = zip(*ranks, strict=True)
    assert longest[0] == longest[1] > 2 * PERIOD
    assert anchors[:2] == anchors[2:]
    assert leaving == (True, True, False, False)  # one of its two ranks has been asked to


# -------------------------------------------------------------------- members that die


DYING = {
    "dion": {"gate": FixedPeriod(PERIOD), "sync": QuantizedAverage(bits=(1, 2), fragments=2)},
    "delay": {"gate": FixedPeriod(PERIOD), "sync": QuantizedAverage(fragments=2, delay=2)},
    "gradients": {"sync": CodedGradients()},
}


def live(slot, address, folder, kind, dies_at, begins):
    """Train until a file says that it is enough; a line for each opening and what happened."""
    torch.set_num_threads(1)
    model = toy.model()
    replicas = replicas_of(address, f"{kind} {slot}", begins=begins, kept=40)
    optimizer = optimizer_of(model, kind, replicas, **DYING[kind])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.9)
    replicas.start(optimizer, scheduler=scheduler, model=model)
    log = Path(folder, f"{slot} {os.getpid()}").open("a", buffering=1)  # noqa: SIM115
    started = {"started": optimizer.progress.steps, "rate": scheduler.get_last_lr()[0]}
    agreed = agreed_on(optimizer, model)
    started["anchored"] = kind == "delay" or agreed.equal(
        nn.utils.parameters_to_vector(model.parameters())
    )
    print(json.dumps(started), file=log)

    def snapshot():
        states = [optimizer.state[p] for p in model.parameters()]
        held = [v for s in states for v in s.values() if isinstance(v, torch.Tensor)]
        return [t.detach().clone() for t in (*held, *model.parameters())]

    watch_openings(replicas, dies_at, snapshot)
    noted, openings, at_start = 0, replicas.openings, len(replicas.events)
    while not Path(folder, "enough").exists():
        step = optimizer.progress.steps
        optimizer.zero_grad()
        toy.loss(model, step, slot).backward()
        optimizer.step()
        scheduler.step()
        if (late := Path(folder, f"late {slot}")).exists():
            late.unlink()
            time.sleep(1.0)
        if replicas.openings != openings:
            openings, digest = replicas.openings, zlib.crc32(agreed_on(optimizer, model).numpy())
            print(json.dumps({"opening": openings, "anchors": digest}), file=log)
        for number, event in enumerate(replicas.events[noted:], noted):
            print(json.dumps({"event": event.kind}), file=log)
            failed = event.kind == "failed" and number >= at_start
            if failed and kind != "delay":
                now = zip(replicas.before, snapshot(), strict=True)
                changed = [i for i, (a, b) in enumerate(now) if not a.equal(b)]
                print(json.dumps({"failed": True, "changed": changed}), file=log)
        noted = len(replicas.events)
        time.sleep(0.03)
    os._exit(0)


def agreed_on(optimizer, model):
    """Anchors, or weights where these never drift."""
    parameters = list(model.parameters())
    agreed = [optimizer.state[p].get("anchor", p.detach()).flatten() for p in parameters]
    return torch.cat(agreed)


def watch_openings(replicas, dies_at, snapshot):
    """Die in an exchange, as by SIGKILL; remember what was held when an opening began."""
    meet, gather = replicas.meet, replicas.gather

    def noted_meet(**how):
        meet(**how)
        replicas.before = snapshot()

    def dying_gather(numbers):
        told = gather(numbers)
        if replicas.openings == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return told

    replicas.meet, replicas.gather = noted_meet, dying_gather


def lines_of(folder, slot):
    return [json.loads(line) for f in sorted(folder.glob(f"{slot} *")) for line in f.open()]


def seen(folder, slot, told, timeout):
    end = time.time() + timeout
    while not any(told(line) for line in lines_of(folder, slot)):
        if time.time() > end:
            return False
        time.sleep(0.05)
    return True


def until(folder, slot, told, timeout=60):
    found = seen(folder, slot, told, timeout)
    assert found, [x for x in lines_of(folder, slot) if "opening" not in x]


@pytest.mark.parametrize("kind", DYING)
def test_others_go_on_when_one_dies_and_take_it_back(lighthouse, tmp_path, kind):
    def start(slot, dies_at=-1, begins=True):
        given = (slot, lighthouse, str(tmp_path), kind, dies_at, begins)
        process = distributed.of_forkserver(live, given)
        process.start()
        return process

    # The third dies in the middle of an opening; when it is back, the second is late.
    # One begins: on a busy machine others might begin a run of their own before they find it.
    running = [start(0), start(1, begins=False), start(2, dies_at=5, begins=False)]
    try:
        running[2].join(60)
        assert running[2].exitcode == -signal.SIGKILL
        until(tmp_path, 0, lambda line: line.get("opening", 0) >= 7)
        running[2] = start(2, begins=False)
        until(tmp_path, 2, lambda line: line.get("started", 0) > 0)
        # Who is late takes over everything where there is nothing of its own to be kept.
        again = "copied" if kind == "gradients" else "caught up"
        for _ in range(6):  # on a busy machine too few others may be found
            Path(tmp_path, "late 1").touch()
            if seen(tmp_path, 1, lambda line: line.get("event") == again, 8):
                break
        until(tmp_path, 1, lambda line: line.get("event") == again, 1)
        last = max(line.get("opening", 0) for line in lines_of(tmp_path, 0))
        for slot in range(3):
            until(tmp_path, slot, lambda line: line.get("opening", 0) >= last + 3)
        Path(tmp_path, "enough").touch()
    finally:
        for process in running:
            process.join(5)
            process.kill()
    told = [lines_of(tmp_path, slot) for slot in range(3)]
    openings = [{x["opening"]: x["anchors"] for x in lines if "opening" in x} for lines in told]
    for number in range(2, last + 3):  # the first was the beginning
        anchors = [of[number] for of in openings if number in of]
        assert anchors and all(each == anchors[0] for each in anchors), number
    events = [line["event"] for line in told[1] if "event" in line]
    failed = [line for line in (*told[0], *told[1]) if "failed" in line]
    assert not any(line["changed"] for line in failed), (failed, events)
    assert failed or kind == "delay", events
    again = max((x for x in told[2] if "started" in x), key=lambda line: line["started"])
    assert again["anchored"]
    assert again["started"] > 20 or kind == "gradients"  # which opens at every step
    assert again["rate"] < 0.02 or kind == "gradients"
    assert all(len(of) > 2 for of in openings)
    if kind != "gradients":
        assert events.count("copied") <= 1  # everything, at the start alone


def take_part(slot, address, folder, how, given):
    """Train until a file says that it is enough, or names the last step; tell each step.

    how: what differs from the others, by name, as below; given: arguments of ElasticReplicas.
    """
    torch.set_num_threads(1)
    replicas, model = replicas_of(address, f"part {slot}", **given), toy.model()
    if how.get("dies") == "connecting":
        replicas._gloo.configure = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    gate, sync = FixedPeriod(PERIOD), QuantizedAverage(delay=how.get("delay", 0))
    optimizer = optimizer_of(model, "adamw", replicas, gate=gate, sync=sync)
    log = Path(folder, f"{slot} {os.getpid()}").open("a", buffering=1)  # noqa: SIM115
    replicas.start(optimizer)
    events = [event.kind for event in replicas.events]
    told = {"started": optimizer.progress.steps, "events": events}
    print(json.dumps({**told, "time": time.time()}), file=log)
    signal.signal(signal.SIGTERM, lambda *_: replicas.leave())
    total, enough = Path(folder, "total"), Path(folder, "enough")
    while not enough.exists() and not replicas.leaving:
        if total.exists() and optimizer.progress.steps >= int(total.read_text()):
            break
        if (late := Path(folder, f"late {slot}")).exists():
            late.unlink()
            if how.get("stops"):
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                time.sleep(1.5)
        toy.train(model, optimizer, [optimizer.progress.steps], slot)
        told = {"step": optimizer.progress.steps, "present": replicas.present}
        told |= {"members": optimizer.report.members, "held up": optimizer.report.opening_seconds}
        if optimizer.report.gate_open:
            told |= {"opening": replicas.openings, "weights": digest_of(model)}
        print(json.dumps({**told, "time": time.time()}), file=log)
        time.sleep(how.get("pause", 0.03))
    if total.exists() or replicas.leaving:
        told = {"drifted": optimizer.drifted}
        optimizer.synchronize()
        told |= {"ended": optimizer.progress.steps, "weights": digest_of(model)}
        print(json.dumps({**told, "events": [event.kind for event in replicas.events]}), file=log)
        replicas.close()
    os._exit(0)


def digest_of(model):
    return zlib.crc32(nn.utils.parameters_to_vector(model.parameters()).detach().numpy())


@contextmanager
def parts(lighthouse, folder, **common):
    """Starts processes of take_part, and ends them: start(slot, how, **given)."""
    running = []

    def start(slot, how=(), **given):
        each = slot, lighthouse, str(folder), dict(how), {**common, **given}
        running.append(distributed.of_forkserver(take_part, each))
        running[-1].start()
        return running[-1]

    try:
        yield start
    finally:
        Path(folder, "enough").touch()
        for process in running:
            process.join(5)
            process.kill()


def longest_gap(lines):
    times = [line["time"] for line in lines]
    return max(b - a for a, b in pairwise(times))


def test_a_newcomer_that_dies_before_it_connects_costs_the_others_little(lighthouse, tmp_path):
    given = {"timeout": 30.0, "connect_timeout": 1.0}
    with parts(lighthouse, tmp_path) as start:
        start(1, **given)
        until(tmp_path, 1, lambda line: "step" in line)
        newcomer = start(0, {"dies": "connecting"}, begins=False, **given)
        newcomer.join(60)
        assert newcomer.exitcode == -signal.SIGKILL
        steps = max(line["step"] for line in lines_of(tmp_path, 1) if "step" in line)
        until(tmp_path, 1, lambda line: line.get("step", 0) > steps + 3 * PERIOD)
    assert longest_gap(lines_of(tmp_path, 1)) < 15.0


def lose_a_neighbour(rank, address, delay):
    """Of five members one is lost in the second opening; the seconds until all have opened again.

    With a delay, the lost one's means are due only when the others have gone on.
    """
    replicas = replicas_of(address, str(rank), min_replicas=5, timeout=60.0)
    model = toy.model()
    gate, sync = FixedPeriod(PERIOD), QuantizedAverage(delay=delay)
    optimizer = optimizer_of(model, "dion", replicas, gate=gate, sync=sync)
    replicas.start(optimizer)
    toy.train(model, optimizer, range(PERIOD + delay), rank)

    def lose(*_):
        """As if this member had lost the others while they wait for it."""
        time.sleep(0.3)
        raise MemberLost("the connections are gone")

    def gather(numbers):
        del replicas._all_gather
        lose(numbers)

    def begin(what, exchange):
        del replicas.begin
        return replicas.begin(what, lambda: lose(exchange))

    if rank == 4 and delay:
        replicas.begin = begin
    elif rank == 4:
        replicas._all_gather = gather
    begun = time.monotonic()
    last = 2 * PERIOD + (0 if rank == 4 else delay)
    toy.train(model, optimizer, range(PERIOD + delay, last), rank)
    dist.barrier()
    toy.train(model, optimizer, range(last, 3 * PERIOD + delay), rank)
    took = time.monotonic() - begun
    openings = replicas.openings
    dist.barrier()
    optimizer.synchronize()
    replicas.close()
    return took, openings, zlib.crc32(agreed_on(optimizer, model).numpy())


@pytest.mark.parametrize("delay", [0, 2])
def test_members_that_wait_for_others_learn_of_a_lost_one(patient, delay):
    """With five members in a ring, two do not wait for the lost one or its neighbours."""
    ended = distributed.run(5, lose_a_neighbour, patient, delay)
    assert max(took for took, *_ in ended) < 45.0  # the others of a ring wait for 60 s
    assert len({(openings, weights) for _, openings, weights in ended}) == 1


def pretend_to_be_there(store):
    """Let the member of rank 0 wait for the connection of another one."""
    store.set("present/1", "")
    address = bytearray(store.get("0/0"))
    ip = 20 + int.from_bytes(address[:8], "little")  # after the host's name, a family and a port
    address[ip : ip + 4] = socket.inet_aton("127.255.255.254")  # who has the larger one connects
    store.set("0/1", bytes(address))


@pytest.mark.parametrize(
    ("member", "seconds", "says"),
    [
        ("silent", 0.5, "a member has not answered for"),
        ("unreachable", 1.5, "Connect timeout"),
    ],
)
def test_members_give_up_one_that_does_not_answer(member, seconds, says):
    """Where the others meet nobody answers, or no connection comes about afterwards.

    If nobody listens there, torch's client ends by itself, after a random time.
    """
    from curvadion.integrations.torchft.group import MemberGroup
    from curvadion.integrations.torchft.thread import in_thread

    group = MemberGroup(connect_timeout=timedelta(seconds=seconds), timeout=timedelta(seconds=30))
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        if member == "unreachable":
            in_thread(lambda: pretend_to_be_there(PrefixStore("members", store)))
            port = store.port
        where = f"localhost:{port}/members", "0", 0, 2
        with pytest.raises(RuntimeError, match=says):
            in_thread(lambda: group.configure(*where)).result(timeout=10)
    assert group._pg is None


@pytest.mark.parametrize(("delay", "stops"), [(0, True), (2, False)])
def test_one_that_joins_and_one_that_is_late_end_with_the_others(
    lighthouse, tmp_path, delay, stops
):
    """The late one takes a long step, or is silent until it counts as dead."""
    how, log = {"delay": delay, "stops": stops}, tmp_path / "events.jsonl"
    with parts(lighthouse, tmp_path, event_log=log, kept=40) as start:
        started = [start(0, how), start(1, how, begins=False)]
        until(tmp_path, 0, lambda line: line.get("present") == 2)
        started.append(start(2, how, begins=False))
        until(tmp_path, 0, lambda line: line.get("present") == 3)
        late = Path(tmp_path, "late 1")
        late.touch()
        until(tmp_path, 0, lambda line: not late.exists() and line.get("present") == 2)
        while stops and "part 1" in map(name_of, living(lighthouse)):
            time.sleep(0.1)
        now = time.time()
        until(tmp_path, 0, lambda line: line.get("opening") and line["time"] > now)
        os.kill(started[1].pid, signal.SIGCONT)
        until(tmp_path, 0, lambda line: line.get("present") == 3 and line["time"] > now)
        steps = 1 + PERIOD * (lines_of(tmp_path, 0)[-1]["step"] // PERIOD + 8)
        Path(tmp_path, "new").write_text(str(steps))
        Path(tmp_path, "new").rename(Path(tmp_path, "total"))
        for process in started:
            process.join(60)
    ends = [line for slot in range(3) for line in lines_of(tmp_path, slot) if "ended" in line]
    assert len(ends) == 3
    [(ended, _)] = {(line["ended"], line["weights"]) for line in ends}
    assert steps <= ended < steps + PERIOD  # more if some were late at the last openings
    assert "caught up" in ends[1]["events"]
    assert ends[1]["events"].count("copied") == 1  # when it joined: it has kept all since then
    full = [line for line in lines_of(tmp_path, 0) if line.get("present") == 3]
    assert all(line["members"] == ["part 0", "part 1", "part 2"] for line in full)
    # For the late one at least for the join timeout.
    assert max(line.get("held up", 0.0) for line in lines_of(tmp_path, 0)) > 0.3
    events = [json.loads(line) for line in log.read_text().splitlines()]
    told = {(event["kind"], event["member"], event["replica"]) for event in events}
    assert {
        ("began", "part 0", "part 0"),
        ("joined", "part 1", "part 0"),  # when it was late no more
        ("joined", "part 2", "part 2"),
        ("copied", "part 2", "part 2"),
        ("caught up", "part 1", "part 1"),
        ("left", "part 0", "part 0"),
    } <= told
    assert {("late", "part 1", "part 0"), ("left", "part 1", "part 0")} & told
    for event in events:
        if event["kind"] in ("copied", "caught up"):
            assert event["bytes"] > 0 and event["seconds"] > 0


def test_a_replica_that_is_told_to_end_leaves_after_an_opening(lighthouse, tmp_path):
    with parts(lighthouse, tmp_path) as start:
        start(0)
        leaver = start(1, begins=False)
        until(tmp_path, 1, lambda line: line.get("present") == 2)
        os.kill(leaver.pid, signal.SIGTERM)
        leaver.join(30)
        assert leaver.exitcode == 0
        left = time.time()
        until(tmp_path, 0, lambda line: line.get("present") == 1 and line["time"] > left)
    lines = lines_of(tmp_path, 1)
    [end] = [line for line in lines if "ended" in line]
    assert not end["drifted"]
    assert "leaving" in end["events"]
    last = max(line.get("opening", 0) for line in lines)
    [at_last] = [line for line in lines_of(tmp_path, 0) if line.get("opening") == last]
    assert (at_last["step"], at_last["weights"]) == (end["ended"], end["weights"])


def test_restarted_replicas_wait_for_one_that_lives(lighthouse, tmp_path):
    """Two that may begin a run; the third's openings are further apart than the join timeout."""
    with parts(lighthouse, tmp_path) as start:
        start(2, {"pause": 0.5})
        until(tmp_path, 2, lambda line: line.get("step") == PERIOD)
        start(0)
        start(1)
        for slot in (0, 1):
            until(tmp_path, slot, lambda line: "started" in line)
    for slot in (0, 1):
        [started] = [line for line in lines_of(tmp_path, slot) if "started" in line]
        assert started["started"] >= PERIOD
        # What they hold at first is copied once, however often they ask meanwhile; and not at all
        # by one that comes only when the third one opens.
        assert 1 <= started["events"].count("copied") <= 1 + slot


def live_sharded(replica, shard, port, address, folder, begins):
    """One of two ranks that hold a replica; a line for its start and each opening."""
    torch.set_num_threads(1)
    store = TCPStore("localhost", port, is_master=False)
    dist.init_process_group("gloo", store=PrefixStore("ranks", store), rank=shard, world_size=2)
    names = {"RANK": shard, "WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({k: str(v) for k, v in names.items()}, MASTER_ADDR="localhost")
    model = toy.model()
    fully_shard(model)
    replicas = replicas_of(address, f"sharded {replica}", begins=begins)
    gate, sync = FixedPeriod(PERIOD), QuantizedAverage(fragments=2)
    optimizer = optimizer_of(model, "dion", replicas, gate=gate, sync=sync)
    replicas.start(optimizer)
    log = Path(folder, f"{replica}.{shard} {os.getpid()}").open("a", buffering=1)  # noqa: SIM115
    print(json.dumps({"started": optimizer.progress.steps}), file=log)
    openings = replicas.openings
    while not Path(folder, "enough").exists():
        toy.train(model, optimizer, [optimizer.progress.steps], replica)
        if replicas.openings != openings:
            openings = replicas.openings
            anchors = [local(optimizer.state[p]["anchor"]).flatten() for p in model.parameters()]
            told = {"opening": openings, "anchors": zlib.crc32(torch.cat(anchors).numpy())}
            print(json.dumps(told), file=log)
        time.sleep(0.02)
    os._exit(0)


def test_a_replica_of_several_ranks_comes_back(lighthouse, tmp_path):
    stores = []

    def start(replica, begins=True):
        stores.append(TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
        given = [(replica, k, stores[-1].port, lighthouse, str(tmp_path), begins) for k in (0, 1)]
        processes = [distributed.of_forkserver(live_sharded, each) for each in given]
        for process in processes:
            process.start()
        return processes

    # Two that stay: the ranks of a newcomer take over from one each.
    running = [start(0), start(1, begins=False), start(2, begins=False)]
    try:
        until(tmp_path, "2.0", lambda line: line.get("opening", 0) >= 3)
        for process in running[2]:
            process.kill()
        until(tmp_path, "0.1", lambda line: line.get("opening", 0) >= 6)
        running[2] = start(2, begins=False)
        for rank in ("2.0", "2.1"):
            until(tmp_path, rank, lambda line: line.get("started", 0) > 0)
        last = max(line.get("opening", 0) for line in lines_of(tmp_path, "0.0"))
        for rank in ("0.0", "0.1", "1.0", "1.1", "2.0", "2.1"):
            until(tmp_path, rank, lambda line: line.get("opening", 0) >= last + 3)
        Path(tmp_path, "enough").touch()
    finally:
        for process in (process for replica in running for process in replica):
            process.join(5)
            process.kill()
    started = [
        max(line.get("started", 0) for line in lines_of(tmp_path, rank)) for rank in ("2.0", "2.1")
    ]
    assert started[0] == started[1] > 2 * PERIOD
    for shard in (0, 1):
        told = [lines_of(tmp_path, f"{replica}.{shard}") for replica in range(3)]
        found = [{x["opening"]: x["anchors"] for x in lines if "opening" in x} for lines in told]
        for number in range(2, last + 3):
            anchors = [of[number] for of in found if number in of]
            assert len(set(anchors)) == 1, (shard, number, anchors)


# -------------------------------------------------------------------- runs that begin again


def start_again(rank, address):
    """Two members, and after them three that load the checkpoint of one of the two."""
    saved = [None]
    for run, ranks in (("first", 2), ("again", 3)):
        if rank < ranks:
            model = toy.model()
            replicas = replicas_of(address, f"{run} {rank}", min_replicas=ranks)
            gate, sync = FixedPeriod(PERIOD), QuantizedAverage()
            optimizer = optimizer_of(model, "dion", replicas, gate=gate, sync=sync)
            if saved[0]:
                model.load_state_dict(saved[0]["model"])
                optimizer.load_state_dict(saved[0]["optimizer"])
            replicas.start(optimizer)
            begun = optimizer.progress.steps
            while replicas.openings < 3:  # the first is the beginning
                toy.train(model, optimizer, [optimizer.progress.steps], rank)
            saved = [{"model": model.state_dict(), "optimizer": optimizer.state_dict()}]
        dist.broadcast_object_list(saved, src=0)
        if rank < ranks:
            replicas.close()
    return begun, zlib.crc32(agreed_on(optimizer, model).numpy())


def test_others_in_number_go_on_from_a_checkpoint_of_one(lighthouse):
    one, two, three = distributed.run(3, start_again, lighthouse)
    assert one == two == three and one[0] >= 2 * PERIOD


def begin_alone(rank, address):
    """What the only replica tells of itself, and of another that it has lost."""
    from curvadion.optim import log_lines

    model, replicas = toy.model(), replicas_of(address, "alone")
    given = {"gate": FixedPeriod(PERIOD), "sync": QuantizedAverage()}
    optimizer = optimizer_of(model, "dion", replicas, **given)
    told = []
    logged = mock.patch.object(log_lines, "is_logged", lambda: True)
    kept = mock.patch.object(log_lines.logger, "info", lambda line, *_: told.append(line))
    with logged, kept:
        replicas.start(optimizer)
        toy.train(model, optimizer, [0])
    replicas._note_changes({"alone:0", "lost:0"}, {"alone:0"})
    replicas.close()
    return told, [event.text for event in replicas.events]


def test_one_replica_is_counted_in_the_singular(lighthouse):
    [(told, events)] = distributed.run(1, begin_alone, lighthouse)
    assert any("CurvaDion, 1 replica that comes and goes, of 1 rank: " in line for line in told)
    assert "Beginning a new run at step 0, with 1 member" in events
    assert "lost is gone: 1 member instead of 2" in events


def begin_one(rank, address):
    """A replica that may not begin a run, and one that comes later and begins it."""
    torch.manual_seed(rank)
    model = toy.model()
    for p in model.parameters():
        nn.init.normal_(p)
    replicas = replicas_of(address, "begin", begins=rank == 1)
    gate, sync = FixedPeriod(PERIOD), QuantizedAverage()
    optimizer = optimizer_of(model, "dion", replicas, gate=gate, sync=sync)
    dist.barrier()
    time.sleep(rank)  # the first has met nobody by then
    with mock.patch.object(logging.getLogger("curvadion"), "warning") as warned:
        replicas.start(optimizer)
    [(text, name)] = [call.args for call in warned.call_args_list]
    assert "Two members are called" in text and name == "begin"
    begun = nn.utils.parameters_to_vector(model.parameters()).detach()
    dist.barrier()
    manager = replicas._manager
    interrupted = mock.patch.object(manager, "start_quorum", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        replicas.meet()
    assert replicas.group is None  # others wait no longer
    transport = manager._checkpoint_transport
    replicas.close()
    replicas.close()
    assert [event.kind for event in replicas.events].count("left") == 1
    transport._thread.join(10)
    assert not transport._thread.is_alive()  # it would hold the model
    with pytest.raises(RuntimeError, match=r"replicas.close\(\) has been called"):
        toy.train(model, optimizer, [0], rank)
    return zlib.crc32(begun.numpy()), replicas.openings


# torchft lets others copy from whoever is first by name.
def test_a_replica_that_may_not_begin_waits_for_one_that_does(lighthouse):
    waited, begun = distributed.run(2, begin_one, lighthouse)
    assert waited == begun
    assert begun[1] == 1


# -------------------------------------------------------------------- members that miss something


def differ(rank, address, how):
    """Two members of which the second does something else in the middle of the run."""
    replicas, model = replicas_of(address, f"{how} {rank}", min_replicas=2), toy.model()
    gate, sync = FixedPeriod(PERIOD), QuantizedAverage()
    optimizer = optimizer_of(model, "dion", replicas, gate=gate, sync=sync)
    replicas.start(optimizer)
    for step in range(24):
        if step == 8:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if how == "loads" and step == 17 and rank:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        if how == "adds a group" and step == (10 if rank else 14):
            new = {"params": [("new", nn.Parameter(torch.zeros(7)))], "algorithm": "adamw"}
            optimizer.add_param_group(new)
        toy.train(model, optimizer, [step], rank)
    dist.barrier()
    replicas.close()
    return zlib.crc32(agreed_on(optimizer, model).numpy())


@pytest.mark.parametrize("how", ["loads", "adds a group"])
def test_members_that_differ_for_a_while_hold_the_same_anchors_again(patient, how):
    one, two = distributed.run(2, differ, patient, how)
    assert one == two


def fetch_fails(rank, address, folder):
    """Two replicas of two ranks; a rank of the one that comes later cannot fetch its part."""
    from curvadion.integrations.torchft.transport import Transport

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    replica, model = mesh["replicas"].get_local_rank(), toy.model()
    fully_shard(model, mesh=mesh["shards"])
    replicas = sharded_replicas(address, f"fetch {replica}", mesh, begins=replica == 0)
    gate, sync = FixedPeriod(PERIOD), QuantizedAverage()
    optimizer = optimizer_of(model, "dion", replicas, gate=gate, sync=sync)
    while replica == 1 and not Path(folder, "go").exists():
        time.sleep(0.05)
    load, calls = Transport._load_from_address, []

    def broken(address, timeout):
        calls.append(address)
        if rank == 3 and len(calls) == 1:
            raise OSError("the donor died")
        return load(address, timeout)

    with mock.patch.object(Transport, "_load_from_address", staticmethod(broken)):
        replicas.start(optimizer)
        begun = optimizer.progress.steps
        while not Path(folder, "enough").exists():
            toy.train(model, optimizer, [optimizer.progress.steps], replica)
            if optimizer.progress.steps > 10:
                Path(folder, "go").touch()
            if begun and replicas.present == 2 and optimizer.report.gate_open:
                Path(folder, "enough").touch()
            time.sleep(0.02)
    replicas.close()
    return begun


# -------------------------------------------------------------------- joining, and the Lighthouse


LIGHTHOUSE = """
import importlib.util, sys, time
# Not by its package, which imports torch.
spec = importlib.util.spec_from_file_location("torchft._torchft", sys.argv[1])
torchft = importlib.util.module_from_spec(spec)
spec.loader.exec_module(torchft)
server = torchft.LighthouseServer(
    bind="[::]:PORT", min_replicas=2, join_timeout_ms=10000, heartbeat_timeout_ms=2000
)
print("up", flush=True)
time.sleep(60)
"""


def start_lighthouse(port):
    command = [sys.executable, "-c", LIGHTHOUSE.replace("PORT", str(port)), _torchft.__file__]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


def join_at_once(rank, address):
    """What a replica holds that begins, and one that comes before its first step.

    Weights in bfloat16, and the average of them that begins with them.
    """
    model = toy.model(torch.bfloat16)
    replicas = replicas_of(address, f"at once {rank}")
    gate, sync = FixedPeriod(1), QuantizedAverage()
    optimizer = optimizer_of(model, "adamw", replicas, gate=gate, sync=sync)
    tail = TailAverage(optimizer, start=0)
    if rank == 0:
        replicas.start(optimizer, tail=tail)
    dist.barrier()
    if rank == 0:
        time.sleep(1)  # the other one waits for this step
    else:
        # A proxy that knows no replicas is not asked.
        with mock.patch.dict(os.environ, http_proxy="http://localhost:9"):
            replicas.start(optimizer, tail=tail)
    while replicas.openings < 5:
        toy.train(model, optimizer, [optimizer.progress.steps], rank)
    dist.barrier()
    replicas.close()
    E = nn.utils.parameters_to_vector(tail.state_dict()["averages"].values())
    return zlib.crc32(agreed_on(optimizer, model).numpy()), zlib.crc32(E.numpy())


def test_a_replica_that_joins_before_the_first_step_holds_the_same_anchors(patient):
    one, two = distributed.run(2, join_at_once, patient)
    assert one == two


def outlive_a_lighthouse(rank, port):
    """Two members; the Lighthouse dies while one of them waits for the other, and comes back."""
    running = [start_lighthouse(port)] if rank == 0 else []
    dist.barrier()
    replicas = replicas_of(f"http://localhost:{port}", f"outlive {rank}", quorum_timeout=20.0)
    gate, sync, model = FixedPeriod(PERIOD), QuantizedAverage(), toy.model()
    optimizer = optimizer_of(model, "dion", replicas, gate=gate, sync=sync)
    replicas.start(optimizer)
    toy.train(model, optimizer, range(PERIOD), rank)
    dist.barrier()

    def restart():
        time.sleep(0.5)
        running.pop().kill()
        running.append(start_lighthouse(port))

    if rank == 0:
        Thread(target=restart).start()
    else:
        time.sleep(2)
    with mock.patch.object(client, "SHORTEST_REQUEST", timedelta(seconds=1)):
        toy.train(model, optimizer, range(PERIOD, 2 * PERIOD), rank)
    dist.barrier()
    replicas.close()
    for process in running:
        process.kill()
    return replicas.openings, zlib.crc32(agreed_on(optimizer, model).numpy())


def test_members_outlive_a_lighthouse_that_restarts():
    one, two = distributed.run(2, outlive_a_lighthouse, distributed.free_port())
    assert one == two
    assert one[0] == 3


def test_a_rank_that_cannot_fetch_its_part_lets_its_replica_try_again(lighthouse, tmp_path):
    begun = distributed.run(4, fetch_fails, lighthouse, str(tmp_path))
    assert begun[:2] == [0, 0]
    assert begun[2] == begun[3] > 10


# -------------------------------------------------------------------- states that do not fit


def split_the_first(name, module, mesh):
    """Shard one weight; torch replicates the others."""
    if name == "linear":
        weight = distribute_tensor(module.weight.detach(), mesh, [Shard(0)])
        module.register_parameter("weight", nn.Parameter(weight))


def refused(rank, address, how):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "shards"))
    model = toy.model()
    if how == "sharded":
        fully_shard(model, mesh=mesh["shards"])
    if how == "copies":
        distribute_module(model, mesh["shards"], split_the_first)
    replicas = sharded_replicas(address, how, mesh)
    direction = "low_rank" if how == "sharded" else "polar"
    more = {"gate": FixedPeriod(PERIOD), "sync": QuantizedAverage(), "direction": direction}
    optimizer = optimizer_of(model, "dion", replicas, **more)
    try:
        with pytest.raises(ValueError) as caught:
            replicas.start(optimizer)
        return str(caught.value)
    finally:
        replicas.close()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("sharded", 'several ranks need direction="polar"'),
        ("copies", "is not sharded over all 2 ranks of this replica"),
        ("whole", "is not sharded over all 2 ranks of this replica"),
    ],
)
def test_states_that_ranks_would_copy_from_different_replicas_are_refused(lighthouse, how, says):
    assert all(says in told for told in distributed.run(2, refused, lighthouse, how))


# -------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (CurvaDion, {"gate": RMMC(0.3), "sync": QuantizedAverage()}, "with a schedule"),
        (CurvaDion, {"gate": FixedPeriod(6), "sync": LowRank()}, "come and go"),
        (Dion, {}, "come and go"),
    ],
)
def test_what_needs_all_replicas_is_refused(lighthouse, kind, given, says):
    replicas = replicas_of(lighthouse, "alone")
    try:
        with pytest.raises(ValueError, match=says):
            kind(toy.groups(toy.model()), replicas=replicas, **given)
    finally:
        replicas.close()


def test_a_missing_lighthouse_is_an_error(monkeypatch):
    from curvadion.integrations.torchft import ElasticReplicas

    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(ValueError, match="start torchft_lighthouse"):
        ElasticReplicas()
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "localhost:29510")
    with pytest.raises(ValueError, match="'localhost:29510' must begin with http://"):
        ElasticReplicas()
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://localhost:29510")
    nameless = mock.patch.object(socket, "gethostname", lambda: "none.invalid")
    with nameless, pytest.raises(ValueError, match=r"'none.invalid'.* has no address"):
        ElasticReplicas()
    for name in (" a", "a\n", "run-1234567890123456"):  # torchft would never find these
        with pytest.raises(ValueError, match="replica_id=.* must be printable"):
            ElasticReplicas(replica_id=name)


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\n<li", b"220 mail\r\n"]
)
def test_a_page_that_is_cut_short_counts_as_unreachable(answer):
    with socket.create_server(("localhost", 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        Thread(target=serve).start()
        with pytest.raises(OSError, match="no page of a Lighthouse"):
            living(f"http://localhost:{server.getsockname()[1]}")


@pytest.mark.parametrize(
    ("sizes", "bits", "says"),
    [
        ((4, 8), (2, 2), r"\(8, 8\).*\(4, 4\)"),
        ((4, 4), (2, (1, 2)), r"bits=\(1, 2\).*bits=2"),
    ],
)
def test_a_replica_that_differs_says_so(sizes, bits, says):
    from curvadion.integrations.torchft.handover import hand_over, take_over

    one, two = (
        CurvaDion(
            [torch.nn.Linear(size, size).weight],
            gate=FixedPeriod(2),
            sync=QuantizedAverage(bits=b),
            replicas="single",
        )
        for size, b in zip(sizes, bits, strict=True)
    )
    for optimizer in (one, two):
        optimizer._create_states(optimizer._collective_plan())
    with pytest.raises(ValueError, match=f"differs from the others.*{says}"):
        take_over(two, hand_over(one))


class SaysItIsOnAGpu(torch.Tensor):
    @property
    def device(self):
        return torch.device("cuda")


def test_a_replica_with_another_inner_optimizer_says_so():
    from curvadion.integrations.torchft.handover import hand_over, take_over

    adamw, other_rate, sgd = (
        Replicated(kind([nn.Linear(4, 4).weight], lr=lr), gate=FixedPeriod(2), replicas="single")
        for kind, lr in ((torch.optim.AdamW, 0.1), (torch.optim.AdamW, 0.2), (torch.optim.SGD, 0.1))
    )
    for optimizer in (adamw, other_rate, sgd):
        optimizer._create_states(optimizer._collective_plan())
    changes = take_over(other_rate, hand_over(adamw))
    assert changes == ["param_groups[0]['lr'] is 0.1 instead of 0.2"]
    # A rate that lies on a GPU, which the comparisons of every step do not wait for.
    for optimizer, rate in ((adamw, 0.5), (other_rate, 0.25)):
        on_gpu = torch.tensor(rate).as_subclass(SaysItIsOnAGpu)
        optimizer.param_groups[0]["lr"] = on_gpu
    changes = take_over(other_rate, hand_over(adamw))
    assert changes == ["param_groups[0]['lr'] is 0.5 instead of 0.25"]
    assert float(on_gpu) == 0.5
    with pytest.raises(ValueError, match="optimizer is .'SGD'., not .'AdamW'."):
        take_over(sgd, hand_over(adamw))


@distributed.on_ranks(2)
def test_each_rank_takes_over_its_shards_of_an_average(rank):
    from curvadion.integrations.torchft.handover import hand_over, take_over

    mesh = init_device_mesh("cpu", (2,))
    pairs = []
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        X = nn.Parameter(
            distribute_tensor(torch.randn(6, 4, generator=generator), mesh, [Shard(0)])
        )
        inner = torch.optim.SGD([X], lr=0.1)
        optimizer = Replicated(inner, gate=FixedPeriod(2), replicas="single")
        optimizer._create_states(optimizer._collective_plan())
        tail = TailAverage(optimizer, start=1, decay=0.9)
        for _ in range(4 * (1 - seed)):  # the other one comes later
            X.grad = torch.full_like(X, 1.0 + rank)
            optimizer.step()
        pairs.append((optimizer, tail))
    (one, tail), (two, other) = pairs
    assert not other.state_dict()["averages"]
    handed_over = hand_over(one, tail=tail)
    with pytest.raises(ValueError, match=r"averages is .'tail': \(1, 0.8\)., not .*\(1, 0.9\)"):
        take_over(two, handed_over, tail=TailAverage(two, start=1, decay=0.8))
    take_over(two, handed_over, tail=other)
    [E] = tail.state_dict()["averages"].values()
    [taken] = other.state_dict()["averages"].values()
    assert taken.placements == E.placements
    assert local(taken).equal(local(E))
    assert other.state_dict()["averaged_at"] == 3


def test_patience_is_refused_where_every_step_opens(lighthouse):
    replicas = replicas_of(lighthouse, "patient", patience=1.0)
    optimizer = optimizer_of(toy.model(), "dion", replicas, sync=CodedGradients())
    try:
        with pytest.raises(ValueError, match=r"Leave out patience=1\.0.*CodedGradients"):
            replicas.start(optimizer)
    finally:
        replicas.close()


def test_a_step_before_the_start_is_an_error(lighthouse):
    replicas, model = replicas_of(lighthouse, "early"), toy.model()
    optimizer = optimizer_of(model, "dion", replicas, gate=FixedPeriod(9), sync=QuantizedAverage())
    try:
        with pytest.raises(TypeError, match=r"optimizer be pickled: save its state_dict\(\)"):
            pickle.dumps(optimizer)
        with pytest.raises(RuntimeError, match=r"replicas.start\(optimizer\) before step"):
            toy.train(model, optimizer, [0])
        other = CurvaDion(toy.groups(toy.model()), replicas="single", threshold=0.3)
        with pytest.raises(ValueError, match="needs replicas of its own"):
            replicas.start(other)
        with pytest.raises(TypeError, match="period=9. takes a module"):
            replicas.start(optimizer, period=9)
        fails = mock.patch.object(replicas, "meet", side_effect=KeyError("a bug"))
        disconnects = mock.patch.object(replicas, "disconnect")
        with fails, disconnects as disconnect, pytest.raises(KeyError, match="a bug"):
            replicas.start(optimizer)
        disconnect.assert_called_once()
        with pytest.raises(ValueError, match="exact=True needs a fixed group"):
            optimizer.synchronize(exact=True)
    finally:
        replicas.close()
