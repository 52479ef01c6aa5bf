"""Claims: who is waited for."""

from __future__ import annotations

import threading

import pytest

from nvme_ops.storage.claims import Claims


def test_what_ctrl_c_left_claimed_is_not_waited_for_by_the_same_thread() -> None:
    claims = Claims(threading.RLock())
    claims.take("key")  # and the interrupt came before the caller could give it back
    claims.take("key")
    assert claims.close()


def test_what_another_thread_is_at_is_waited_for() -> None:
    claims = Claims(threading.RLock())
    taken, go = threading.Event(), threading.Event()
    order: list[str] = []

    def work() -> None:
        with claims.at("key"):
            taken.set()
            go.wait(30)
            order.append("given back")

    thread = threading.Thread(target=work)
    thread.start()
    assert taken.wait(30)
    threading.Timer(0.1, go.set).start()
    assert claims.close()
    order.append("closed")
    thread.join()
    assert order == ["given back", "closed"]
    with pytest.raises(ValueError, match="closed"):
        claims.take("key")
