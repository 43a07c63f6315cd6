"""Several processes that do one run together: how they find each other, agree, write once, and end.

Each process runs the same program on the same data and drives its own devices. What comes from outside JAX is therefore compared
(`agree`), taken from the first process (`from_first`), or decided by all (`largest`). One process alone passes through all of this
untouched.
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jax_ppo.types import InputError, RunError

T = TypeVar("T")
EXPLICIT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")

# Outlives the process whose standard input it reads, however that one ends, and then says how far it was.
_OBITUARY = """
trap '' INT TERM HUP
while read -r line; do last=$line; done
[ -z "$last" ] || echo "failed: $last was the last of this process; the same command continues from the last checkpoint" >&2
"""
_obituary: list[subprocess.Popen[bytes]] = []


def setting(environment: Mapping[str, str], *, tpu: bool) -> dict[str, Any] | None:
    """How this process finds the others.

    Args:
      environment: the environment variables.
      tpu:         whether this machine has TPU chips.

    Returns:
      Arguments of `jax.distributed.initialize`, or None where this process is alone: no variable says otherwise, or
      JAX_NUM_PROCESSES or the number of SLURM tasks is 1.

    Raises:
      InputError: for variables that are incomplete or no numbers.
    """
    if "JAX_NUM_PROCESSES" in environment and _number(environment, "JAX_NUM_PROCESSES") == 1:
        return None
    # Set by srun for its tasks, not in a batch script itself, where SLURM_NTASKS counts tasks that are still to be started.
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS") if "SLURM_STEP_NUM_TASKS" in environment else 1
    if all(name in environment for name in EXPLICIT):
        count, index = (_number(environment, name) for name in EXPLICIT[1:])
        if not 0 <= index < count:
            raise InputError(f"JAX_PROCESS_ID={index}: must be from 0 to JAX_NUM_PROCESSES - 1 = {count - 1}")
        if ":" not in environment[EXPLICIT[0]]:
            raise InputError(f"{EXPLICIT[0]}={environment[EXPLICIT[0]]}: must be HOST:PORT, of the process with JAX_PROCESS_ID=0")
        found: dict[str, Any] = {"num_processes": count, "process_id": index, "cluster_detection_method": "deactivate"}
        return {"coordinator_address": environment[EXPLICIT[0]], **found}
    if tasks > 1:
        index, local = _number(environment, "SLURM_PROCID"), _slurm_devices(environment)
        return {"num_processes": tasks, "process_id": index, "cluster_detection_method": "slurm", "local_device_ids": local}
    workers = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES") or ""
    several = "," in workers or int(environment.get("MEGASCALE_NUM_SLICES") or 1) > 1
    if tpu and (several or (not workers and "TPU_SKIP_MDS_QUERY" not in environment)):
        return {}  # JAX asks the variables or the metadata server of the machine
    if EXPLICIT[0] in environment or EXPLICIT[1] in environment:
        missing = [name for name in EXPLICIT if name not in environment]
        raise InputError(f"{' and '.join(missing)}: not set; several processes need {', '.join(EXPLICIT)}")
    return None


def join(heartbeat: int) -> None:
    """Connects this process to the others, where the environment says that there are any; before any device is touched.

    Args:
      heartbeat: seconds without a sign of life after which a process counts as dead, and all others end.

    Raises:
      InputError: see `setting`.
      RunError:   if the others cannot be found.
    """
    found = setting(os.environ, tpu=_has_tpu())
    if found is None:
        return
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    try:
        jax.distributed.initialize(**found, heartbeat_timeout_seconds=heartbeat)
    except (RuntimeError, ValueError) as error:
        raise RunError(f"the other processes were not found: {error}") from error
    if jax.process_count() > 1:
        command = ["/bin/sh", "-c", _OBITUARY]
        _obituary.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, bufsize=0))
        note("the start")


def note(where: str) -> None:
    """Remembers where this process is, to be said if it ends without a word of its own: killed, or by the death of another."""
    if _obituary:
        _last_words(f"{where}, process {jax.process_index()} of {jax.process_count()},")


def end(work: Callable[[], int]) -> int:
    """Does all work of a process and takes leave of the others.

    Args:
      work: returns an exit code.

    Returns:
      The exit code. A process that fails while others live ends here, at once: the usual way out would wait for them.
    """
    try:
        code = work()
        if _obituary:
            _last_words("")  # the end is foreseen, and has words of its own
    except BaseException:
        if not jax.distributed.is_initialized():
            raise
        traceback.print_exc()
        code = 1
    if not jax.distributed.is_initialized():
        return code
    if code == 0:
        jax.distributed.shutdown()
        return 0
    sys.stdout.flush()
    sys.stderr.flush()
    if is_first():
        time.sleep(1)  # its death ends the others; those that fail for the same reason shall still say so
    os._exit(code)


def is_first() -> bool:
    """Whether this is the process that writes files and speaks."""
    return jax.process_index() == 0


def agree(make: Callable[[], T], facts: Callable[[T], Mapping[str, Any]]) -> T:
    """Makes something in every process and makes sure that all have made the same.

    Args:
      make:  called in every process.
      facts: what must be equal everywhere: names, and plain values.

    Returns:
      What `make` returned.

    Raises:
      InputError: in every process, if one of them raised it, or if a fact differs.
    """
    if jax.process_count() == 1:
        return make()
    made: Any = None
    mine: dict[str, Any]
    try:
        made = make()
        mine = {"facts": dict(facts(made))}
    except InputError as refusal:
        mine = {"error": str(refusal)}
    everyone = [json.loads(text) for text in _exchange(json.dumps(mine))]
    errors = {i: said["error"] for i, said in enumerate(everyone) if "error" in said}
    if errors:
        i, error = next(iter(errors.items()))
        raise InputError(error if len(errors) == len(everyone) else f"process {i}: {error}")
    first = everyone[0]["facts"]
    for i, said in enumerate(everyone):
        different = [
            f"{name}: {said['facts'].get(name)!r}, not {first[name]!r}"
            for name in first
            if said["facts"].get(name) != first[name]
        ]
        if different:
            raise InputError(f"process {i} differs from process 0 in {'; '.join(different)}")
    result: T = made
    return result


def first(work: Callable[[], Any]) -> None:
    """Does something in the first process; the others wait for it.

    Raises:
      InputError: in every process, if the first one raised it.
    """
    agree(lambda: work() if is_first() else None, lambda _: {})


def wait() -> None:
    """Returns once all processes are here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("wait")


