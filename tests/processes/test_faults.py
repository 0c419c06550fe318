"""When one process is lost, all end in time and with its name, whatever they wait for."""

from __future__ import annotations

import signal
import time

import pytest

from tests.processes import child
from tests.processes.starting import COUNT, end, free_port, logs, start

#: Seconds without a sign of life; 50 for users. A busy machine may well let a thread wait for 3.
PATIENCE = 6.0
#: Seconds until all have ended: the patience, the pauses between signs, and a busy machine.
LIMIT = PATIENCE + 40

#: What happens to a process, which, and what the other says.
FAULTS = {
    "an error": ("raise 1", None, "process 1 failed: RuntimeError: the corpus is gone"),
    "an error of the coordinator": ("raise 0", None, "process 0 failed: RuntimeError: the corpus"),
    "killed": ("sleep 1", signal.SIGKILL, "process 1 gave no sign of life for 6 s"),
    "terminated": ("sleep 1", signal.SIGTERM, "process 1 gave no sign of life for 6 s"),
    "stopped": ("sleep 1", signal.SIGSTOP, "process 1 gave no sign of life for 6 s"),
    "the coordinator killed": ("sleep 0", signal.SIGKILL, "process 0, the coordinator, is gone"),
    "the coordinator stopped": ("sleep 0", signal.SIGSTOP, "process 0, the coordinator, did not"),
    "ended early": ("leave 1", None, "of 2 processes, 0 did not come to 'the end'"),
}


def slurm(index):
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(COUNT),
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": str(index),
    }


def open_mpi(index):
    return {
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": str(COUNT),
        "OMPI_COMM_WORLD_RANK": str(index),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(index),
    }


@pytest.mark.parametrize("cluster", [slurm, open_mpi])
def test_processes_find_each_other_on_a_cluster(tmp_path, cluster):
    port = str(free_port())
    places = {
        "JAX_COORDINATOR_PORT": port,
        "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}",
    }
    started = start(child.__file__, tmp_path, "meets", PATIENCE, cluster=cluster, **places)
    assert end(started, 200) == [0] * COUNT, logs(tmp_path)


@pytest.mark.parametrize("what", ["slow 1", "fork 1"])
def test_a_process_that_is_slow_is_waited_for(tmp_path, what):
    """One that waits for a process that it has forked, too, which ends as Python does."""
    (tmp_path / "fault").write_text(what)
    started = start(child.__file__, tmp_path, "waits", PATIENCE)
    assert end(started, 100) == [0] * COUNT, logs(tmp_path)
    told = ["'a note' waits since 1 s for process 1; all have" in log for log in logs(tmp_path)]
    assert told == [what == "slow 1", False]


@pytest.mark.parametrize("fault", FAULTS)
def test_all_end_with_the_reason(tmp_path, fault):
    what, number, said = FAULTS[fault]
    (tmp_path / "fault").write_text(what)
    victim = int(what[-1])
    started = start(child.__file__, tmp_path, "waits", PATIENCE)
    try:
        until = time.monotonic() + 100
        while len(list(tmp_path.glob("ready.*"))) < COUNT and time.monotonic() < until:
            time.sleep(0.05)
        began = time.monotonic()
        if number is not None:
            started[victim].send_signal(number)
        (other,) = end(started[1 - victim : 2 - victim], LIMIT)
        assert other == 1, logs(tmp_path)
        assert time.monotonic() - began < LIMIT
    finally:
        end(started, 0 if number is not None else LIMIT)
    told = logs(tmp_path)[1 - victim]
    assert said in told
    assert "Check failure stack trace" not in told
    # Of the collective that broke a line is told, and its traceback where no cause is found.
    assert number is None or "Traceback" not in told
