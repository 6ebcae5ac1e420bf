"""The one exception for what a user can mend."""


class UserError(ValueError):
    """A problem that the user can mend: an option, a file, a model, a prompt.

    The message is one sentence or two, complete in themselves: what is wrong, the value found, what is allowed, and
    what to do. The command line prints it as it is, without a traceback.
    """
