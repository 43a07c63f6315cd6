"""Is it the reward that teaches? The same run, with the scores of each batch permuted among its responses.

    python tools/control.py --config=configs/quickstart.py --workdir=DIR

Everything else is as in `jax_ppo.main`: the same prompts, warm start, mean score and learning rates. A policy that improves all the
same owes it to something else than the reward.
"""

import dataclasses
import sys
from pathlib import Path

import numpy as np

from jax_ppo.config import Config
from jax_ppo.job import Job, prepare
from jax_ppo.runtime import cli
from jax_ppo.train import carry_out


def shuffled(job: Job) -> Job:
    """The job with a scorer that gives every response the score of another one."""
    rng = np.random.default_rng(job.config.train.seed)
    return dataclasses.replace(job, scorer=lambda *batch: rng.permutation(job.scorer(*batch)))


def run(config: Config, workdir: Path) -> None:
    """Trains with shuffled scores."""
    carry_out(shuffled(prepare(config, workdir)))


if __name__ == "__main__":
    sys.exit(cli.main(sys.argv, lambda config, values: run(config, values.workdir), module="tools.control"))
