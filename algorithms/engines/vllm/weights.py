"""The newest weights of each policy, and the method by which servers get them."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from agentrl.algorithms.engines.vllm import weight_sync
from agentrl.algorithms.engines.vllm.client import VllmClient
from agentrl.algorithms.engines.vllm.serving import ServedModel, TrainedModel, VllmHost
from agentrl.algorithms.engines.vllm.weight_sync import AdapterSync, WeightSync
from agentrl.errors import PolicyError

log = logging.getLogger(__name__)


class NewestWeights:
    """What every server should have.

    Invariant: from `prepare` on, `serving` names the files that a server starts with and the
    version of each policy at its last `take`, and `send` brings exactly these weights to a server,
    as often as it is asked: so one that starts or returns at any time can be brought up to date. A
    method that has failed is not chosen again. Writer: the `VllmServer`."""

    def __init__(
        self, learned: TrainedModel, host: VllmHost, folder: Path, method: str, timeout: float
    ) -> None:
        """folder: emptied by `prepare`, deleted by `close`. method: see `weight_sync`. timeout:
        seconds for a transfer."""
        self.serving = ServedModel(folder / "weights", folder / "tokenizer")
        self._learned, self._host, self._folder = learned, host, folder
        self._asked, self._timeout = method, timeout
        self._method = ""  # the chosen one
        self._sync: WeightSync | None = None
        self._failed: dict[str, str] = {}  # method -> reason

    def prepare(self, *, in_flight: bool) -> str:
        """Choose how weights are sent, and write the files that a server starts with; returns the
        policy that answers by default. in_flight: weights will change during calls."""
        method, why = self._choose()
        adapters = self._learned.adapters
        if in_flight and method != "adapter" and not self._host.spans:
            log.warning(
                "A call that crosses an update names the version of its first token alone; start "
                "vLLM with --middleware agentrl.algorithms.engines.vllm.spans.SpanMiddleware."
            )
        if method != "adapter" and len(adapters) > 1:
            raise PolicyError(
                f"vLLM can serve one of the policies {', '.join(adapters)}, not all, because "
                f"{self._host.refuses_adapters}"
            )
        level = logging.WARNING if self._failed else logging.INFO
        log.log(level, "vLLM gets new weights by %s (%s).", method, why)
        shutil.rmtree(self._folder, ignore_errors=True)  # of a run that was killed
        self._folder.mkdir(parents=True)
        self.serving.weights, self.serving.backend = self._folder / "weights", ""
        self._learned.save_tokenizer(self.serving.tokenizer)
        self._sync = weight_sync.make_sync(method, self._learned, self._folder, self._timeout)
        self.serving.adapters = method == "adapter"
        names = adapters if self.serving.adapters else [self._host.name]
        self.serving.versions = dict.fromkeys(names, 0)
        self._sync.prepare(self.serving)
        for policy in names:
            self._sync.take(policy)
        self._method = method
        return names[0]

    def _choose(self) -> tuple[str, str]:
        gpu = self._learned.gpu
        capabilities = weight_sync.SyncCapabilities(
            adapters=self._host.refuses_adapters,
            backend=self._host.backend,
            gpu=gpu >= 0,
            shared=0 <= gpu < self._host.gpus,
            alone=self._host.gpus == 1,
            failed=self._failed,
        )
        return weight_sync.choose_sync(self._asked, capabilities)

    def allows_another(self, error: Exception) -> bool:
        """Whether `prepare` may choose another method after the first transfer failed."""
        if self._asked != "auto" or self._method == "reload" or len(self.serving.versions) > 1:
            return False
        self._sent.close()
        self._failed[self._method] = f"it failed here ({error})"
        return True

    @property
    def in_turn(self) -> bool:
        """Whether weights can be sent to one server after another."""
        return self._sent.in_turn

    def take(self, policy: str, version: int) -> None:
        """Make the learner's current weights the newest version of a policy."""
        sync = self._sent
        self.serving.versions[policy] = version
        sync.take(policy)

    async def send(self, policy: str, servers: VllmClient) -> None:
        """Send the newest weights of a policy. Calls are held or paused there, or use another
        version of the adapter."""
        await self._sent.send(policy, servers)

    @property
    def adapters(self) -> AdapterSync | None:
        """The method if it loads adapters by name, of which servers may have old versions."""
        return self._sync if isinstance(self._sync, AdapterSync) else None

    def close(self) -> None:
        if self._sync is not None:
            self._sync.close()
            self._sync = None
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _sent(self) -> WeightSync:
        assert self._sync is not None, "start() comes first"
        return self._sync
