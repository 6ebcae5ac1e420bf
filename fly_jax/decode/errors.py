"""The one exception of the decoding demo."""


class ModelError(ValueError):
    """A problem with a model or its files that the user can fix.

    The message is one sentence or two, complete in themselves: what is wrong, the value found, what is allowed, and
    what to do. Command-line programs print it as it is, without a traceback.
    """
