"""What the two halves of the connector tell each other, once a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from tierkv.host.region import RegionHandle
from tierkv.layout.spec import ModelSpec
from tierkv.transfer.plan import Transfer


@dataclass(frozen=True, slots=True)
class Geometry:
    """What both halves must agree on before a byte is copied: the ranks, and each group's pages, layer by layer."""

    ranks: int
    pages: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, model: ModelSpec) -> Geometry:
        return cls(model.ranks, tuple(tuple(map(str, group.pages)) for group in model.groups))


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):
    """Scheduler half → every worker.

    stores: to be submitted at the start of the next step, when this step's forward pass has written the
        blocks. loads: request id and transfer. failed_loads: requests to be reported as failed at once.
    flush: stores to be finished before this step writes to the device: their blocks have been reused.
    cancel: stores whose blocks may hold something else by now; those not yet submitted are dropped.
    revoke: loads that are to be reported as failed, whatever comes of them.
    ask: if it is not 0, every worker is to answer whether its weights have been given a name.
    """

    region: RegionHandle
    geometry: Geometry
    stores: list[Transfer] = field(default_factory=list)
    loads: list[tuple[str, Transfer]] = field(default_factory=list)
    failed_loads: list[str] = field(default_factory=list)
    flush: set[int] = field(default_factory=set)
    cancel: set[int] = field(default_factory=set)
    revoke: set[int] = field(default_factory=set)
    ask: int = 0


@dataclass(slots=True)
class StepReport(KVConnectorWorkerMetadata):
    """Workers → scheduler half.

    ranks, ok: for each job that ended, how many ranks reported it, and whether all succeeded.
    answers: for each ``ask`` of a plan, how many ranks answer it.
    names: what the weights of the ranks have become (``TierKVConnector.invalidate``), of those that were told.
    """

    ranks: dict[int, int] = field(default_factory=dict)
    ok: dict[int, bool] = field(default_factory=dict)
    answers: dict[int, int] = field(default_factory=dict)
    names: list[str | None] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.ranks or self.answers or self.names)

    def add(self, job_id: int, ok: bool, ranks: int = 1) -> None:
        self.ranks[job_id] = self.ranks.get(job_id, 0) + ranks
        self.ok[job_id] = self.ok.get(job_id, True) and ok

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        assert isinstance(other, StepReport)
        for job_id, ranks in other.ranks.items():
            self.add(job_id, other.ok[job_id], ranks)
        for ask, ranks in other.answers.items():
            self.answers[ask] = self.answers.get(ask, 0) + ranks
        self.names += other.names
        return self
