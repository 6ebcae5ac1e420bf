"""The rule of FLy; `docs/rule.md` says which module holds which section. Private: users import from `fly_jax`."""
