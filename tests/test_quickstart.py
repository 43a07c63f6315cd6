"""The quickstart itself: it learns what it promises, within the memory it promises, and it is the reward that teaches."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jax_ppo.runtime import metrics

ROOT = Path(__file__).parents[1]


def run(program, workdir, iterations, *flags):
    """One process, as a user starts it. Returns its largest resident memory in bytes, where the system tells.

    `getrusage` would not do: a child inherits the peak of the process that started it, here of all tests before this one.
    """
    command = [sys.executable, *program, "--config=configs/quickstart.py", f"--workdir={workdir}"]
    process, peak = subprocess.Popen([*command, f"--config.train.iterations={iterations}", *flags], cwd=ROOT), 0
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        lines = status.read_text().splitlines() if status.exists() else []
        peak = max([peak, *(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))])
        time.sleep(0.2)
    assert process.returncode == 0
    return peak


def accuracies(workdir):
    return {r["iteration"]: r["val-core/builtin/acc/mean@1"] for r in metrics.read(workdir) if "val-core/builtin/acc/mean@1" in r}


def sampled(workdir):
    """Mean score of the sampled responses, by iteration, from 1. A control that shuffles scores leaves their mean what it is."""
    return [r["critic/score/mean"] for r in metrics.read(workdir)[1:]]


@pytest.mark.slow
def test_quickstart_learns_from_its_reward(tmp_path):
    peak = run(["-m", "jax_ppo.main"], tmp_path / "run", 20)
    before, after = (accuracies(tmp_path / "run")[i] for i in (0, 20))
    assert after >= 0.9
    assert after - before >= 0.3
    # The same warm-started model and the same program, but each response gets the score of another one.
    start = (f"--config.model.path={tmp_path / 'run' / 'model'}", "--config.warmstart.steps=0")
    run(["tools/control.py"], tmp_path / "control", 10, *start)
    assert accuracies(tmp_path / "control")[0] == before
    # What is sampled shows the whole policy. The greedy answer is no measure here: half of the templates stand on the edge
    # between right and wrong, and noise tips them either way.
    scores, control = sampled(tmp_path / "run"), sampled(tmp_path / "control")
    assert np.mean(scores[15:]) - np.mean(scores[:2]) >= 0.25
    assert np.mean(control[5:]) - np.mean(control[:2]) <= 0.1
    assert peak <= 4 * 2**30
    assert peak > 0 or sys.platform != "linux"
    result = json.loads((tmp_path / "run" / "eval" / "000020.json").read_text())
    assert result["count"] == 500
