"""The rule of FLy; `docs/rule.md` says which module holds which section. Private: what a user calls stands in `fly_jax`."""
