"""The mathematics of PPO, as pure functions of arrays and scalars."""
