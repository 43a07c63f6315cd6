"""Who is alone and who is not, read from environments as the platforms make them; and what a dead process has left to say."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jax_ppo.runtime import distributed
from jax_ppo.types import InputError

EXPLICIT = {"JAX_COORDINATOR_ADDRESS": "host:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODELIST": "n[1-2]"}
TASK = BATCH | {
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
}


@pytest.mark.parametrize(
    ("environment", "tpu"),
    [
        ({}, False),
        (BATCH, False),  # a batch script counts the tasks of its job before any is started
        (TASK | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, False),
        (EXPLICIT | {"JAX_NUM_PROCESSES": "1"}, False),
        (TASK | {"JAX_NUM_PROCESSES": "1"}, False),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, True),
        ({"TPU_PROCESS_ADDRESSES": "local"}, True),
        ({"TPU_SKIP_MDS_QUERY": "1"}, True),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, False),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False),
        ({"JAX_PROCESS_ID": "0"}, False),
        ({"JAX_NUM_PROCESSES": "1"}, True),
    ],
)
def test_alone(environment, tpu):
    assert distributed.setting(environment, tpu=tpu) is None


def test_by_variables_and_nothing_else_is_asked():
    found = distributed.setting(TASK | EXPLICIT, tpu=True)
    assert found == {
        "coordinator_address": "host:1234",
        "num_processes": 4,
        "process_id": 3,
        "cluster_detection_method": "deactivate",
    }


@pytest.mark.parametrize(
    ("visible", "per_node", "local", "devices"),
    [
        (None, "8(x2)", 3, None),  # no GPUs
        ("0,1,2,3,4,5,6,7", "8(x2)", 3, [3]),
        ("0,1,2,3,4,5,6,7", "4(x2)", 3, [6, 7]),
        ("0,1,2,3", "1(x2)", 0, [0, 1, 2, 3]),
        ("3", "8(x2)", 3, [0]),  # each task sees its own GPU only
        ("0,1,2", "2,1", 1, None),  # unlike nodes: JAX or the user
    ],
)
def test_by_slurm(visible, per_node, local, devices):
    environment = TASK | {"SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_LOCALID": str(local)}
    environment |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = {"num_processes": 16, "process_id": 11, "cluster_detection_method": "slurm", "local_device_ids": devices}
    assert distributed.setting(environment, tpu=False) == found
    assert distributed.setting(environment | {"JAX_LOCAL_DEVICE_IDS": "5"}, tpu=False) == found | {"local_device_ids": None}


@pytest.mark.parametrize(
    "environment", [{"TPU_WORKER_HOSTNAMES": "a,b"}, {}, {"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}]
)
def test_by_the_tpu(environment):
    assert distributed.setting(environment, tpu=True) == {}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"JAX_PROCESS_ID": None}, r"^JAX_PROCESS_ID: not set; several processes need JAX_COORDINATOR_ADDRESS, "),
        ({"JAX_COORDINATOR_ADDRESS": None, "JAX_PROCESS_ID": None}, r"^JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID: not set"),
        ({"JAX_NUM_PROCESSES": None}, "^JAX_NUM_PROCESSES: not set"),
        ({"JAX_NUM_PROCESSES": "two"}, "^JAX_NUM_PROCESSES=two: must be a whole number"),
        ({"JAX_PROCESS_ID": "4"}, r"^JAX_PROCESS_ID=4: must be from 0 to JAX_NUM_PROCESSES - 1 = 3"),
        ({"JAX_COORDINATOR_ADDRESS": "host"}, "^JAX_COORDINATOR_ADDRESS=host: must be HOST:PORT"),
    ],
)
def test_half_of_the_variables(changes, said):
    environment = {name: value for name, value in (EXPLICIT | changes).items() if value is not None}
    with pytest.raises(InputError, match=said):
        distributed.setting(environment, tpu=False)


def test_one_process_passes_through():
    made = np.arange(3)
    assert distributed.agree(lambda: made, lambda _: {"never": "asked"}) is made
    assert distributed.from_first(lambda: made, np.zeros(3)) is made
    assert (distributed.largest(15), distributed.is_first()) == (15, True)
    distributed.wait()
    distributed.note("nowhere")
    assert distributed.end(lambda: 2) == 2
    with pytest.raises(KeyError):
        distributed.end(lambda: {}["missing"])


@pytest.mark.parametrize(
    "ending", ["os.kill(os.getpid(), 9)", "os.abort()", "os.kill(os.getpid(), 15)", "distributed._last_words('')"]
)
def test_last_words(ending):
    """Of a process that cannot speak any more; silence after an end with words of its own."""
    program = f"""if True:
        import os, subprocess
        from jax_ppo.runtime import distributed
        command = ["/bin/sh", "-c", distributed._OBITUARY]
        pipe = subprocess.PIPE
        distributed._obituary.append(subprocess.Popen(command, stdin=pipe, start_new_session=True, bufsize=0))
        distributed.note("iteration 1, stage gen")
        distributed.note("iteration 2, stage adv")
        {ending}
        """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    said = (
        "failed: iteration 2, stage adv, process 0 of 1, was the last of this process; the same command continues from the last"
        " checkpoint\n"
    )
    assert (done.returncode, done.stderr) == ((0, "") if "words" in ending else (done.returncode, said))
    assert done.returncode in (0, -signal.SIGKILL, -signal.SIGABRT, -signal.SIGTERM)
