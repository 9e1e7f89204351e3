"""Where a model's forward passes can be stopped from outside: between two of them, whoever runs them.

A text that is being generated on another thread then ends with an error at its next token, and once ``stop`` returns,
no pass is under way and none will be: the scheduler can be closed.
"""

from __future__ import annotations

import threading
from typing import Any

from trilane.errors import ClosedError


class Turnstile:
    """Hooks of a model, by torch's public interface.

    Parameters
    ----------
    model : torch.nn.Module
        Its calls, one for each token, go through.
    """

    def __init__(self, model: Any) -> None:
        self._changed = threading.Condition()
        self._inside: set[int] = set()  # threads that are in a forward pass
        self._stopped = False
        self._hooks = (
            model.register_forward_pre_hook(self._enter),
            model.register_forward_hook(self._leave, always_call=True),
        )

    def _enter(self, module: Any, args: Any) -> None:
        with self._changed:
            if self._stopped:
                raise ClosedError("server: it is stopping, so this text ends here; ask again once it runs")
            self._inside.add(threading.get_ident())

    def _leave(self, module: Any, args: Any, output: Any) -> None:
        with self._changed:
            self._inside.discard(threading.get_ident())
            self._changed.notify_all()

    def refuse(self) -> None:
        """From now on no pass begins: each text ends at its next token."""
        with self._changed:
            self._stopped = True

    def stop(self) -> None:
        """Refuse, and wait until the pass that is under way has ended."""
        with self._changed:
            self._stopped = True
            self._changed.wait_for(lambda: not self._inside)

    def remove(self) -> None:
        """Take the hooks off: the model can be called again."""
        for hook in self._hooks:
            hook.remove()
