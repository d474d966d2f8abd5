"""Stands in for the docker command line: records what it is asked and runs the command itself,
with the variables and the memory it was given and nothing else."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

VALUED = ("--name", "--env", "--env-file", "--network", "--add-host", "--workdir", "--volume")


def main(argv: list[str]) -> int:
    with open(os.environ["DOCKER_LOG"], "a") as log:  # noqa: PTH123 - starts faster without
        print(json.dumps(argv), file=log, flush=True)
    if os.environ.get("DOCKER_DOWN"):
        print("Cannot connect to the Docker daemon. Is the docker daemon running?", file=sys.stderr)
        return 1 if argv[0] == "version" else 125
    return run(argv[1:]) if argv[0] == "run" else 0


def run(argv: list[str]) -> int:
    env, memory = {}, 0
    while argv[0].startswith("-"):
        option = argv.pop(0)
        value = argv.pop(0) if option in VALUED else option.partition("=")[2]
        if option == "--env":
            name, given, said = value.partition("=")
            env[name] = said if given else os.environ[name]
        if option == "--env-file":
            with open(value) as file:  # noqa: PTH123
                env |= dict(line.rstrip("\n").split("=", 1) for line in file)
        if option.startswith("--memory="):
            memory = int(value.removesuffix("m")) * 2**20
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    _, *command = argv  # the image
    done = subprocess.run(command, env=env, stderr=subprocess.PIPE, check=False)
    sys.stderr.write(done.stderr.decode())
    return 137 if memory and b"MemoryError" in done.stderr else done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
