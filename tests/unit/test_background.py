"""Background work: one piece at a time, and no failure lost."""

import logging
import threading

import pytest

from megatron_async_rl.policy.background import Background


def failing() -> None:
    raise OSError("the disk is gone")


def test_work_runs_next_to_the_caller_and_the_next_waits_for_it():
    background, released, done = Background("writing"), threading.Event(), []

    def first() -> None:
        released.wait()
        done.append("first")

    background.start(first)
    assert background.busy
    assert done == []
    second = threading.Thread(target=background.start, args=(lambda: done.append("second"),))
    second.start()
    assert done == []
    released.set()
    second.join()
    background.finish()
    assert done == ["first", "second"]
    assert not background.busy


@pytest.mark.parametrize("wait", [Background.finish, lambda one: one.start(lambda: None)])
def test_a_failure_is_raised_by_the_next_wait_and_once(wait):
    background = Background("writing")
    background.start(failing)
    with pytest.raises(OSError, match="the disk is gone"):
        wait(background)
    background.finish()


def test_work_that_would_follow_a_failure_is_not_begun():
    background, done = Background("writing"), []
    background.start(failing)
    with pytest.raises(OSError, match="gone"):
        background.start(lambda: done.append("second"))
    background.finish()
    assert done == []


def test_the_end_waits_for_the_work_and_raises_its_failure():
    done = []
    with Background("writing") as background:
        background.start(lambda: done.append("written"))
    assert done == ["written"]
    with pytest.raises(OSError, match="gone"), Background("writing") as background:
        background.start(failing)


def ending_with_a_failure_of_its_own(work) -> None:
    with Background("writing") as background:
        background.start(work)
        raise ValueError("the run")


def test_a_run_that_failed_ends_with_its_own_failure_after_the_work(caplog):
    done = []
    with pytest.raises(ValueError, match="the run"):
        ending_with_a_failure_of_its_own(lambda: done.append("written"))
    assert done == ["written"]
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="the run"):
        ending_with_a_failure_of_its_own(failing)
    assert "writing failed" in caplog.text


def test_work_keeps_no_process_alive():
    background, released, daemons = Background("writing"), threading.Event(), []
    background.start(lambda: daemons.append(threading.current_thread().daemon) or released.wait())
    released.set()
    background.finish()
    assert daemons == [True]


def test_a_look_raises_what_has_failed_and_waits_for_nothing():
    background, released = Background("writing"), threading.Event()

    def late() -> None:
        released.wait()
        failing()

    background.start(late)
    background.check()
    background.settle(0.001)
    assert background.busy
    released.set()
    background.settle(60)
    assert not background.busy
    with pytest.raises(OSError, match="gone"):
        background.check()
    background.check()
