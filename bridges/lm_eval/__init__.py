"""The model `fly_jax` of EleutherAI's lm-evaluation-harness (extra: lm-eval); importing this registers it.

The harness finds no models outside its own package: `python -m fly_jax.bridges.lm_eval` is its command line with this
one registered.
"""

from fly_jax.bridges.lm_eval.model import FlyJaxLM

__all__ = ["FlyJaxLM"]
