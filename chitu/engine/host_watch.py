"""Ends the parts of a group on several hosts together: a process of each host sends the others a beat over gloo, and
ends when one of them is gone.

A process that dies closes its connections, which ends the others at once. A host without power and a link that drops
everything close nothing: these are found by their silence, within a lease, long before the timeout of a collective. The
other members of a host follow theirs by its pid (`ProcessWatch`). The watch begins when the process groups are made. It
is patient until the member serves, since to load a model may keep a thread from running for seconds.
"""

from __future__ import annotations

import threading
import time
from functools import partial

import torch
import torch.distributed as dist

from chitu.engine.process_watch import end_now
from chitu.net.threads import ServiceThread

STARTING_S = 30.0
"""Longest silence of a host before its members serve."""
BEATS_PER_LEASE = 6


class HostWatch:
    def __init__(self, group: dist.ProcessGroup, hosts: tuple[str, ...], node_rank: int, lease_s: float) -> None:
        """Begin to exchange beats. `group`: one process of each host, used by this watch alone."""
        self._group = group
        self._hosts = hosts
        self._lease_s = lease_s
        self._patience_s = max(STARTING_S, lease_s)
        self._pause_s = lease_s / BEATS_PER_LEASE
        self._heard_s = {rank: time.monotonic() for rank in range(len(hosts)) if rank != node_rank}
        self._disarmed = threading.Event()
        self.is_broken = False
        """Whether another host is gone."""
        for peer in self._heard_s:
            ServiceThread(f"beats-{peer}", partial(self._exchange, peer)).start()
        ServiceThread("silence", self._listen).start()

    def tighten(self) -> None:
        """Bear no more than a lease of silence from now on: the members of all hosts are there."""
        for peer in self._heard_s:
            self._heard_s[peer] = time.monotonic()
        self._patience_s = self._lease_s

    def disarm(self) -> None:
        """Survive the others from now on: this member is about to end."""
        self._disarmed.set()

    def _exchange(self, peer: int) -> None:
        """Send and receive a beat by turns, for ever. Both wait for the other side."""
        sent, received = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        while True:
            try:
                works = [
                    dist.isend(sent, group=self._group, group_dst=peer),
                    dist.irecv(received, group=self._group, group_src=peer),
                ]
                for work in works:
                    assert work is not None
                    work.wait()
            except RuntimeError as error:
                self._lost(peer, str(error))
                return
            self._heard_s[peer] = time.monotonic()
            time.sleep(self._pause_s)

    def _listen(self) -> None:
        while not self.is_broken:
            time.sleep(self._pause_s)
            for peer, heard_s in self._heard_s.items():
                if time.monotonic() - heard_s > self._patience_s:
                    self._lost(peer, f"nothing heard for {self._patience_s:g} s")

    def _lost(self, peer: int, reason: str) -> None:
        self.is_broken = True
        if not self._disarmed.is_set():
            end_now("the part of this group on %s is gone (%s); ending too", self._hosts[peer], reason)
