"""The token plane's figures for Prometheus, read from the dispatcher when scraped: they cost no token anything."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.dispatch import Dispatcher
from router.stream_state import Phase
from router.wire import Tier


class PlaneCollector(Collector):
    """Register it: ``registry.register(PlaneCollector(dispatcher))``. Names begin with ``prefix`` and a colon."""

    def __init__(self, dispatcher: Dispatcher, prefix: str = "everwarm") -> None:
        self._dispatcher = dispatcher
        self._prefix = prefix

    def collect(self) -> Iterable[Metric]:
        yield from self._requests()
        yield from self._replicas()
        directory = self._dispatcher.placement.directory
        yield self._gauge("directory_pages", "Distinct pages that the directory lists.", directory.num_pages())
        yield self._gauge("pending_reservations", "Reservations of dispatched requests.", len(directory.pending))
        yield self._gauge("live_streams", "Requests that this router has in flight.", len(self._dispatcher.streams))

    def _requests(self) -> Iterable[Metric]:
        counters = self._dispatcher.counters
        events = CounterMetricFamily(
            f"{self._prefix}:dispatch", "What became of requests and streams.", labels=["event"]
        )
        tokens = CounterMetricFamily(f"{self._prefix}:dispatch_tokens", "Tokens at placement.", labels=["kind"])
        for name, value in sorted(counters.items()):
            kind = name.removesuffix("_tokens")
            if kind == name and name != "tokens":
                events.add_metric([name], value)
            else:
                tokens.add_metric(["emitted" if name == "tokens" else kind], value)
        yield events
        yield tokens
        prediction = self._dispatcher.placement.prediction
        predicted = CounterMetricFamily(
            f"{self._prefix}:ttft_predictions", "Predicted times to first token, by error.", labels=["error"]
        )
        predicted.add_metric(["within_15_percent"], prediction.within_15_percent)
        predicted.add_metric(["more"], prediction.count - prediction.within_15_percent)
        yield predicted

    def _replicas(self) -> Iterable[Metric]:
        def gauge(name: str, text: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=["replica"])

        in_sync = gauge("directory_in_sync", "1 while this router's picture of the replica is proven right.")
        admitted = gauge("replica_admitted", "1 while the replica is given new work.")
        queue = gauge("replica_queue_seconds", "Predicted wait for a first token.")
        waiting = gauge("replica_waiting", "Requests without a first token, of all routers.")
        pages = gauge("replica_pages", "Pages listed for the replica on its device.")
        host = gauge("replica_host_pages", "Pages listed for the replica in its host memory.")
        lost = CounterMetricFamily(f"{self._prefix}:connections_lost", "Connections lost.", labels=["replica"])
        faults = CounterMetricFamily(
            f"{self._prefix}:event_stream",
            "Events of the replica's stream, seen and repaired.",
            labels=["replica", "kind"],
        )
        for name, link in sorted(self._dispatcher.links.items()):
            state, slot = link.replica, link.stream.slot
            in_sync.add_metric([name], link.stream.phase == Phase.SYNCED)
            admitted.add_metric([name], state.accepting)
            queue.add_metric([name], state.backlog.queue_ms(link.now()) / 1e3)
            waiting.add_metric([name], len(state.backlog))
            pages.add_metric([name], slot.digests[Tier.DEVICE].count if slot is not None else 0)
            host.add_metric([name], slot.digests[Tier.HOST].count if slot is not None else 0)
            lost.add_metric([name], link.lost_connections)
            for kind, value in vars(link.stream.counters).items():
                faults.add_metric([name, kind], value)
        yield from (in_sync, admitted, queue, waiting, pages, host, lost, faults)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return GaugeMetricFamily(f"{self._prefix}:{name}", text, value=value)
