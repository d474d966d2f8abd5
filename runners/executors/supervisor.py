"""The supervisor of an agent's process: starts it, watches it, and kills all its descendants.

The runner starts one *template*, a small process with a single thread. For each process it sends
the template a few file descriptors; the template forks a *supervisor*, which starts the payload as
its child, in a new session. Linux only.

Invariant: a supervisor is the subreaper of its payload, so all processes of the payload stay
descendants of the supervisor, even daemons. The connection between supervisor and runner is open
while both are alive. When the payload ends, or the runner closes the connection or dies, the
supervisor kills every descendant, and only then reports and exits. The template is a subreaper,
too: if a supervisor is killed, by its payload or the system, its remaining processes become
children of the template, which kills them.

Small processes import this module: import only the standard library here.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36  # linux/prctl.h
HEADER = struct.Struct("!I")  # length of the JSON that follows
MAX_FDS = 8
CANNOT_RUN = 127  # exit status, as in shells
CLEANUP_TIMEOUT = 10.0  # seconds for `after`
LEFT_PAUSE = 20  # milliseconds until children of killed orphans are searched
_libc = ctypes.CDLL(None, use_errno=True)


class ProcessSpec(TypedDict, total=False):
    """A process to start; without `argv` it calls the template's `serve`."""

    argv: list[str]
    env: dict[str, str]
    folder: str
    memory: int  # bytes, RLIMIT_DATA of each process; runtimes reserve far more address space
    after: list[str]  # command to run if the payload did not end by itself
    remove: str  # folder to delete if the runner is gone


Serve = Callable[[int], int]
"""Maps the first file descriptor after stderr to the exit status."""


def run_template(control: socket.socket, serve: Serve | None = None) -> None:
    """Fork a supervisor for each message, until the runner closes `control` or dies."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors report on their connection
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    supervisors: set[int] = set()  # pidfds, which become readable at the end of a process
    spared = set(_children())  # children that the user's module started at import
    poll, orphans_remain = select.poll(), False
    poll.register(control, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll(LEFT_PAUSE if orphans_remain else None)}
        for ended in ready & supervisors:
            poll.unregister(ended)
            supervisors.remove(ended)
            os.close(ended)
        if control.fileno() not in ready:
            orphans_remain = _kill_left(spared)
            continue
        message, fds, *_ = socket.recv_fds(control, 1, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        if not message:
            _kill_left(spared)
            return
        if (pid := os.fork()) == 0:
            control.close()
            for fd in supervisors:
                os.close(fd)
            try:
                _supervise(fds[0], fds[1:], serve)
            finally:
                os._exit(0)
        for fd in fds:
            os.close(fd)
        try:
            supervisor = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended already
            orphans_remain = True
        else:
            supervisors.add(supervisor)
            poll.register(supervisor, select.POLLIN)


def _kill_left(spared: set[int]) -> bool:
    """Kill children in other sessions than this process, except those to be `spared`: they are
    payloads and their descendants, because payloads begin a session and supervisors do not. Return
    whether there were any, because their children may follow."""
    session, killed = os.getsid(0), False
    for child in set(_children()) - spared:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(child) != session:
                os.kill(child, signal.SIGKILL)
                killed = True
    return killed


def _supervise(line_fd: int, fds: list[int], serve: Serve | None) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with socket.socket(fileno=line_fd) as line:
        with line.makefile("rb") as stream:
            header = stream.read(HEADER.size)
            size = HEADER.unpack(header)[0] if len(header) == HEADER.size else 0
            body = stream.read(size)
        if not size or len(body) < size:  # the runner closed the connection
            return
        spec: ProcessSpec = json.loads(body)
        payload = os.fork()
        if payload == 0:
            line.close()
            _payload(spec, fds, serve)
        for fd in fds:
            os.close(fd)
        ended_by_itself = _wait(payload, line)
        status = _kill_descendants(payload)
        if not ended_by_itself or status < 0:
            _clean_up(spec)
        try:
            line.sendall(f"{status}\n".encode())
        except OSError:  # the runner is gone
            if "remove" in spec:
                shutil.rmtree(spec["remove"], ignore_errors=True)


def _wait(payload: int, line: socket.socket) -> bool:
    """Wait for the end of payload or connection; return whether the payload ended."""
    pidfd = os.pidfd_open(payload)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(line, select.POLLIN)
    ready = [fd for fd, _ in poll.poll()]
    os.close(pidfd)
    return pidfd in ready


def _kill_descendants(payload: int) -> int:
    """Kill until no child is left: orphans become children, as this process is their subreaper.
    Return the payload's exit status, or minus the number of the signal that ended it."""
    status = 0
    while True:
        try:
            pid, code = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                for child in _children():
                    os.kill(child, signal.SIGKILL)
                pid, code = os.waitpid(-1, 0)
        except ChildProcessError:
            return status
        if pid == payload:
            status = os.waitstatus_to_exitcode(code)


def _children() -> list[int]:
    me, children = str(os.getpid()), []
    for entry in os.listdir("/proc"):  # noqa: PTH208 - thousands of entries, and only names
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text()
            except OSError:  # the process has ended
                continue
            if stat.rpartition(")")[2].split()[1] == me:
                children.append(int(entry))
    return children


def _clean_up(spec: ProcessSpec) -> None:
    """Run `after`, ignoring errors, which cannot be reported to anyone."""
    how: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    how |= {"env": spec.get("env"), "timeout": CLEANUP_TIMEOUT}
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if after := spec.get("after"):
            subprocess.run(after, check=False, **how)


def _payload(spec: ProcessSpec, fds: list[int], serve: Serve | None) -> None:
    """Become the payload; never returns."""
    status = CANNOT_RUN
    try:
        os.setsid()
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number in (signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        for target, fd in enumerate(fds):
            os.dup2(fd, target, inheritable=True)
        limits = {resource.RLIMIT_CORE: 0}
        if spec.get("memory"):
            limits[resource.RLIMIT_DATA] = spec["memory"]
        for limit, value in limits.items():
            resource.setrlimit(limit, (value, value))
        if "argv" not in spec:
            assert serve is not None
            status = serve(3)
            return
        if "folder" in spec:
            os.chdir(spec["folder"])
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])
    except (OSError, ValueError) as error:  # ValueError: a NUL in an argument
        os.write(2, f"cannot run {spec.get('argv')}: {error}\n".encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    # No payload can read or trace its supervisor; `exec` resets the flag for the payload.
    _libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    run_template(socket.socket(fileno=int(sys.argv[1])))
