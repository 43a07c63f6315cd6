"""The built-in task: word problems, a small model, no download.

command   make quickstart, or python -m jax_ppo.main --config=configs/quickstart.py
hardware  2 CPU cores, 1.4 GB of memory
time      2 minutes 6 seconds on two quiet cores, compilation included
expect    about 40 % of the held-out problems after the warm start, about 95 % after 20 iterations of PPO
"""

from jax_ppo.config import default_config


def get_config():
    """Only what differs from the defaults."""
    config = default_config()
    config.model.path = "builtin"
    config.model.remat = False
    config.data.path = "builtin"
    config.data.max_prompt_tokens = 40
    config.warmstart.steps = 800
    config.warmstart.lr = 1e-2
    config.rollout.batch = 256
    config.rollout.max_response_tokens = 32
    config.ppo.lam_critic = 0.95
    config.ppo.kl_coef = 0.01
    config.ppo.minibatches = 2
    config.ppo.micro_tokens = 6400
    config.actor_optim.lr = 2e-4
    config.critic_optim.lr = 1e-3
    config.train.iterations = 30
    config.eval.every = 5
    config.checkpoint.every = 10
    return config
