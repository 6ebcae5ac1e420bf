"""Default settings: each number once, read by the types, by the command line and by its help.

They stand apart from the types because `fly-jax --help` shows them and must not import JAX, which takes a second.
"""

ENTROPY_THRESHOLD = 0.3
"""Nats from which FLy may defer a mismatch: vLLM's default."""

ENTROPY_TOP_K = 3
"""Probabilities the entropy is summed over: vLLM's default."""

LARGEST_WINDOW_SIZE = 6
"""W where K allows it: vLLM's default is the smaller of this and K - 1."""

NUM_SPECULATIVE_TOKENS = 16
"""K, draft tokens per cycle."""

PROMPT_LOOKUP_MAX = 3
"""Tokens of the longest n-gram looked up."""

PROMPT_LOOKUP_MIN = 1
"""Tokens of the shortest n-gram looked up."""

MAX_TOKENS = 128
"""Most tokens to generate for a prompt."""