def largest(value: int) -> int:
    """The largest of the values that the processes have."""
    if jax.process_count() == 1:
        return value
    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


def from_first(make: Callable[[], np.ndarray], like: np.ndarray) -> np.ndarray:
    """What the first process makes, in every process.

    Args:
      make: called in the first process alone.
      like: an array of the same shape and dtype.
    """
    if jax.process_count() == 1:
        return make()
    return np.asarray(multihost_utils.broadcast_one_to_all(make() if is_first() else like))


def _exchange(text: str) -> list[str]:
    """The texts of all processes, in their order."""
    mine = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(mine.size))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: mine.size] = mine
    rows = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def _last_words(text: str) -> None:
    pipe = _obituary[0].stdin
    assert pipe
    pipe.write(f"{text}\n".encode())


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except (KeyError, ValueError):
        raise InputError(f"{name}={environment.get(name)}: must be a whole number") from None


def _slurm_devices(environment: Mapping[str, str]) -> list[int] | None:
    """The GPUs of this task: all it sees where it is alone on its node, else its share. None leaves the choice to JAX."""
    visible = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if not visible or "JAX_LOCAL_DEVICE_IDS" in environment:
        return None
    # "4(x2),1": four tasks on each of two nodes, one on a third; with unlike nodes, the choice is the user's.
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "").split("(")[0]
    if not tasks.isdigit() or len(visible) % int(tasks):
        return None if len(visible) > 1 else [0]
    share = len(visible) // int(tasks)
    local = _number(environment, "SLURM_LOCALID")
    return list(range(local * share, (local + 1) * share))


def _has_tpu() -> bool:
    """Whether this machine has TPU chips that JAX will use."""
    if "tpu" not in os.environ.get("JAX_PLATFORMS", "tpu") or importlib.util.find_spec("libtpu") is None:
        return False
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))
