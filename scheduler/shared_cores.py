"""What is said where all lanes at once take longer than one alone because their threads share cores.

That is so on the host device alone: a GPU computes hits and copies without the processor. Times are measured elsewhere.
"""

from __future__ import annotations

NUM_OTHERS = 2  # threads of the link and of the device


def sharing_text(num_workers: int, num_cpus: int, ratio: float) -> str | None:
    """A sentence for people, or None where cores are no reason.

    Parameters
    ----------
    num_workers : int
        Of the CPU lane.
    num_cpus : int
        Threads that can run at once on this machine.
    ratio : float
        Time with all lanes over that with the best lane alone, at the machine's own speed.
    """
    num_threads = num_workers + NUM_OTHERS
    if ratio <= 1 or num_threads <= num_cpus:
        return None
    workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
    cpus = "1 CPU" if num_cpus == 1 else f"{num_cpus} CPUs"
    return (
        f"All lanes at once take longer than one alone since they share cores here: {workers} of the CPU lane, the "
        f"link's thread and the device's are {num_threads} threads on {cpus}."
    )
