"""vLLM hands KV from prefill to decode instances, and shares prefixes between them, through a p2pkv cluster.

Load it with ``--kv-transfer-config`` and ``kv_connector_module_path``; ``docs/vllm.md`` has the command line. vLLM
makes one connector in its scheduler and one in every worker; each forwards to its half (``scheduler.py``,
``worker.py``). No exception reaches the engine once it runs: what goes wrong is a load that failed or a block that
is not shared, counted, and logged, each cause once a minute. Errors at start are raised: vLLM does not start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from p2pkv.config import Config
from p2pkv.errors import UsageError
from p2pkv.integrations.boundary import Boundary, guarded
from p2pkv.integrations.engine import current_stream
from p2pkv.integrations.vllm_connector import installed
from p2pkv.integrations.vllm_connector.caches import KVCaches
from p2pkv.integrations.vllm_connector.handoff import Handoff
from p2pkv.integrations.vllm_connector.holds import BlockPool
from p2pkv.integrations.vllm_connector.installed import ConnectorBase, SupportsHMA
from p2pkv.integrations.vllm_connector.messages import RankDescription, StepMetadata, StepReport
from p2pkv.integrations.vllm_connector.request import Request, Tables
from p2pkv.integrations.vllm_connector.scheduler import SchedulerSide
from p2pkv.integrations.vllm_connector.settings import Instance
from p2pkv.integrations.vllm_connector.stats import PromMetrics, Stats
from p2pkv.integrations.vllm_connector.weights import Weights, served, watch
from p2pkv.integrations.vllm_connector.worker import WorkerSide
from p2pkv.metrics import Metrics
from p2pkv.node import Node

_NOBODY: set[str] = set()


class P2PKVConnector(ConnectorBase, SupportsHMA):
    """A KV connector of vLLM's V1 interface. Used by one thread of its process, the scheduler's or the worker's.

    It serves models of several groups of layers (vLLM's hybrid KV cache manager).
    """

    _cache_hit_source = installed.HIT_SOURCE

    def __init__(
        self,
        vllm_config: Any,
        role: Any,
        kv_cache_config: Any,
        *,
        start_node: Callable[[Config], Node] = Node.start,
        current_stream: Callable[[object], int] = current_stream,
        weights: Weights = served,
    ) -> None:
        """Check the settings; a node starts when vLLM registers its KV caches. Raises the errors of both."""
        super().__init__(vllm_config, role, kv_cache_config)
        installed.log_with_the_engine()
        self._instance = Instance.read(vllm_config, kv_cache_config)
        self._parallel, self._cache_dtype = vllm_config.parallel_config, vllm_config.cache_config.cache_dtype
        self._specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._n_blocks = kv_cache_config.num_blocks
        self._start_node, self._current_stream = start_node, current_stream
        self.boundary = Boundary("vLLM", Metrics())
        self._scheduler = SchedulerSide(self._instance, start_node=start_node, weights=weights)
        watch(weights)
        self._worker: WorkerSide | None = None
        self._step: StepMetadata | None = None

    # --- in the scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take vLLM's block pool, in which blocks are held that are being published."""
        self._scheduler.holds.bind(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], RankDescription]
    ) -> None:
        """Take what the workers say of themselves, by pipeline and tensor parallel rank."""
        self._scheduler.connect([description for _, description in sorted(metadata.items())])

    @guarded("request", miss=None)
    def on_new_request(self, request: Request) -> None:
        """Take note of a request."""
        self._scheduler.arrived(request)

    @guarded("match", miss=(0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded, None if that is not known yet, and whether a load is to start."""
        n_tokens = self._scheduler.n_external(request, num_computed_tokens)
        return n_tokens, bool(n_tokens) and not self._scheduler.is_by_layer(request)

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """Have the blocks loaded that vLLM has made room for."""
        tables = blocks.get_block_ids()
        if not self._queue_load(request, tables, num_external_tokens):
            self._scheduler.fail(request, tables, num_external_tokens, "an error; the log says which")

    @guarded("load", miss=False)
    def _queue_load(self, request: Request, tables: Tables, n_external: int) -> bool:
        return self._scheduler.allocated(request, tables, n_external)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """Return what the workers are to do in this step."""
        metadata = self._scheduler.step(scheduler_output.preempted_req_ids or ())
        self._observe(scheduler_output)
        self._publish(metadata, scheduler_output)
        return metadata

    @guarded("observe", miss=None)
    def _observe(self, scheduled: Any) -> None:
        self._scheduler.observe(scheduled.num_scheduled_tokens, scheduled.preempted_req_ids or ())

    @guarded("publish", miss=None)
    def _publish(self, metadata: StepMetadata, scheduled: Any) -> None:
        tables = scheduled.kv_connector_block_state.get_block_ids
        self._scheduler.publish(metadata, scheduled.num_scheduled_tokens, tables)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take what the workers have reported."""
        self._hear(connector_output)
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            self._release(report)
            self._tell(report)

    @guarded("observe", miss=None)
    def _hear(self, connector_output: Any) -> None:
        self._scheduler.heard(
            connector_output.finished_recving or (), connector_output.invalid_block_ids or ()
        )

    @guarded("report", miss=None)
    def _release(self, report: StepReport) -> None:
        self._scheduler.holds.done(report.done)

    @guarded("report", miss=None)
    def _tell(self, report: StepReport) -> None:
        self._scheduler.events.hear(report.changes)

    def take_events(self) -> list[Any]:
        """Return what vLLM's KV events are to tell of blocks in p2pkv's memory and on its disks."""
        return self._scheduler.events.take()

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the workers keep the request's blocks, and the response's ``kv_transfer_params``."""
        self._end(request)
        # on its own: what is known of a request is forgotten whatever becomes of the hand-off
        return self._finish(request, block_ids, self._handoff(request))

    @guarded("observe", miss=None)
    def _end(self, request: Request) -> None:
        self._scheduler.ended(request)

    @guarded("offer", miss=None)
    def _handoff(self, request: Request) -> Handoff | None:
        return self._scheduler.handoff(request)

    @guarded("finish", miss=(False, None))
    def _finish(
        self, request: Request, block_ids: Tables, handoff: Handoff | None
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, block_ids, handoff)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Return the groups that a load fills, which vLLM need not clear before."""
        return tuple(range(len(self._specs)))

    def has_pending_push_work(self) -> bool:
        """Whether the workers must hear of something although nothing is to run."""
        return self._scheduler.has_news

    def reset_cache(self) -> bool:
        """Take back all that this instance has published."""
        self._scheduler.clear()
        return True

    # --- in a worker

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Start the node and register the caches with it. Raises: vLLM then does not start."""
        rank, groups = self._parallel.rank, self._instance.groups
        caches = KVCaches(
            kv_caches, groups=groups.each, n_blocks=self._n_blocks, current_stream=self._current_stream
        )
        isa = self._attention_isa()
        self._worker = WorkerSide(self._instance, rank, isa, caches, start_node=self._start_node)

    def _attention_isa(self) -> str:
        """Return how the attention of each group packs its blocks; layers with a state have none."""
        specs = [
            each for spec in self._specs for each in getattr(spec, "kv_cache_specs", {"": spec}).values()
        ]
        found = [
            installed.attention_isa(spec.dtype, spec.block_size, spec.head_size, self._cache_dtype)
            for spec in specs
            if hasattr(spec, "head_size")
        ]
        return ",".join(sorted(set(found)))

    def get_handshake_metadata(self) -> RankDescription:
        """Return what the scheduler's half needs to know of this rank."""
        return self._registered.describe()

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        """Take what the scheduler's half has decided for this step."""
        self._step = connector_metadata

    def has_connector_metadata(self) -> bool:
        """Whether a step is under way."""
        return self._step is not None

    def clear_connector_metadata(self) -> None:
        """Forget the step; all of it has been started."""
        self._step = None

    @guarded("preempt", miss=None)
    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        """Do what must be done before the step overwrites anything."""
        self._registered.before_forward(kv_connector_metadata)

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None:
        """Start the step's loads. None of them is waited for here."""
        self._load()

    @guarded("load", miss=None)
    def _load(self) -> None:
        if self._step is not None:
            self._registered.load(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Start the step's loads, now that vLLM has cleared the blocks it gave out, and block until a layer is there.

        It is waited for by loads that the step computes with alone: with ``layer_deadline``, and no longer than that.
        """
        self._load()
        self._wait(layer_name)

    @guarded("load", miss=None)
    def _wait(self, layer_name: str) -> None:
        self._registered.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: object, attn_metadata: object, **kwargs: object
    ) -> None:
        """Nothing is done: a layer is offered where it lies, and decode learns of it when all of them are there."""

    @guarded("save", miss=None)
    def wait_for_save(self) -> None:
        """Have the step's blocks published; nothing is waited for."""
        if self._step is not None:
            self._registered.after_forward(self._step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return which requests' blocks may be freed, and whose loads have ended, failed ones included."""
        return installed.transfer_results(*self._take_done())

    @guarded("results", miss=(_NOBODY, _NOBODY, _NOBODY))
    def _take_done(self) -> tuple[set[str], set[str], set[str]]:
        return self._registered.take_done()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be loaded."""
        return self._registered.take_failed_blocks()

    def build_connector_worker_meta(self) -> StepReport | None:
        """Return what the scheduler's half has to hear."""
        return None if self._worker is None else self._worker.report()

    def get_kv_connector_stats(self) -> Stats | None:
        """Return what was counted since the last time; vLLM asks both halves."""
        return self._scheduler.tally.take() if self._worker is None else self._worker.stats()

    @property
    def _registered(self) -> WorkerSide:
        if self._worker is None:
            raise UsageError("vLLM has not registered its KV caches yet")
        return self._worker

    # --- in both

    @property
    def node(self) -> Node | None:
        """The worker's node that pages go through, once the KV caches are registered."""
        return None if self._worker is None else self._worker.nodes.cache

    def shutdown(self) -> None:
        """Leave the cluster. Idempotent."""
        self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    # --- where vLLM knows the class alone

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Ask for blocks head after head, of which instances of other sizes can take some; MLA has no heads.

        vLLM follows where its attention kernels can. Where it does not, instances of the same sizes share all the same.
        """
        return None if vllm_config.model_config.use_mla else "HND"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return whether layers are waited for: a CUDA graph of the whole model would compute without."""
        return bool(extra_config.get("layer_deadline"))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """Return ``data`` as the connector's stats."""
        return Stats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Mapping[type, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        """Return the connector's part of vLLM's ``/metrics``."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
