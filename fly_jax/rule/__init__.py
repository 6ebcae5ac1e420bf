"""The rule of FLy, one module a section; private: what a user calls stands in `fly_jax`."""
