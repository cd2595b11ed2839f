"""Serve's long-poll membership feed, tapped: the only use of the alpha ``RequestRouter`` API.

No request is ever routed by it, since tokens do not cross a Serve handle; ``choose_replicas`` serves diagnostics.
Ray pickles this module by value, so shared state must live elsewhere (:mod:`router.registry`).
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class Membership(RequestRouter):
    """Publishes each running replica's token-plane address under the name given as ``feed``."""

    def initialize_state(self, **kwargs: str) -> None:
        self._feed = kwargs["feed"]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        from router.registry import membership

        members = {}
        for replica in replicas:
            address = replica.replica_metadata.get("token_plane")
            if address is not None:
                members[replica.replica_id.unique_id] = (str(address[0]), int(address[1]))
        membership.publish(self._feed, members)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        return [list(candidate_replicas)]
