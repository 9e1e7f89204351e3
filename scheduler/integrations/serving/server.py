"""The process around the application: a socket that is taken before a model is loaded, and an end in order.

A SIGTERM or Ctrl-C lets requests that are under way go on for a few seconds; texts that are not finished then end with
an error, at their next token.
"""

from __future__ import annotations

import errno
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn

from trilane.errors import TrilaneError
from trilane.integrations.generation import TextModel
from trilane.integrations.serving.app import build_app
from trilane.integrations.serving.turnstile import Turnstile

GRACE_S = 3.0  # for texts to be finished after a signal
CLOSE_S = 5  # and then for their connections


def open_socket(host: str, port: int) -> socket.socket:
    """Take an address, before minutes are spent on a model.

    Parameters
    ----------
    host : str
        A name or an address, IPv4 or IPv6.
    port : int
        0: a free one.

    Raises
    ------
    TrilaneError
        It is in use, not allowed, or no address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise TrilaneError(
            f"--host {host}: {error.strerror or error}; give a name or an address of this machine"
        ) from None
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # or a restart waits a minute for old connections
        found.bind(address)
    except OSError as error:
        found.close()
        raise TrilaneError(f"{host}:{port}: {_reason(error)}") from None
    return found


def _reason(error: OSError) -> str:
    remedies = {
        errno.EADDRINUSE: "the port is in use; stop what has it, give another by --port, or --port 0 for a free one",
        errno.EACCES: "this user may not take that port; give one from 1024 on by --port",
        errno.EADDRNOTAVAIL: "no address of this machine; give --host 127.0.0.1, or 0.0.0.0 for all of its addresses",
    }
    return remedies.get(error.errno or 0, error.strerror or str(error))


def url_of(taken: socket.socket) -> str:
    """Where clients find the server: ``http://host:port``."""
    host, port = taken.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    model: TextModel,
    name: str,
    taken: socket.socket,
    ready: Callable[[str], Any] = lambda url: None,
    *,
    verbose: bool = False,
) -> None:
    """Answer requests until a SIGTERM or Ctrl-C; to be called on the main thread.

    Parameters
    ----------
    model : TextModel
        Open; close it afterwards: nothing uses it any more.
    name : str
        What requests call it.
    taken : socket.socket
        From :func:`open_socket`; it is closed here.
    ready : callable
        Called with the URL once requests are answered.
    verbose : bool
        Let uvicorn log each request, and not failures alone.

    Raises
    ------
    TrilaneError
        A name that requests cannot use, or another program was quicker to listen there.
    KeyboardInterrupt
        After Ctrl-C, when all has ended.
    """
    url, turnstile = url_of(taken), Turnstile(model.handle.model)
    config = uvicorn.Config(
        build_app(model, name),
        log_level="info" if verbose else "warning",
        timeout_graceful_shutdown=int(GRACE_S) + CLOSE_S,
    )
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)  # uvicorn raises it once more at its end
    try:
        _Server(config, turnstile, lambda: ready(url)).run(sockets=[taken])
    except OSError as error:
        raise TrilaneError(f"{url}: {_reason(error)}") from None
    finally:
        signal.signal(signal.SIGTERM, before)
        turnstile.stop()
        turnstile.remove()
        taken.close()


class _Server(uvicorn.Server):
    """With a word when it is ready, and an end to texts that would go on for long after a signal."""

    def __init__(self, config: uvicorn.Config, turnstile: Turnstile, ready: Callable[[], Any]) -> None:
        super().__init__(config)
        self._turnstile, self._ready = turnstile, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: Any) -> None:
        timer = threading.Timer(GRACE_S, self._turnstile.refuse)
        timer.daemon = True
        timer.start()
        super().handle_exit(sig, frame)
