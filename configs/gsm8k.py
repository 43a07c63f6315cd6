"""GSM8K with Qwen2.5-0.5B-Instruct.

command   python -m jax_ppo.main --config=configs/gsm8k.py
          local files: --config.model.path=DIR --config.data.path=DIR_OR_JSONL (one JSONL file also wants --config.data.eval_path)
hardware  one GPU with 24 GB; more devices need no change (they share the weights), or set --config.mesh.*
expect    strict accuracy of the untouched model is near 0, because it does not write ####; the format comes first, then the
          reasoning. Reports elsewhere reach 53 to 57 % on the test set with PPO; this configuration has not been run to the end.
"""

from jax_ppo.config import default_config


def get_config():
    """Only what differs from the defaults."""
    config = default_config()
    config.model.path = "Qwen/Qwen2.5-0.5B-Instruct"
    config.data.path = "openai/gsm8k"
    config.data.instruction = 'Let\'s think step by step and output the final answer after "####".'
    config.data.max_prompt_tokens = 512
    config.rollout.batch = 256
    config.rollout.max_response_tokens = 512
    config.rollout.slots = 128
    config.ppo.minibatches = 4
    config.ppo.micro_tokens = 8192
    config.ppo.kl_coef = 0.001
    config.actor_optim.lr = 1e-6
    config.critic_optim.lr = 1e-5
    config.train.iterations = 435
    config.eval.every = 20
    config.checkpoint.every = 20
    return config
