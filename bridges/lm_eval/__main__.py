"""The harness's own command line, with the model `fly_jax` registered."""

import os
import sys

from lm_eval.__main__ import cli_evaluate

import fly_jax.bridges.lm_eval  # noqa: F401 - registers the model
from fly_jax.errors import UserError


def main() -> None:
    """Runs the harness; problems of the model that a user can fix are one line and exit status 2."""
    # The harness forks for its bootstrap, which JAX's threads do not survive.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    try:
        cli_evaluate()
    except UserError as error:
        print(f"fly-jax: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
