"""verl's workers under Ray, from the driver's side.

Owns the Ray actors, the GPUs reserved for them and, if it started one, Ray itself. Always true:
every rank has run the same calls; after a failed call or a timeout the workers are stopped, because
the other ranks wait for the missing one inside a collective operation.
"""

from __future__ import annotations

import math
import os
import re
import time
import traceback
from collections.abc import Mapping
from typing import Any

from agentrl.algorithms.learners.verl.settings import VerlSettings
from agentrl.errors import ConfigError, PolicyError, TrainingError

FREE_WITHIN = 60.0  # seconds to wait for the GPUs of a run that has just ended


class VerlWorkers:
    """One worker on each GPU, with its models loaded. frozen: directories or hub names of the
    frozen models, by name.

    Raises ConfigError without Ray or the requested GPUs, PolicyError for a model that the workers
    cannot load."""

    def __init__(self, settings: VerlSettings, frozen: Mapping[str, str]) -> None:
        placed = settings["ray"]
        self.ranks: int = placed["nodes"] * placed["gpus_per_node"]
        self.timeout: float = placed["timeout"]
        self.group: Any = None
        self.pool: Any = None
        self.started_ray = False
        try:
            self._start(settings, dict(frozen))
        except BaseException:
            self.close()
            raise

    def all(self, verb: str, *arguments: Any) -> list[Any]:
        """Call a method with the same arguments on every rank; returns the results by rank."""
        return self.each(verb, *([argument] * self.ranks for argument in arguments))

    def each(self, verb: str, *arguments: list[Any]) -> list[Any]:
        """Call a method on every rank; arguments: lists with one value per rank.

        Raises TrainingError when a worker fails or does not answer in time."""
        import ray

        if self.group is None:
            raise TrainingError("verl's workers are stopped; start the run again")
        try:
            answers: list[Any] = ray.get(
                self.group.execute_all_async(verb, *arguments), timeout=self.timeout
            )
        except ray.exceptions.GetTimeoutError:
            self.close()
            raise TrainingError(
                f"verl's workers did not answer {verb!r} within learner.verl.timeout = "
                f"{self.timeout:g} s; raise it, or see Ray's logs of the workers"
            ) from None
        except ray.exceptions.RayError as error:
            self.close()
            if verb != "open" and isinstance(error, ray.exceptions.RayActorError):
                raise TrainingError(
                    f"a worker of verl died in {verb!r} ({_exit(error)}); the same command goes on "
                    "after the last checkpoint"
                ) from None
            reason = [line.strip() for line in str(error).splitlines() if line.strip()]
            kind = PolicyError if verb == "open" else TrainingError
            raise kind(f"a worker of verl failed in {verb!r}: {reason[-1][:300]}") from None
        return answers

    def sent(self, thing: Any) -> Any:
        """A reference to an object in Ray's store. Raises TrainingError if it cannot be pickled."""
        import ray

        try:
            return ray.put(thing)
        except TypeError as error:
            raise TrainingError(
                "the algorithm cannot be sent to verl's workers, because something in it cannot be "
                f"pickled ({str(error).strip().splitlines()[0]}); take that out of its functions"
            ) from None

    def close(self) -> None:
        """Stop the workers, and Ray if it was started here. May be called again."""
        import ray

        group, self.group = self.group, None
        for worker in group.workers if group else []:
            ray.kill(worker)
        pool, self.pool = self.pool, None
        for reserved in (pool.pgs if pool else None) or []:
            ray.util.remove_placement_group(reserved)
        if self.started_ray:
            self.started_ray = False
            ray.shutdown()

    def _start(self, settings: VerlSettings, frozen: dict[str, str]) -> None:
        import ray
        from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
        from verl.utils.device import get_device_name

        from agentrl.algorithms.learners.verl.engines import check_options
        from agentrl.algorithms.learners.verl.worker import PolicyWorker

        check_options(settings)
        placed = settings["ray"]
        if not ray.is_initialized():
            _join(placed["address"] or os.environ.get("RAY_ADDRESS"))
            self.started_ray = True
        self._find_room(placed)
        self.pool = RayResourcePool(
            [placed["gpus_per_node"]] * placed["nodes"], use_gpu=True, max_colocate_count=1
        )
        start = RayClassWithInitArgs(cls=ray.remote(PolicyWorker), settings=settings, frozen=frozen)
        self.group = RayWorkerGroup(
            resource_pool=self.pool,
            ray_cls_with_init=start,
            device_name=get_device_name(),
            ray_wait_register_center_timeout=math.ceil(self.timeout),
        )
        self.all("open")

    def _find_room(self, placed: Mapping[str, Any]) -> None:
        """Wait for the GPUs of a run that has just ended; verl itself would wait forever."""
        import ray

        each = placed["gpus_per_node"]
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        asked = f"learner.verl: {placed['nodes']} nodes with {each} GPUs are asked for, and "
        if sum(int(node.get("GPU", 0)) // each for node in alive) < placed["nodes"]:
            has = ", ".join(str(int(node.get("GPU", 0))) for node in alive)
            raise ConfigError(f"{asked}Ray's nodes have {has}; lower them or add nodes to it")
        until = time.monotonic() + min(self.timeout, FREE_WITHIN)
        while ray.available_resources().get("GPU", 0) < self.ranks:
            if time.monotonic() > until:
                free = int(ray.available_resources().get("GPU", 0))
                raise ConfigError(f"{asked}Ray has {free} that are free; wait for the others' end")
            time.sleep(0.2)


def _join(address: str | None) -> None:
    """Connect to the Ray at an address, or start one."""
    import ray

    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False)
    except Exception as error:  # noqa: BLE001 - Ray has no class for this
        why = (str(error).splitlines() or [type(error).__name__])[0]
        if not address:
            raise ConfigError(f"learner.verl: Ray cannot be started here ({why})") from None
        where = f"learner.verl.address = {address!r}"
        if "AuthenticationError" in "".join(traceback.format_exception(error)):
            raise ConfigError(
                f"{where}: Ray wants its token there; set RAY_AUTH_MODE=token and "
                "RAY_AUTH_TOKEN_PATH, or RAY_AUTH_TOKEN, as for its `ray start`"
            ) from None
        raise ConfigError(
            f"{where}: Ray cannot be reached there ({why}); give the address that `ray start` "
            "printed"
        ) from None


def _exit(error: Exception) -> str:
    """Why a worker ended, as Ray tells it."""
    told = str(error).strip()
    if "its node has died" in told:
        address = re.search(r"^\s*ip: (\S+)", told, re.MULTILINE)
        where = f"its node {address[1]}" if address else "its node"
        return f"{where} is lost: {told.splitlines()[-1].rpartition(': ')[2]}"[:200]
    _, _, detail = told.partition("Worker exit detail: ")
    return (detail or told).strip().split(". ")[0].splitlines()[0][:200]
