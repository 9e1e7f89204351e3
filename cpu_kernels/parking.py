"""How a thread waits for a word to change: a bounded spin, then asleep; no spin on a core that it must share.

The file knows words, not what they mean.
"""

from __future__ import annotations

from trilane.cpu_kernels.atomics import (
    add_at,
    fence,
    futex_wait,
    load_at,
    mono_ns,
    pause,
    sleep_ns,
    store_at,
    thread_yield,
)
from trilane.jit import compiled

DESCHEDULED_NS = 500_000  # a spinning thread whose clock jumps by this much has lost its core to another
RESTED_WAITS = 64  # so many waits go without a spin after that
TASK_SPIN_NS, TASK_YIELD_NS, TASK_NAP_NS = 5_000, 200_000, 20_000


@compiled
def spin_while(address, value, spin_ns, rest_address):
    """Spin while the word keeps its value, for at most ``spin_ns``.

    Where more threads run than there are cores, a spin keeps the very thread from running that would end it.
    The spinner then sees its clock jump, and leaves out its next spins: ``rest_address`` counts them.
    """
    rest = load_at(rest_address)
    if rest > 0 or spin_ns <= 0:
        store_at(rest_address, max(rest - 1, 0))
        return
    begin = last = mono_ns()
    while last - begin <= spin_ns:
        for _ in range(16):
            if load_at(address) != value:
                return
            pause()
        now = mono_ns()
        if now - last > DESCHEDULED_NS:
            store_at(rest_address, RESTED_WAITS)
            return
        last = now


@compiled
def park_while(address, value, counter_address, timeout_ns):
    """Sleep while the word keeps its value; the counter tells those who change it that somebody sleeps."""
    add_at(counter_address, 1)
    fence()  # either the changer sees the counter, or this thread sees the change
    if load_at(address) == value:
        futex_wait(address, value, timeout_ns)
    add_at(counter_address, -1)


@compiled
def wait_word(address, value, abort_address):
    """Wait inside a task until the word at ``address`` is at least ``value``.

    What is waited for must come from a task with a lower number, which a live worker has claimed already.
    Spins for 5 us, then yields, and naps after 200 us.

    Returns
    -------
    int64 : 0, or the abort word if that was set first: the task then returns it.
    """
    begin = mono_ns()
    while load_at(address) < value:
        code = load_at(abort_address)
        if code != 0:
            return code
        waited = mono_ns() - begin
        if waited > TASK_YIELD_NS:
            sleep_ns(TASK_NAP_NS)
        elif waited > TASK_SPIN_NS:
            thread_yield()
        pause()
    return 0
