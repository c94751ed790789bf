"""The connector class that vLLM makes: one object in its core process (the scheduler's half), one in each
worker.

It only passes on: `scheduler_half.py` and `worker_half.py` do the work. What differs between the supported
versions of vLLM is here as well.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from kvhandoff.engine.facts import EngineFacts
from kvhandoff.vllm.cache_layout import cache_facts
from kvhandoff.vllm.driver import Driver
from kvhandoff.vllm.fingerprint import vllm_fingerprint
from kvhandoff.vllm.rank_channel import RankHello
from kvhandoff.vllm.ranked_mover import RankedMover
from kvhandoff.vllm.scheduler_half import SchedulerHalf
from kvhandoff.vllm.settings import check_version, plugin_settings
from kvhandoff.vllm.worker_half import WorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

GIL_SWITCH_S = 0.0005
"""A thread that computes gives another one a turn after this long (Python's default is 5 ms): a claim, or a
transfer that has ended, waits for no longer."""

_REPORTS_FAILURES = hasattr(base, "KVConnectorTransferResults")
"""Whether a worker can say that a whole load failed (0.32), or only that all its blocks are bad."""


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """From a worker to the core, once."""

    hello: RankHello


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the core to the workers, with each step."""

    step: int
    """0: nothing is computed."""


@dataclass
class StepDone(KVConnectorWorkerMetadata):
    """From a worker to the core, with a step's output."""

    step: int

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Of the ranks' outputs of one step."""
        assert isinstance(other, StepDone), "all ranks run this connector"
        return self if self.step <= other.step else other


class KVHandoffConnector(KVConnectorBase_V1):
    """vLLM's side of the handoff: `--kv-transfer-config '{"kv_connector": "KVHandoffConnector", "kv_role":
    "kv_both"}'`."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raises ConfigError for a deployment that can't be served."""
        super().__init__(vllm_config, role, kv_cache_config)
        check_version(vllm.__version__)
        _log_as_vllm()
        # Our threads get their turn during a step, not after it.
        sys.setswitchinterval(min(sys.getswitchinterval(), GIL_SWITCH_S))
        self._settings = plugin_settings(vllm_config)
        self._cache_config = kv_cache_config
        # What a load doesn't bring is computed; vLLM's default is to fail the request.
        vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        self._worker: WorkerHalf | None = None
        self._half: SchedulerHalf | None = None
        self._driver: Driver | None = None
        self._pool: Any = None
        self._step = 0
        self._bad_blocks: set[int] = set()
        if role == KVConnectorRole.WORKER:
            parallel = vllm_config.parallel_config
            self._worker = WorkerHalf(
                self._settings.engine_id,
                parallel.rank % parallel.tensor_parallel_size,
                parallel.tensor_parallel_size,
                self._settings.extra.cluster_key(),
                self._settings.extra.plane,
                cache_facts(vllm_config, kv_cache_config),
            )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """With all layers of a block side by side NIXL moves a block in one run of bytes. A wish: vLLM drops
        it where an attention backend has another order. Not heads before layers (BHLNC), which would be one
        run for each head, too: such engines could not exchange with those of the other orders."""
        if check_version(vllm.__version__) < (0, 32) or vllm_config.device_config.device_type == "cpu":
            return None
        return "BLHNC"

    # ---------------------------------------------------------------------------------- workers

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See vLLM."""
        self._on_worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """See vLLM."""
        return Handshake(self._on_worker.handshake())

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """See vLLM."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata), "made by build_connector_meta"
        self._step = connector_metadata.step

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads run beside the steps."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No step runs before its loads have ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Writes begin when a step has come back."""

    def wait_for_save(self) -> None:
        """See `save_kv_layer`."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See vLLM (0.29 to 0.31): failed loads are told by their blocks."""
        results = self._on_worker.results()
        self._bad_blocks |= results.bad_blocks
        return None, results.finished or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """See vLLM (0.32)."""
        results = self._on_worker.results()
        self._bad_blocks |= results.bad_blocks
        return base.KVConnectorTransferResults(
            finished_recving=results.finished, failed_recving=results.failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See vLLM."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """See vLLM."""
        return StepDone(self._step) if self._step else None

    # ---------------------------------------------------------------------------------- scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """See vLLM."""
        self._pool = gpu_block_pool

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """See vLLM. All workers have registered their memory: the handoff side begins. Raises ConfigError or
        TransportError."""
        hellos = [shake.hello for shake in metadata.values() if isinstance(shake, Handshake)]
        config, settings = self._vllm_config, self._settings
        model = config.model_config
        name = model.served_model_name
        facts = EngineFacts(
            engine_id=settings.engine_id,
            role=settings.extra.role,
            model=name if isinstance(name, str) else name[0] if name else model.model,
            model_fingerprint=vllm_fingerprint(config, _find_snapshot),
            num_blocks=hellos[0].num_blocks,
            processes=tuple(hello.process for hello in hellos),
            integration="vllm",
            about={
                "vllm": vllm.__version__,
                "ranks": str(len(hellos)),
                "backend": settings.extra.backend,
                "lanes": str(settings.extra.lanes),
            },
        )
        self._half = SchedulerHalf(
            self._pool,
            hellos[0].kv_layout,
            facts.model_fingerprint,
            model.max_model_len,
            reports_failures=_REPORTS_FAILURES,
            prefix_caching=bool(config.cache_config.enable_prefix_caching),
        )
        self._driver = Driver(settings, facts, self._half)
        self._half.connect(self._driver)
        self._driver.start(lambda: RankedMover(hellos))

    def on_new_request(self, request: Any) -> None:
        """See vLLM."""
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See vLLM."""
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See vLLM."""
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """See vLLM."""
        return StepMetadata(self._scheduler.planned(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """See vLLM."""
        done = connector_output.kv_connector_worker_meta
        if isinstance(done, StepDone):
            self._scheduler.done(done.step)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM. No free is delayed: what is kept has references of its own."""
        return False, self._scheduler.finished(request, block_ids)

    def has_pending_block_frees(self) -> bool:
        """See vLLM."""
        return self._scheduler.frees_are_coming()

    def reset_cache(self) -> bool | None:
        """See vLLM."""
        self._scheduler.reset()
        return None

    def take_events(self) -> Iterable[Any]:
        """None."""
        return ()

    def shutdown(self) -> None:
        """See vLLM. Whatever of it was made."""
        if self._half is not None:
            self._half.healthy = False
        if self._driver is not None:
            self._driver.close()
        if self._worker is not None:
            self._worker.close()

    @property
    def _on_worker(self) -> WorkerHalf:
        assert self._worker is not None, "a call to the other half"
        return self._worker

    @property
    def _scheduler(self) -> SchedulerHalf:
        assert self._half is not None, "a call to the other half"
        return self._half


def _log_as_vllm() -> None:
    """vLLM shows its own loggers only: have ours use what they use."""
    ours, theirs = logging.getLogger("kvhandoff"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = theirs.propagate


def _find_snapshot(model: str, revision: str | None, download_dir: str | None) -> str:
    """Where vLLM has downloaded a model of the Hugging Face hub to."""
    from huggingface_hub import snapshot_download

    return snapshot_download(model, revision=revision, cache_dir=download_dir, local_files_only=True)
