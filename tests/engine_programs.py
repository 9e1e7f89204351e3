"""Programs that use a scheduler in a process of their own: python engine_programs.py NAME."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import numpy as np
from expert_cases import expected, open_scheduler, random_store

from trilane import ForkError
from trilane.cpu_kernels.reference import same_bits
from trilane.state import check

X, IDS, WEIGHTS = np.ones((2, 256), np.float32), np.array([[0, 1], [2, 3]]), np.ones((2, 2), np.float32)


def opened(**sections):
    store = random_store("q8_0", experts=6, hidden=256, intermediate=512)
    return store, open_scheduler(store, cache={"fraction": 0.5}, **sections)


def slow(store, seconds, name="cpu_gb_s"):
    """The rate at which a shard takes so long."""
    return {name: float(store.layers[0].layout.shard_nbytes[0]) / (1e9 * seconds)}


def leave_idle():
    """Exit without close."""
    global kept
    kept = opened()[1]
    kept.forward(0, X, IDS, WEIGHTS)
    print("leaving", flush=True)


def leave_in_a_step():
    """Exit with a step that takes for ever in flight, and with background copies."""
    global kept
    store = random_store("q8_0", experts=6, hidden=256, intermediate=512)
    kept = open_scheduler(store, cache={"fraction": 1.0}, policy={"force": "cpu"}, host_device=slow(store, 0.5))
    kept.submit(0, X, IDS, WEIGHTS)
    print("leaving", flush=True)


def leave_in_a_fill():
    global kept
    store = random_store("q8_0", experts=6, hidden=256, intermediate=512)
    kept = open_scheduler(store, cache={"fraction": 1.0}, host_device=slow(store, 0.3, "link_gb_s"))
    print("fills:", kept.hint(0, range(6)), flush=True)
    print("leaving", flush=True)


def leave_by_error():
    leave_idle()
    raise SystemExit(3)


def fork():
    store, scheduler = opened()
    scheduler.forward(0, X, IDS, WEIGHTS)
    ticket = scheduler.submit(0, X, IDS, WEIGHTS)
    child = os.fork()
    if child == 0:
        for call in (
            lambda: scheduler.forward(0, X, IDS, WEIGHTS),
            lambda: scheduler.wait(ticket),
            lambda: scheduler.hint(0, [1]),
        ):
            try:
                call()
            except ForkError as error:
                print("child:", error, flush=True)
        scheduler.close()
        with open_scheduler(store) as own:
            right = same_bits(own.forward(0, X, IDS, WEIGHTS), expected(store, 0, X, IDS, WEIGHTS))
        print("child's own scheduler:", right, flush=True)
        sys.exit(0)
    status = os.waitpid(child, 0)[1]
    right = same_bits(scheduler.wait(ticket), expected(store, 0, X, IDS, WEIGHTS))
    right &= same_bits(scheduler.forward(0, X, IDS, WEIGHTS), expected(store, 0, X, IDS, WEIGHTS))
    check(scheduler._runner.state, scheduler._runner.geometry)
    print("parent:", status, right, flush=True)
    scheduler.close()


def interrupts():
    """Ctrl-C at random moments of many steps: each ends in time, the state stays sound and so do the bits."""
    store, scheduler = opened(policy={"admit": "always"})
    calls = [interruptible_call(store, number) for number in range(16)]
    armed, stop, caught = threading.Event(), threading.Event(), 0

    def interrupt(*args):
        if armed.is_set():
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    rng = np.random.default_rng(int(sys.argv[2]))
    sender = threading.Thread(target=send_interrupts, args=(stop, rng))
    sender.start()
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        x, ids, weights, wanted = calls[int(np.random.default_rng(caught).integers(16))]
        try:
            armed.set()
            for _ in range(50):
                scheduler.hint(0, [0, 3, 1])
                y = scheduler.forward(0, x, ids, weights)
                if not same_bits(y, wanted):
                    os._exit(4)
            armed.clear()
        except KeyboardInterrupt:
            armed.clear()
            caught += 1
        check(scheduler._runner.state, scheduler._runner.geometry)
    stop.set()
    sender.join()
    right = all(same_bits(scheduler.forward(0, *call[:3]), call[3]) for call in calls)
    scheduler._runner.settle_fills(let_end=True)
    check(scheduler._runner.state, scheduler._runner.geometry)
    print("interrupted:", caught > 20 or caught, "right:", right, flush=True)
    scheduler.close()


def interruptible_call(store, number):
    rng = np.random.default_rng(number)
    rows = (2, 40)[number % 2]
    x, weights = np.ones((rows, 256), np.float32), np.ones((rows, 2), np.float32)
    ids = rng.integers(-1, 6, (rows, 2))
    return x, ids, weights, expected(store, 0, x, ids, weights)


def send_interrupts(stop, rng):
    while not stop.wait(float(rng.uniform(0.001, 0.03))):
        os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
