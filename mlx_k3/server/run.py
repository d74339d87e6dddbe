"""Run the interface on a port until a signal ends it.

Owns the socket and the signals. Ctrl-C gives up what is not answered; SIGTERM first answers
everything that was accepted, and a second signal of either kind ends that.
"""

import asyncio
import ipaddress
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import FrameType

import uvicorn

from ..errors import K3Error
from .app import Limits, Service, create_app


def bind(host: str, port: int, *, has_key: bool, open_to_all: bool = False) -> socket.socket:
    """A socket for :func:`serve`; port 0 is any free one.

    Raises:
        K3Error: it cannot be had, or others than this machine would get in without a key.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as e:
        raise K3Error(f"--host {host}: {e}") from None
    if not (has_key or open_to_all or ipaddress.ip_address(address[0]).is_loopback):
        raise K3Error(
            f"--host {host} lets other machines in; give an --api-key that they must know, or say "
            "--without-key"
        )
    listener = socket.socket(family, kind)
    try:
        # Else a server that was just ended keeps its port for a minute.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as e:
        listener.close()
        raise K3Error(f"{host}:{port}: {e.strerror}; give another --port or --host") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """What clients take as ``base_url``."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def serve(
    service: Service, limits: Limits, listener: socket.socket, ready: Callable[[], None]
) -> bool:
    """Answer requests until a signal comes; returns whether that was Ctrl-C.

    ``ready`` is called when requests are answered from now on.
    """
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("mlx_k3.server").setLevel(logging.INFO)
    config = uvicorn.Config(
        create_app(service, limits),
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        ws="none",
    )
    server = _Server(config, ready, service.queue.leave_all)
    with closing(listener):
        server.run(sockets=[listener])
    return server.interrupted


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, ready: Callable[[], None], give_up: Callable[[], None]
    ):
        super().__init__(config)
        self.interrupted = False
        self._ready, self._give_up = ready, give_up

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own raises the signal again at the end, before the model is closed.
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.interrupted = self.interrupted or sig == signal.SIGINT
        if self.should_exit or sig == signal.SIGINT:
            # Not here: the signal may have come while the queue was locked.
            asyncio.get_running_loop().call_soon_threadsafe(self._give_up)
        self.should_exit = True
