"""Stands in for the docker command line where real containers have no part, and for its faults:
records what it is asked and runs programs itself, with the variables and the memory they were given
and nothing else. A container is a process that waits."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys

VALUED = (
    *("--name", "--env", "--env-file", "--network", "--add-host", "--workdir", "--volume"),
    *("--user", "--label", "--stop-timeout", "--entrypoint"),
)
LOG = os.environ["DOCKER_LOG"]


def main(argv: list[str]) -> int:
    with open(LOG, "a") as log:  # noqa: PTH123 - starts faster without
        print(json.dumps(argv), file=log, flush=True)
    if os.environ.get("DOCKER_DOWN") or os.path.exists(f"{LOG}.down"):  # noqa: PTH110
        print("Cannot connect to the Docker daemon. Is the docker daemon running?", file=sys.stderr)
        return 1 if argv[0] == "version" else 125
    verb, *rest = argv
    if verb == "run" and "--detach" in rest:
        return start(rest)
    if verb in ("run", "exec"):
        return run(rest)
    if verb == "inspect":
        running, pid = state(rest[-1])
        print(
            pid if rest[1] == "{{.State.Pid}}" else f"{'running' if running else 'exited'} 0 false"
        )
    if verb == "info" and os.path.exists(f"{LOG}.info"):  # noqa: PTH110
        with open(f"{LOG}.info") as info:  # noqa: PTH123
            print(info.read())
    if verb == "image":
        print('{"Entrypoint": null, "Cmd": ["sh"]}')
    if verb == "rm":
        for name in rest[2:]:
            _, pid = state(name)
            if pid:
                os.kill(pid, signal.SIGKILL)
    return 0


def start(argv: list[str]) -> int:
    name = argv[argv.index("--name") + 1]
    memory = [word for word in argv if word.startswith("--memory=")]
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    held = subprocess.Popen(  # the name is among its arguments, as in a container
        ["sh", "-c", "sleep 1000 & wait", name], start_new_session=True, **quiet
    )
    with open(f"{LOG}.{name}", "w") as file:  # noqa: PTH123
        print(held.pid, *memory, file=file)
    print(name)
    return 0


def state(name: str) -> tuple[bool, int]:
    try:
        with open(f"{LOG}.{name}") as file:  # noqa: PTH123
            pid = int(file.read().split()[0])
        with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
            ended = stat.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False, 0
    return not ended, pid


def run(argv: list[str]) -> int:
    env: dict[str, str] = {}
    memory, works_in = 0, None
    while argv[0].startswith("-"):
        option = argv.pop(0)
        value = argv.pop(0) if option in VALUED else option.partition("=")[2]
        if option == "--env":
            name, given, said = value.partition("=")
            env[name] = said if given else os.environ[name]
        if option == "--env-file":
            with open(value) as file:  # noqa: PTH123
                env |= dict(line.rstrip("\n").split("=", 1) for line in file)
        if option == "--workdir" and os.path.isdir(value):  # noqa: PTH112
            works_in = value
    name, *command = argv  # a container's, or of an image
    if os.path.exists(f"{LOG}.{name}"):  # noqa: PTH110
        with open(f"{LOG}.{name}") as file:  # noqa: PTH123
            words = file.read().split()
        for option in words[1:]:
            memory = int(option.removeprefix("--memory=").removesuffix("m")) * 2**20
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    done = subprocess.run(command, env=env, cwd=works_in, stderr=subprocess.PIPE, check=False)
    sys.stderr.write(done.stderr.decode())
    return 137 if memory and b"MemoryError" in done.stderr else done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
