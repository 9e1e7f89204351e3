"""What a team of workers raises.

::

    TeamError
    ├── TaskFailed      a task returned an error code; the team stays usable
    ├── WorkerDied      a worker thread is gone; the team refuses further work
    ├── WorkerStalled   no task has ended for too long; the team refuses further work
    ├── TeamClosed      used after close()
    └── TeamForked      used in a child process, where the threads do not exist
"""

from __future__ import annotations

from trilane.cpu_kernels.jobs import CANCELLED


class TeamError(RuntimeError):
    """Root of what a team raises."""


class TaskFailed(TeamError):
    """A task returned an error code, or the job was called off; ``code`` is the first one."""

    def __init__(self, code: int) -> None:
        self.code = code
        what = "was called off" if code == CANCELLED else f"returned error code {code}"
        super().__init__(f"a task {what}; the tasks that had not begun were skipped")


class WorkerDied(TeamError):
    """A worker thread is gone."""


class WorkerStalled(TeamError):
    """No task has ended for longer than the stall timeout."""


class TeamClosed(TeamError):
    """The team has been closed."""


class TeamForked(TeamError):
    """The team belongs to the parent process."""
