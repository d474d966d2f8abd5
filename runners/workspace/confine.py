"""The sandbox of a program, which may connect to one port of this machine and write to one folder.

Three processes: this one stays in the machine's network and forwards connections; the second owns
the namespaces; the third is the init process of its PID namespace, starts the program and reaps its
orphans. A supervisor kills all of them. Linux only.

A small process imports this module: import only the standard library here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypedDict

NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
RDONLY, NOSUID, NODEV, BIND, REC, PRIVATE = 1, 2, 4, 0x1000, 0x4000, 0x40000  # linux/mount.h
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, ATTR_RDONLY = 442, -100, 0x8000, 1
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
SET_DUMPABLE, CAPBSET_DROP, NO_NEW_PRIVS = 4, 24, 38  # linux/prctl.h
CAPABILITIES, CAP_SETFCAP = 64, 31
SCRATCH = ("/tmp", "/var/tmp", "/dev/shm", "/run")
SCRATCH_SIZE = "256m"
_libc = ctypes.CDLL(None, use_errno=True)


class Confinement(TypedDict):
    folder: str  # the working directory
    port: int  # port of the gateway on this machine
    write: str  # the writable folder
    show: list[str]  # folders to keep visible inside a hidden folder or /tmp
    hide: list[str]  # folders and files to show as empty
    mounts: bool  # False: the program itself (bwrap) limits the file system
    user: tuple[int, int] | None  # uid and gid; None: the current user, in a user namespace


def main(spec: Confinement, argv: list[str]) -> int:
    """Run the program; return its exit status, 128 plus the signal's number as a shell does."""
    _libc.prctl(SET_DUMPABLE, 0, 0, 0, 0)
    ours, theirs = socket.socketpair()
    middle = os.fork()
    if middle == 0:
        ours.close()
        _in_child(lambda: _isolate(spec, argv, theirs))
    theirs.close()
    _, fds, *_ = socket.recv_fds(ours, 1, 1)
    if fds:
        listener = socket.socket(fileno=fds[0])
        threading.Thread(target=_forward, args=(listener, spec["port"]), daemon=True).start()
    return _status(os.waitpid(middle, 0)[1])


def _isolate(spec: Confinement, argv: list[str], parent: socket.socket) -> int:
    uid, gid = os.getuid(), os.getgid()
    user_namespace = 0 if spec["user"] else NEWUSER
    _check(_libc.unshare(user_namespace | NEWNET | NEWIPC | NEWPID | NEWNS))
    if user_namespace:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    listener = socket.socket()
    fcntl.ioctl(listener, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", spec["port"]))
    listener.listen(128)
    socket.send_fds(parent, [b"l"], [listener.fileno()])
    listener.close()
    parent.close()
    _mount("none", "/", "", REC | PRIVATE)
    if spec["mounts"]:
        _limit_files(spec)
    first = os.fork()
    if first == 0:
        _in_child(lambda: _be_init(spec, argv))
    return _status(os.waitpid(first, 0)[1])


def _limit_files(spec: Confinement) -> None:
    """Make all files read-only but the folder and scratch space; make hidden paths appear empty."""
    shown = [path for path in (*spec["show"], spec["write"]) if os.path.isdir(path)]  # noqa: PTH112
    opened = {path: os.open(path, os.O_PATH) for path in shown}
    scratch = [path for path in SCRATCH if os.path.isdir(path)]  # noqa: PTH112
    for path in scratch:
        _mount("tmpfs", path, "tmpfs", NOSUID | NODEV, f"mode=1777,size={SCRATCH_SIZE}")
    for path in spec["show"]:
        _show(path, opened)
    for path in spec["hide"]:
        if os.path.isdir(path):  # noqa: PTH112
            _mount("tmpfs", path, "tmpfs", NOSUID | NODEV, "mode=755,size=1m")
        elif os.path.exists(path):  # noqa: PTH110
            _mount(os.devnull, path, "", BIND)
    _show(spec["write"], opened)
    _set_read_only("/", on=True)
    for path in (spec["write"], *scratch):
        _set_read_only(path, on=False)


def _show(path: str, opened: dict[str, int]) -> None:
    if path in opened:
        os.makedirs(path, exist_ok=True)  # noqa: PTH103
        _mount(f"/proc/self/fd/{opened[path]}", path, "", BIND)
        os.close(opened[path])


def _be_init(spec: Confinement, argv: list[str]) -> int:
    _libc.prctl(SET_DUMPABLE, 0, 0, 0, 0)
    with contextlib.suppress(OSError):  # refused in a container that masks parts of /proc
        _mount("proc", "/proc", "proc", NOSUID | NODEV)
    program = os.fork()
    if program == 0:
        _in_child(lambda: _become(spec, argv))
    while True:
        pid, status = os.wait()
        if pid == program:
            return _status(status)  # the kernel kills the rest of the namespace


def _become(spec: Confinement, argv: list[str]) -> NoReturn:
    # bwrap needs SETFCAP to map root into its user namespace, and drops it itself.
    kept_capabilities = set() if spec["mounts"] else {CAP_SETFCAP}
    for capability in {*range(CAPABILITIES)} - kept_capabilities:
        _libc.prctl(CAPBSET_DROP, capability, 0, 0, 0)
    if spec["user"]:
        os.setgroups([])
        os.setgid(spec["user"][1])
        os.setuid(spec["user"][0])
    _libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
    os.chdir(spec["folder"])
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        raise OSError(error.errno, error.strerror, argv[0]) from None


def _forward(listener: socket.socket, port: int) -> None:
    while True:
        inner, _ = listener.accept()
        try:
            outer = socket.create_connection(("127.0.0.1", port))
        except OSError:
            inner.close()
            continue
        for pair in ((inner, outer), (outer, inner)):
            threading.Thread(target=_copy, args=pair, daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    texts = (text.encode() for text in (source, target, kind))
    _check(_libc.mount(*texts, ctypes.c_ulong(flags), options.encode()), target)


def _set_read_only(path: str, *, on: bool) -> None:
    attributes = struct.pack("QQQQ", ATTR_RDONLY * on, ATTR_RDONLY * (not on), 0, 0)
    how = AT_RECURSIVE if on else 0
    _check(_libc.syscall(MOUNT_SETATTR, AT_FDCWD, path.encode(), how, attributes, 32), path)


def _check(result: int, path: str = "") -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path or None)


def _in_child(work: Callable[[], int]) -> NoReturn:
    status = 126
    try:
        status = work()
    except OSError as error:
        hint = " (/tmp and /run look empty to it)" if error.errno == errno.ENOENT else ""
        os.write(2, f"cannot confine the program: {error}{hint}\n".encode())
    finally:
        os._exit(status)


def _status(code: int) -> int:
    status = os.waitstatus_to_exitcode(code)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    done = main(json.loads(sys.argv[1]), sys.argv[2:])
    os._exit(done)
