"""fly_jax inside vLLM: replacements for its verification functions, the plugin that hooks them, the cross-check."""
