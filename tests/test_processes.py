"""Two processes with four devices each do what one process with eight does, stop together, and end together."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jax_ppo.runtime import metrics

ROOT = Path(__file__).parents[1]
HEARTBEAT = 10
ITERATIONS = 9
CONFIG = f"""
from jax_ppo.config import default_config


def get_config():
    config = default_config()
    config.model.path = config.data.path = "builtin"
    config.data.max_prompt_tokens, config.data.train_limit, config.data.eval_limit = 40, 100, 16
    config.rollout.batch, config.rollout.max_response_tokens = 16, 16
    config.ppo.minibatches, config.ppo.micro_tokens, config.ppo.kl_coef = 2, 1024, 0.01
    config.reward.custom = {str(ROOT / "tests" / "digit_reward.py")!r} + ":score"
    config.actor_optim.lr = config.critic_optim.lr = 1e-3
    config.eval.every, config.eval.at_start = 3, False
    config.checkpoint.every, config.checkpoint.keep_last = 1, 2
    config.train.iterations = {ITERATIONS}
    config.train.heartbeat_seconds = {HEARTBEAT}
    return config
"""
# What is measured on the clock or on the machine.
UNSTEADY = ("timing_s/", "time/", "perf/")

pytestmark = pytest.mark.slow


class Runs:
    """Starts runs that share what they compiled."""

    def __init__(self, folder):
        self.config, self.cache = folder / "small.py", folder / "cache"
        self.config.write_text(CONFIG)

    def start(self, workdir, count, *flags, differing=()):
        """`count` processes; the last one with further flags."""
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        started = []
        for i in range(count):
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": str(8 // count)}
            environment |= {"JAX_COMPILATION_CACHE_DIR": str(self.cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
            environment |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(i)}
            command = [sys.executable, "-m", "jax_ppo.main", f"--config={self.config}", f"--workdir={workdir}", *flags]
            command += differing if i == count - 1 else ()
            pipe = subprocess.PIPE
            started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True))
        return started


def finish(processes, seconds=300):
    """Exit codes, stdout and stderr of all, without what Gloo says about itself."""
    said = [process.communicate(timeout=seconds) for process in processes]
    quiet = lambda text: "".join(line for line in text.splitlines(True) if "[Gloo]" not in line and "peer ranks" not in line)  # noqa: E731
    return [p.returncode for p in processes], [quiet(out) for out, _ in said], [quiet(err) for _, err in said]


def wait_for(workdir, iteration, processes):
    """Returns once the iteration is logged."""
    while not any(line["iteration"] == iteration for line in metrics.read(workdir)):
        assert all(process.poll() is None for process in processes), finish(processes)
        time.sleep(0.05)


def steady(workdir):
    return [{k: v for k, v in line.items() if not k.startswith(UNSTEADY)} for line in metrics.read(workdir)]


def assert_close(one, other):
    assert [line["iteration"] for line in one] == [line["iteration"] for line in other]
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-5), (a["iteration"], name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def alone(runs, tmp_path_factory):
    """The whole run, of one process with eight devices; JAX_NUM_PROCESSES=1 means that it waits for nobody."""
    workdir = tmp_path_factory.mktemp("alone")
    codes, _, errors = finish(runs.start(workdir, 1))
    assert codes == [0], errors
    return workdir


@pytest.fixture(scope="module")
def together(runs, alone, tmp_path_factory):
    """The first iterations of two processes, until the second one heard SIGTERM: workdir, stdout, stderr, last iteration."""
    workdir = tmp_path_factory.mktemp("together")
    processes = runs.start(workdir, 2)
    wait_for(workdir, 3, processes)
    processes[1].send_signal(signal.SIGTERM)
    codes, said, errors = finish(processes)
    assert codes == [0, 0], errors
    return workdir, said, errors, metrics.read(workdir)[-1]["iteration"]


def test_two_processes_find_the_numbers_of_one(alone, together):
    workdir, _, _, last = together
    assert_close(steady(workdir), steady(alone)[:last])
    for i in (1, 2, 3):
        samples = [(run / "samples" / f"{i:06d}.jsonl").read_text() for run in (alone, workdir)]
        assert samples[0] == samples[1]


def test_a_signal_to_one_stops_both_after_the_same_iteration_saved(together):
    workdir, said, errors, last = together
    assert 4 <= last <= 6 and f"signal 15: saved iteration {last}" in said[0]
    assert errors == ["", ""]
    # The only one with a score, and the newest two.
    assert {p.name for p in (workdir / "checkpoints").iterdir()} == {"3", str(last - 1), str(last)}


def test_one_process_writes_and_speaks(together):
    workdir, said, _, last = together
    assert len((workdir / "metrics.jsonl").read_text().splitlines()) == last
    files = ["builtin", "checkpoints", "config.json", "eval", "metrics.jsonl", "model", "report.html", "samples"]
    assert sorted(p.name for p in workdir.iterdir()) == files
    assert sum(f"{last}/{ITERATIONS} " in line for line in said[0].splitlines()) == 1
    assert said[1] == ""


def test_processes_that_differ_are_refused(runs, tmp_path):
    codes, said, errors = finish(runs.start(tmp_path / "run", 2, differing=["--config.data.train_limit=99"]))
    assert codes == [2, 2], errors
    for error in errors:
        (line,) = error.splitlines()
        assert re.fullmatch(
            r"error: process 1 differs from process 0 in config\.data\.train_limit: 99, not 100;"
            r" training data: '99 problems, \w+', not '100 problems, \w+'",
            line,
        )
    # No table, no progress. (jax 0.12 itself writes a bare "1" in the second process.)
    assert not re.search("[a-z]", "".join(said))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_what_one_process_cannot_read_ends_both(runs, tmp_path):
    codes, _, errors = finish(runs.start(tmp_path / "run", 2, differing=["--config.data.path=/nowhere.jsonl"]))
    assert codes == [2, 2], errors
    assert all(re.fullmatch(r"error: process 1: .*/nowhere\.jsonl.*\n", error) for error in errors), errors


def test_the_death_of_one_ends_the_other_and_a_restart_continues(runs, alone, together):
    workdir, last = together[0], together[3]
    processes = runs.start(workdir, 2)
    wait_for(workdir, last + 1, processes)
    processes[1].kill()
    died = time.monotonic()
    codes, _, errors = finish(processes)
    assert time.monotonic() - died < 2 * HEARTBEAT + 10
    assert codes[1] == -signal.SIGKILL and codes[0] not in (0, 2)
    for i, error in enumerate(errors):
        final = [line for line in error.splitlines() if line.startswith("failed: ")][-1]
        where = (
            rf"failed: iteration [{last + 1}-{last + 3}], stage \w+, process {i} of 2, was the last of this process; .* continues"
        )
        assert re.match(where, final), error

    # What the second process wrote into the newest checkpoint is torn: the first one could read its own part.
    newest = max(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit())
    for file in (workdir / "checkpoints" / str(newest) / "critic" / "ocdbt.process_1" / "d").iterdir():
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    codes, said, errors = finish(runs.start(workdir, 2))
    assert codes == [0, 0], errors
    assert f"checkpoint {newest} is broken: another process cannot read it; going back to {newest - 1}" in said[0]
    assert_close(steady(workdir), steady(alone))
