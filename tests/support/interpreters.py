"""An interpreter that has imported torch already: programs start at once, not after seconds.

`waiting_interpreter` starts a process that imports what programs need and then waits. Its
``executable`` is a small file that is called as ``python`` is (``script.py``, ``-m module`` or ``-c
code``, then arguments): it has the waiting process fork, and the fork runs the program with the
caller's environment, folder and open files. In the fork ``sys.executable`` is that file too, so
launchers start their ranks in the same way. What is under test is never imported before the fork.

Tests whose point is a fresh interpreter (what an import loads, memory) use ``sys.executable``.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import tomllib
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Interpreter", "installed_environment", "waiting_interpreter"]

PROJECT = Path(__file__).parents[2]

PRELOADED = [
    "torch.distributed.run",
    "torch.distributed.checkpoint",
    "torch.utils.data",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "accelerate.commands.launch",
    "lightning.pytorch.cli",
    "lightning.fabric",
    "pytorch_lightning",
    "lightning_fabric",
]

READY = b"ready\n"

# Without site-packages Python starts in 15 ms.
CLIENT = """\
#!{python} -ISE
import json, os, signal, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
request = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(connection, [len(request).to_bytes(4, "big")], [0, 1, 2])
connection.sendall(request)
pid = int.from_bytes(connection.recv(4), "big")
for name in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(name, lambda number, _: os.kill(pid, number))
status = connection.recv(4)
code = int.from_bytes(status, "big", signed=True) if status else 1
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def installed_environment(site: Path) -> dict[str, str]:
    """An environment in which the project is installed, entry points included, as pip would.

    Args:
        site: An empty folder, for the metadata.

    Returns:
        This process's environment without a launcher's variables.
    """
    info = site / "sshsdp_under_test-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sshsdp-under-test\nVersion: 0\n")
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    entries = project["entry-points"]["torch.backends"]
    lines = [f"{name} = {target}" for name, target in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(["[torch.backends]", *lines, ""]))
    paths = [str(site), str(PROJECT / "core"), str(PROJECT), os.environ.get("PYTHONPATH", "")]
    launchers = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    clean = {name: value for name, value in os.environ.items() if name not in launchers}
    return {**clean, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Interpreter:
    """What runs a program, and in which environment."""

    executable: str
    environment: dict[str, str]


@contextlib.contextmanager
def waiting_interpreter() -> Iterator[Interpreter]:
    """Start the process that waits; it ends with the block, and with it programs that still run.

    Yields:
        What to call in place of ``python``, in an environment in which the project is installed.

    Raises:
        RuntimeError: The process ended before it was ready.
    """
    # Not below pytest's own folders: the address of a socket has 107 bytes at the most.
    with tempfile.TemporaryDirectory(prefix="python-") as name:
        folder = Path(name)
        site = folder / "site"
        site.mkdir()
        environment = installed_environment(site)
        address, client = str(folder / "socket"), folder / "python"
        client.write_text(CLIENT.format(python=sys.executable, address=address))
        client.chmod(0o755)
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, address, str(client)],
            env=environment,
            cwd=PROJECT,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        if process.stdout.readline() != READY:
            raise RuntimeError(f"the interpreter ended with exit code {process.wait()}")
        yield Interpreter(str(client), environment)
        process.terminate()
        process.wait()


def _serve(address: str, executable: str) -> NoReturn:
    """Wait for calls, for each in a fork that becomes the program."""
    for name in PRELOADED:
        importlib.import_module(name)
    sys.executable = executable
    gc.collect()
    gc.freeze()
    calls: dict[int, socket.socket] = {}

    def end(*_: object) -> NoReturn:
        for pid in calls:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The selector must wake up when a child ends, and does so for this pair of sockets.
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno())
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    sys.stdout.buffer.write(READY)
    sys.stdout.flush()
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(woken, selectors.EVENT_READ)
    while True:
        ready = {key.fileobj for key, _ in selector.select()}
        if woken in ready:
            woken.recv(4096)
            _report_ends(calls)
        if listener in ready:
            connection, _ = listener.accept()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
                    signal.signal(number, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                # A caller's end must show here, so no other program may keep its connection open.
                for other in (selector, listener, woken, waker, *calls.values()):
                    other.close()
                _become_program(connection)
            calls[pid] = connection
            connection.sendall(pid.to_bytes(4, "big"))


def _report_ends(calls: dict[int, socket.socket]) -> None:
    """Tell callers of programs that have ended how they did."""
    while calls:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        code = os.waitstatus_to_exitcode(status)
        with calls.pop(pid) as connection, contextlib.suppress(BrokenPipeError):
            connection.sendall(code.to_bytes(4, "big", signed=True))


def _become_program(connection: socket.socket) -> NoReturn:
    """Run a program, and end with its exit code.

    The interpreter's own end would take a program that only imports torch from 0.1 s to 0.5: it
    clears every module, and so copies every page that the forks share.
    """
    code: object = 0
    try:
        _run_program(connection)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _run_program(connection: socket.socket) -> None:
    """Take over the caller's files, environment and folder, and run what it asks for."""
    header, files, _, _ = socket.recv_fds(connection, 4, 3)
    request = b""
    while len(request) < int.from_bytes(header, "big"):
        request += connection.recv(1 << 16)
    arguments, environment, folder = json.loads(request)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    # Every fork would draw the same numbers.
    random.seed()
    numpy.random.seed()
    if arguments[0] == "-u":
        sys.stdout.reconfigure(write_through=True)
        del arguments[0]
    mode, *rest = arguments
    sys.path[0] = str(Path(mode).parent.resolve()) if not mode.startswith("-") else folder
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    if mode == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif mode == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        runpy.run_path(mode, run_name="__main__")


def _end_with(connection: socket.socket) -> None:
    """End this process when its caller is killed."""
    connection.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
