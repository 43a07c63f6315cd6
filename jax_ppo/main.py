"""Trains a language model with PPO.

python -m jax_ppo.main --config=configs/X.py [--workdir=DIR] [--config.SECTION.KEY=VALUE ...]

Exit code 0 on success; 2 after one line about a wrong configuration, data set or model directory, before weights are loaded; 1
after a failure while running.
"""

import sys

from jax_ppo import train
from jax_ppo.runtime import cli


def main(argv: list[str]) -> int:
    """Parses the command line and trains; returns the exit code."""
    return cli.main(argv, lambda config, values: train.run(config, values.workdir), module="jax_ppo.main")


if __name__ == "__main__":
    sys.exit(main(sys.argv))
