"""Processes: identity beyond pids, whole trees, and the signals that children start with."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flows.processes import (
    ProcessId,
    alive,
    default_signals,
    descendants,
    end_processes,
    identify,
    send_signal,
)

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
# Says whether SIGINT and SIGTERM are ignored.
SIGNALS = "import signal; print(*(signal.getsignal(n) is signal.SIG_IGN for n in (signal.SIGINT, signal.SIGTERM)))"


@pytest.fixture
def sleeper():
    process = subprocess.Popen(SLEEP)
    yield process
    process.kill()
    process.wait()


def test_an_unreaped_process_is_not_alive():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = identify(process.pid)
    assert identity is not None
    assert alive(identity)
    process.kill()
    # Not waited for: its remains keep the pid until then.
    while alive(identity):
        pass
    assert Path(f"/proc/{process.pid}").exists()
    process.communicate()


def test_a_process_with_the_same_pid_and_another_start_is_another(sleeper):
    identity = identify(sleeper.pid)
    assert identity is not None
    other = ProcessId(identity.pid, identity.started - 1)
    assert not alive(other)
    send_signal(other, signal.SIGKILL)
    assert alive(identity)


def test_descendants_are_found_in_other_sessions():
    code = (
        "import subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print(p.pid, flush=True); p.wait()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    found = [process.pid for process in descendants(child.pid)]
    assert found == [grandchild]
    end_processes(descendants(child.pid), 5.0)
    child.communicate()
    assert identify(grandchild) is None


def test_a_process_that_ignores_sigterm_is_killed():
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    identity = identify(process.pid)
    assert identity is not None
    end_processes([identity], 0.2)
    assert not alive(identity)
    process.communicate()


def test_children_do_not_inherit_ignored_signals():
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        plain = subprocess.run([sys.executable, "-c", SIGNALS], capture_output=True, text=True, check=True)
        with default_signals():
            restored = subprocess.run([sys.executable, "-c", SIGNALS], capture_output=True, text=True, check=True)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert plain.stdout.split() == ["True", "True"]
    assert restored.stdout.split() == ["False", "False"]
