"""Trains a language model with PPO.

python -m jax_ppo.main --config=configs/X.py [--workdir=DIR] [--config.SECTION.KEY=VALUE ...]

Exit code 0 on success, and after a signal and a save; 2 after one line about a wrong configuration, data set or model directory,
before weights are loaded; 1 after a failure while running; 130 or 143 after a second signal. Several processes, each started by
this command, find each other as `jax_ppo.runtime.distributed` says.
"""

import sys
from types import SimpleNamespace

from jax_ppo import train
from jax_ppo.config import Config
from jax_ppo.runtime import cli, distributed


def main(argv: list[str]) -> int:
    """Parses the command line and trains; returns the exit code."""

    def work(config: Config, values: SimpleNamespace) -> None:
        distributed.join(config.train.heartbeat_seconds)
        train.run(config, values.workdir)

    return distributed.end(lambda: cli.main(argv, work, module="jax_ppo.main"))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
