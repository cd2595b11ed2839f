"""The membership registry between Serve's thread and the router."""

import threading

from router.registry import Members, Registry


def test_a_listener_hears_what_is_known_and_every_change_once() -> None:
    registry = Registry()
    registry.publish("a", {"r1": ("h", 1)})
    heard: list[Members] = []
    remove = registry.listen("a", heard.append)
    registry.publish("a", {"r1": ("h", 1)})
    registry.publish("b", {"x": ("h", 9)})
    registry.publish("a", {"r2": ("h", 2)})
    assert heard == [{"r1": ("h", 1)}, {"r2": ("h", 2)}]
    remove()
    registry.publish("a", {})
    assert len(heard) == 2


def test_nothing_known_is_not_an_empty_set() -> None:
    heard: list[Members] = []
    Registry().listen("a", heard.append)
    assert heard == []


def test_published_sets_are_copies() -> None:
    registry, heard = Registry(), []
    source: Members = {"r": ("h", 1)}
    registry.listen("a", heard.append)
    registry.publish("a", source)
    source["other"] = ("h", 2)
    heard[0]["mine"] = ("h", 3)
    late: list[Members] = []
    registry.listen("a", late.append)
    assert late == [{"r": ("h", 1)}]


def test_a_late_listener_never_ends_on_a_stale_set() -> None:
    for _ in range(50):
        registry, heard = Registry(), []
        registry.publish("a", {"r": ("h", 0)})
        thread = threading.Thread(target=lambda r=registry: [r.publish("a", {"r": ("h", n)}) for n in range(1, 50)])
        thread.start()
        registry.listen("a", heard.append)
        thread.join()
        ports = [members["r"][1] for members in heard]
        assert ports == sorted(ports) and ports[-1] == 49
