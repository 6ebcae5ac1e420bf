"""Tasks with known answers, and what each mode of decoding makes of them: fly-jax eval."""
