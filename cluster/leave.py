"""``python -m cluster.leave``: take the Ray node of this machine (or pod) out of the cluster without losing a request.

The preStop hook of the Helm chart's worker pods. It marks the node as draining; Serve then starts replacements
elsewhere, lets the node's replicas, routers and proxy finish their streams, and the node's raylet ends by itself.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import services
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2, gcs_pb2

POLL_S = 0.5
RPC_TIMEOUT_S = 10.0
# Made at run time by protobuf, so a type checker can't see them.
ALIVE: int = getattr(gcs_pb2, "GcsNodeInfo").ALIVE  # noqa: B009
DEAD: int = getattr(gcs_pb2, "GcsNodeInfo").DEAD  # noqa: B009
PREEMPTION: int = getattr(autoscaler_pb2, "DRAIN_NODE_REASON_PREEMPTION")  # noqa: B009


class CannotLeave(Exception):
    """The control plane can't be asked, or knows no such node."""


@dataclass
class Departure:
    """One node on its way out. ``node_id``: hex; None finds the one live node at this machine's address.

    The only user of Ray's drain call, which has no public name in Python.
    """

    address: str = "auto"
    node_id: str | None = None

    def __post_init__(self) -> None:
        try:
            self._gcs = GcsClient(address=services.canonicalize_bootstrap_address_or_die(self.address))
            self.node_id = self.node_id or self._own_node()
        except CannotLeave:
            raise
        except Exception as error:
            raise CannotLeave(f"no answer from Ray's control plane: {error}") from error

    def begin(self, timeout_s: float) -> None:
        """Mark the node as draining. Raises CannotLeave."""
        deadline_ms = int((time.time() + timeout_s) * 1000)
        try:
            accepted, why = self._gcs.drain_node(self.node_id, PREEMPTION, "the pod is going away", deadline_ms)
        except Exception as error:
            raise CannotLeave(f"the drain request failed: {error}") from error
        if not accepted:
            raise CannotLeave(f"the drain request was refused: {why}")

    def wait(self, timeout_s: float) -> bool:
        """Until the node is gone; False when it isn't after ``timeout_s``, or when nobody can say any more."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                if self._state() != ALIVE:
                    return True
            except Exception as error:
                print(f"lost the control plane: {error}", file=sys.stderr)
                return False
            time.sleep(POLL_S)
        return False

    def _nodes(self) -> dict[Any, Any]:
        return self._gcs.get_all_node_info(timeout=RPC_TIMEOUT_S)

    def _state(self) -> int:
        states = {node_id.hex(): info.state for node_id, info in self._nodes().items()}
        return states.get(str(self.node_id), DEAD)

    def _own_node(self) -> str:
        address = ray.util.get_node_ip_address()
        alive = [
            node_id.hex()
            for node_id, info in self._nodes().items()
            if info.state == ALIVE and info.node_manager_address == address
        ]
        if len(alive) != 1:
            raise CannotLeave(f"{len(alive)} live Ray nodes at {address}; name one with --node-id")
        return alive[0]


def main(argv: list[str] | None = None) -> int:
    """Exit status 0: the node has left. 1: it had not when the time was up. 2: it could not be asked to."""
    parser = argparse.ArgumentParser(prog="python -m cluster.leave", description=__doc__)
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds to wait for the node to be gone")
    parser.add_argument(
        "--address", default="auto", help="host:port of Ray's control plane; default: RAY_ADDRESS or the local node's"
    )
    parser.add_argument("--node-id", help="hex id of the node; default: the one at this machine's address")
    options = parser.parse_args(argv)
    started = time.monotonic()
    try:
        departure = Departure(options.address, options.node_id)
        departure.begin(options.timeout)
    except CannotLeave as error:
        print(error, file=sys.stderr)
        return 2
    print(f"node {departure.node_id} is draining, for up to {options.timeout:.0f} s", flush=True)
    gone = departure.wait(options.timeout)
    print(f"{'gone' if gone else 'not gone'} after {time.monotonic() - started:.1f} s")
    return 0 if gone else 1


if __name__ == "__main__":
    sys.exit(main())
