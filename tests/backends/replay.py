"""Runs under mpiexec: `python replay.py SCHEDULE.json…`. Carries out emitted schedules with mpi4py and numpy.

An independent reading of the schedule format: no JAX, and nothing of Shardwright. Operands are random, but
what ranks hold together is drawn once, so that every rank knows the result that the collective's definition
gives. All messages of a step are started before any is waited for where their dependencies allow, and every
rank exits with 0 only if all its results are right.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
OPS = {"sum": (np.add, MPI.SUM), "max": (np.maximum, MPI.MAX), "min": (np.minimum, MPI.MIN)}
communicators: dict = {tuple(range(comm.size)): comm}


def communicator(participants):
    key = tuple(participants)
    if key not in communicators:
        communicators[key] = comm.Create_group(comm.Get_group().Incl(list(key)))
    return communicators[key]


def dtype_of(name):
    # numpy has no bfloat16: gathers of it are bytes, and its reductions are checked in tests of the backend.
    return np.dtype({"bfloat16": "uint16"}.get(name, name))


def placement(text):
    shard = re.fullmatch(r"S\((\d+)(?::\d+)?\)(?:@\d+)?", text)
    if shard:
        return "S", int(shard[1])
    return ("P", text[2:-1]) if text.startswith("P") else ("R", None)


def draw(message, member, who):
    """What `who` holds of a member before: a function of message, member and participant alone."""
    kind, what = placement(member["pre"])
    shape = list(member["shape"])
    position = message["participants"].index(who)
    if kind == "S":
        shape[what] = member["stretches_before"][position]
    seed = [message["number"], member["value"], 0 if kind == "R" else 1 + who]
    dtype = dtype_of(message["dtype"])
    high = 2 if dtype == np.bool_ else 9  # small integers: sums are exact in every order
    return np.random.default_rng(seed).integers(0, high, shape).astype(dtype)


def expected(message, member, me):
    """What `me` holds of a member afterwards, by the placements alone."""
    everyone = message["participants"]
    kind, what = placement(member["pre"])
    parts = [draw(message, member, who) for who in everyone]
    if kind == "S":
        whole = np.concatenate(parts, axis=what)
    elif kind == "P":
        whole = parts[0]
        for part in parts[1:]:
            whole = OPS[what][0](whole, part).astype(whole.dtype)
    else:
        whole = draw(message, member, everyone[0] if message["root"] is None else message["root"])
    kind, what = placement(member["post"])
    if kind != "S":
        return whole
    cuts = np.cumsum([0, *member["stretches_after"]])
    position = everyone.index(me)
    return whole.take(range(cuts[position], cuts[position + 1]), axis=what)


class Run:
    """A message on its way."""

    def __init__(self, message):
        self.message, self.stage, self.requests = message, 0, []
        self.memory = [np.zeros(b["count"], dtype_of(b["dtype"])) for b in message["buffers"]]
        mine = [
            draw(message, member, comm.rank).reshape(-1)
            if message["root"] in (None, comm.rank)
            else np.zeros(0, dtype_of(message["dtype"]))
            for member in message["members"]
        ]
        operands = [i for i, b in enumerate(message["buffers"]) if b["role"] == "in"]
        for i, operand in zip(operands, mine, strict=True):
            assert self.memory[i].size == operand.size
            self.memory[i][:] = operand

    def view(self, view):
        memory = self.memory[view["buffer"]]
        if 0 in view["shape"]:
            return np.empty(view["shape"], memory.dtype)
        last = view["offset"] + sum((n - 1) * s for n, s in zip(view["shape"], view["strides"], strict=True))
        assert last < memory.size
        strides = [s * memory.itemsize for s in view["strides"]]
        return np.lib.stride_tricks.as_strided(memory[view["offset"] :], view["shape"], strides)

    def piece(self, slot):
        """One stretch of a buffer."""
        ((count,), (first,)) = slot["counts"], slot["displacements"]
        found = self.memory[slot["buffer"]][first : first + count]
        assert found.size == count
        return found

    def parts(self, slot):
        """A vector argument of MPI: one stretch per participant, in bytes."""
        memory = self.memory[slot["buffer"]]
        assert max(c + d for c, d in zip(slot["counts"], slot["displacements"], strict=True)) <= memory.size
        scale = [[n * memory.itemsize for n in slot[key]] for key in ("counts", "displacements")]
        return [memory.view(np.uint8), *scale, MPI.BYTE]

    def start(self, t):
        kind, send, recv, root = t["kind"], t["send"], t["recv"], t["root"]
        op = OPS[t["op"]][1] if t["op"] else None
        if kind == "send":
            return comm.Isend(self.piece(send).view(np.uint8), t["participants"][1])
        if kind == "recv":
            return comm.Irecv(self.piece(recv).view(np.uint8), t["participants"][0])
        c = communicator(t["participants"])
        if kind == "broadcast":
            return c.Ibcast(self.piece(recv).view(np.uint8), root)
        if kind == "reduce":
            sent = MPI.IN_PLACE if send is None else self.piece(send)
            return c.Ireduce(sent, None if recv is None else self.piece(recv), op, root)
        if kind == "all_reduce":
            return c.Iallreduce(MPI.IN_PLACE if send is None else self.piece(send), self.piece(recv), op)
        if kind == "gather":
            target = None if recv is None else self.parts(recv)
            return c.Igatherv(self.piece(send).view(np.uint8), target, root)
        if kind == "scatter":
            sent = None if send is None else self.parts(send)
            return c.Iscatterv(sent, MPI.IN_PLACE if recv is None else self.piece(recv).view(np.uint8), root)
        if kind == "all_gather":
            sent = MPI.IN_PLACE if send is None else self.piece(send).view(np.uint8)
            return c.Iallgatherv(sent, self.parts(recv))
        if kind == "all_to_all":
            return c.Ialltoallv(self.parts(send), self.parts(recv))
        block = recv["counts"][0]
        if kind == "all_gather_block":
            target = {**recv, "counts": [block * c.size]}
            return c.Iallgather(self.piece(send).view(np.uint8), self.piece(target).view(np.uint8))
        if kind == "reduce_scatter_block":
            return c.Ireduce_scatter_block(
                self.piece({**send, "counts": [block * c.size]}), self.piece(recv), op
            )
        assert kind == "reduce_scatter", kind
        counts = send["counts"]
        assert send["displacements"] == [sum(counts[:i]) for i in range(len(counts))]
        sent = self.memory[send["buffer"]][: sum(counts)]
        return c.Ireduce_scatter(sent, self.piece(recv), counts, op)

    @property
    def started(self):
        return self.stage == len(self.message["stages"])

    def go_on(self):
        """Wait for the stage under way and start the next."""
        MPI.Request.Waitall(self.requests)
        stage = self.message["stages"][self.stage]
        self.stage += 1
        for local in stage["locals"]:
            target = self.view(local["target"])
            if local["kind"] == "copy":
                target[...] = self.view(local["source"])
            else:
                OPS[local["op"]][0](target, self.view(local["source"]), out=target)
        self.requests = [self.start(transfer) for transfer in stage["transfers"]]

    def results(self):
        MPI.Request.Waitall(self.requests)
        return [self.view(view) for view in self.message["outputs"]]


def check(path: str) -> str:
    """What is wrong on this rank, "" if nothing."""
    data = json.loads(Path(path).read_text())
    (mine,) = (rank for rank in data["ranks"] if rank["rank"] == comm.rank)
    numbers = [message["number"] for message in mine["messages"]]
    if numbers != sorted(set(numbers)):
        return f"messages are out of order: {numbers}"
    under_way: dict = {}

    def finish(number):
        run = under_way.pop(number)
        for member, got in zip(run.message["members"], run.results(), strict=True):
            wanted = expected(run.message, member, comm.rank)
            if got.shape != wanted.shape or not np.array_equal(got, wanted):
                name = f"{run.message['collective']}.{run.message['strategy']}"
                return f"message {number} ({name}): wrong result"
        return ""

    for message in mine["messages"]:
        for number in [n for n in message["after"] if n in under_way]:
            if wrong := finish(number):
                return wrong
        run = under_way[message["number"]] = Run(message)
        while not run.started:
            run.go_on()
    return next((wrong for number in list(under_way) if (wrong := finish(number))), "")


if __name__ == "__main__":
    problems = [f"{path}: {wrong}" for path in sys.argv[1:] if (wrong := check(path))]
    everything = [line for lines in comm.allgather(problems) for line in lines]
    if comm.rank == 0:
        print("\n".join(everything), end="")
    assert not {"jax", "shardwright"} & set(sys.modules)
    sys.exit(1 if everything else 0)
